"""The commands that pages show one after the other, run in that order as they stand; only numbers are smaller."""

import lzma
import re
import shutil
from pathlib import Path

import pytest
import torch
from commands import run_main

from rectiformer.measure.alignment import format_links
from rectiformer.text.grammar import draw_documents
from rectiformer.toml import load_config

ROOT = Path(__file__).parents[2]
SHORT = [
    "data.sentences=300",
    "vocabulary.size=400",
    "vocabulary.copies=1",
    "model.hidden_size=32",
    "model.num_heads=2",
    "model.encoder_layers=1",
    "model.decoder_layers=1",
    "model.ffn_size=32",
    "training.steps=40",
    "training.warmup=4",
    "training.batch_tokens=300",
    "training.grad_accumulation=1",
    "training.device=cpu",
    "training.precision=fp32",
    "validation.every=40",
    "validation.sentences=4",
    "checkpoint.every=40",
]
SHOWN = [
    ("README.md", [1]),
    ("docs/translator.md", [1]),
    ("docs/translator.md", [2]),
    ("docs/translator.md", [4]),
    ("docs/translator.md", [5]),
    ("docs/alignment.md", [1, 2, 3, 4]),
    ("docs/instrument.md", [3]),
    ("docs/convert.md", [1]),
    ("docs/model-card.md", [1]),
]
"""Pages, and which of their shell blocks follow each other, counted from 1; what others show has tests of its own."""
FEWER = {"--sentences": "100", "--documents": "4", "--agreement": "4"}
"""Numbers in place of those shown."""
FIRST = {"docs/convert.md": "rectiformer train configs/tiny.toml --out runs/softmax --set model.variant=softmax"}
"""What a page takes for granted."""


@pytest.fixture(scope="module")
def texts():
    """Lines by kind, of documents of the grammar; each begins with <d>."""
    found = {"de": [], "en": [], "align": []}
    for document in draw_documents(60, 1):
        for lines in found.values():
            lines.append("<d>")
        for pair in document:
            found["de"].append(pair.source)
            found["en"].append(pair.target)
            found["align"].append(format_links(pair.sure, pair.possible))
    return found


def put(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(lzma.compress(content) if path.suffix == ".xz" else content)


@pytest.fixture
def folder(tmp_path, texts, monkeypatch):
    """A folder with the repository's configurations, the corpora they name, and the files that pages speak of."""
    torch.set_num_threads(1)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    sentences = {kind: [line for line in lines if line != "<d>"] for kind, lines in texts.items()}
    for name in ("multi30k", "europarl"):
        data = load_config(ROOT / "configs" / f"{name}.toml", []).data
        kept = texts if data.documents == "marker" else sentences
        for file in (*data.source, *data.target, *data.valid_source, *data.valid_target):
            put(tmp_path / file, kept[re.findall(r"\.(de|en)\b", str(file))[-1]])
    for kind, lines in sentences.items():
        put(tmp_path / f"train.{kind}", lines)
        put(tmp_path / f"valid.{kind}", lines[20:40])
        put(tmp_path / f"test.{kind}", lines[:20])
        put(tmp_path / f"test.{kind}.xz", texts[kind][:20])
        put(tmp_path / f"input.{kind}", lines[:5])
        put(tmp_path / f"speech.{kind}", lines[:5])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands_of(page, blocks):
    """The lines of a page's blocks, the words of each."""
    shown = re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for number in blocks for line in shown[number - 1].splitlines()]
    return [line.split() for line in [FIRST.get(page, ""), *lines] if line]


def shortened(words):
    """A command that takes seconds."""
    words = [
        FEWER.get(before, word) if word.isdigit() else word for before, word in zip(["", *words], words, strict=False)
    ]
    if words[1:3] == ["data", "prepare"]:
        return [*words, "--set", "vocabulary.size=400"]
    if words[1] == "convert" and "--resume" not in words:
        return [*words, "--set", "training.steps=4"]
    if words[1] == "train":
        return [*words, *(word for setting in SHORT for word in ("--set", setting))]
    return words


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("page", "blocks"), SHOWN)
def test_the_commands_of_a_page_work_one_after_the_other(page, blocks, folder, capsys):
    commands = commands_of(page, blocks)
    for words in commands:
        if words[1:3] == ["data", "generate"]:
            for file in folder.glob(f"{words[3]}.*"):
                file.unlink()  # the page makes its own
    for words in commands:
        code = run_main(*shortened(words)[1:])
        assert code == 0, f"{' '.join(words)}: {capsys.readouterr().err}"
        if "--out" in words:
            assert list(folder.glob(f"{words[words.index('--out') + 1]}*")), f"{' '.join(words)} left nothing"
