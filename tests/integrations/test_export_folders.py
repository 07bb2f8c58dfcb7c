"""Exported folders are complete or not there, and what was changed in one afterwards is noticed."""

import json
import resource

import pytest
import torch

from rectiformer.config import ModelConfig, VocabularyConfig
from rectiformer.errors import ArgumentError, CheckpointError, NoSpaceError
from rectiformer.integrations.export import export_folder, name_tokens, read_record
from rectiformer.model.transformer import Transformer
from rectiformer.text.grammar import draw_sentences
from rectiformer.text.vocabulary import Vocabulary
from rectiformer.translate.translator import Translator


@pytest.fixture(scope="module")
def words():
    return Vocabulary.train([pair.source for pair in draw_sentences(200, seed=1)], VocabularyConfig(size=120))


@pytest.fixture
def build(words):
    """A translator with random weights, every one of them at work, given keys of [model]."""

    def build(**changes):
        torch.manual_seed(1)
        config = ModelConfig(**{"hidden_size": 32, "num_heads": 2, "ffn_size": 32, "variant": "softmax", **changes})
        model = Transformer(config, words.size, words.size, bos=words.bos, separators=(4, 4)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return Translator(model, words, words)

    return build


@pytest.fixture
def folder(build, tmp_path):
    """An exported folder with one file."""
    with export_folder(build(), tmp_path / "out", "onnx", positions=2048) as folder:
        build().source.save(folder / "source.model")
    return tmp_path / "out"


def test_a_record_describes_what_was_exported(folder, words):
    record = read_record(folder, "onnx")
    assert record["model"]["variant"] == "softmax"
    assert record["target"]["size"] == words.size
    assert record["target"]["symbols"] == {"pad": 0, "unk": 1, "bos": 2, "eos": 3, "separator": None}
    assert record["files"] == {"source.model": words.sha256}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "source.model").write_bytes(b"other"), "its hash is not the one it was written with"),
        (lambda folder: (folder / "source.model").unlink(), "it is missing, or not a file"),
        (lambda folder: (folder / "export.json").unlink(), "it has no export.json"),
        (lambda folder: (folder / "export.json").write_text("{"), "it is not JSON"),
        (lambda folder: change(folder, format=2), r"format 2 of 'onnx', but format 1 of 'onnx' is needed"),
        (lambda folder: change(folder, kind="other"), r"format 1 of 'other', but"),
        (lambda folder: change(folder, files={"../source.model": "0"}), "it is missing, or not a file"),
        (lambda folder: change(folder, files=[]), "it lists no files"),
    ],
)
def test_a_changed_folder_is_refused(folder, damage, message):
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        read_record(folder, "onnx")


def change(folder, **changes):
    path = folder / "export.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_an_existing_folder_is_never_touched(build, folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(CheckpointError, match="exists and is untouched"), export_folder(build(), folder, "onnx"):
        pass
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_failure_leaves_nothing_behind(build, tmp_path):
    def fail(folder):
        (folder / "half").write_bytes(b"half")
        raise ArgumentError("no")

    with pytest.raises(ArgumentError, match="no"), export_folder(build(), tmp_path / "out", "onnx") as folder:
        fail(folder)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_behind(build, tmp_path):
    pytest.importorskip("transformers")
    from rectiformer.integrations.marian import export_transformers

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # as if the disk ended there
    try:
        with pytest.raises(NoSpaceError, match="no space left while writing"):
            export_transformers(build(), tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_special_tokens_have_the_names_other_engines_expect(words):
    names = name_tokens(words)
    assert names[:4] == ["<pad>", "<unk>", "<s>", "</s>"]
    assert len(set(names)) == words.size


CANNOT = {
    "pre": ({"norm": "pre"}, "no layers with model.norm = 'pre', only with 'post'"),
    "memory": ({"memory": "softmax"}, "no layers with model.memory = 'softmax', only with 'relu'"),
    "epsilon": ({"variant": "rela", "norm_epsilon": 0.01}, "no layers with model.norm_epsilon = 0.01, only with 1e-08"),
}


@pytest.mark.parametrize("case", CANNOT)
@pytest.mark.parametrize("format", ["ctranslate2", "transformers"])
def test_layers_that_an_engine_lacks_are_named(case, format, build, tmp_path):
    pytest.importorskip(format)
    from rectiformer.cli.exporting import EXPORTERS

    changes, message = CANNOT[case]
    with pytest.raises(ArgumentError, match=message):
        EXPORTERS[format](build(**changes), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ["ctranslate2", "transformers", "onnx"])
def test_positions_that_are_counted_in_sentences_are_refused(format, build, tmp_path):
    pytest.importorskip(format)
    from rectiformer.cli.exporting import EXPORTERS

    with pytest.raises(
        ArgumentError, match=r"counts positions through the sequence.*only rectiformer itself can run it"
    ):
        EXPORTERS[format](build(positions="sentence"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"variant": "rela-g"},
            "cannot compute the encoder attention of this model, 'rela-g', only softmax, rela, rela-i,",
        ),
        (
            {"variant": "sparsemax"},
            "cannot compute the encoder attention of this model, 'sparsemax', only softmax, rela,",
        ),
        ({"variant": "reluformer"}, "cannot center keys, as model.center_keys = 'auto' does for 'reluformer'"),
        ({"variant": "rela", "score_bias": "open"}, "MarianMT cannot add model.score_bias = 'open' to its scores"),
        ({"cross_variant": "rela"}, "MarianMT has one attention for all sites"),
    ],
)
def test_attention_that_marian_lacks_is_named(changes, message, build, tmp_path):
    pytest.importorskip("transformers")
    from rectiformer.integrations.marian import export_transformers

    with pytest.raises(ArgumentError, match=message):
        export_transformers(build(**changes), tmp_path / "out")


def test_attention_that_ctranslate2_lacks_is_named(build, tmp_path):
    pytest.importorskip("ctranslate2")
    from rectiformer.integrations.ctranslate2 import export_ctranslate2

    with pytest.raises(
        ArgumentError, match="the cross attention of this model, 'rela', only softmax; export it with --to onnx"
    ):
        export_ctranslate2(build(cross_variant="rela"), tmp_path / "out")
