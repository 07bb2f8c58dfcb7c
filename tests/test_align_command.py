"""`rectiformer align` with two directions, formats and intervals, and the benchmark that compares it with eflomal."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import run_main

from rectiformer.measure.alignment import FORMATS, HEURISTICS, alignment_error, read_gold, symmetrize, write_links
from rectiformer.toml import load_config
from rectiformer.train.start import train
from rectiformer.translate.align import align_backward, align_direction
from rectiformer.translate.translator import Translator

ROOT = Path(__file__).parent.parent
TINY = {
    "vocabulary.size": 200,
    "model.hidden_size": 32,
    "model.num_heads": 2,
    "model.encoder_layers": 1,
    "model.decoder_layers": 2,
    "model.ffn_size": 32,
    "training.steps": 4,
    "training.batch_tokens": 300,
    "training.learning_rate": 0.3,
    "training.device": "cpu",
    "validation.every": 4,
    "validation.metric": "loss",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Runs of both directions, briefly trained on the built-in grammar, and pairs of it with gold links."""
    folder = tmp_path_factory.mktemp("world")
    for name, count in (("train", 200), ("valid", 4), ("test", 12)):
        assert run_main("data", "generate", folder / name, "--split", name, "--sentences", count) == 0
    for source, target in (("de", "en"), ("en", "de")):
        files = {"source": f"train.{source}", "target": f"train.{target}"}
        files |= {"valid_source": f"valid.{source}", "valid_target": f"valid.{target}"}
        settings = TINY | {f"data.{key}": folder / name for key, name in files.items()}
        train(load_config(None, [f"{key}={value}" for key, value in settings.items()]), folder / f"{source}-{target}")
    pairs = list(
        zip(*((folder / f"test.{side}").read_text("utf-8").split("\n")[:-1] for side in ("de", "en")), strict=True)
    )
    return SimpleNamespace(
        folder=folder, pairs=pairs, gold=read_gold((folder / "test.align").read_text().split("\n")[:-1])
    )


@pytest.fixture(scope="module")
def directions(world):
    """What the library finds, to compare the command with."""
    runs = [Translator.from_run(world.folder / name) for name in ("de-en", "en-de")]
    return align_direction(runs[0], world.pairs).links, align_backward(runs[1], world.pairs).links


def arguments(world, *more):
    return ["align", world.folder / "de-en", world.folder / "test.de", world.folder / "test.en", *more]


def both(world, how="grow-diag-final-and"):
    return ["--reverse", world.folder / "en-de", "--symmetrize", how]


@pytest.mark.parametrize("how", HEURISTICS)
def test_two_directions_become_one(world, directions, rectiformer, how):
    expected = [symmetrize(*links, how) for links in zip(*directions, strict=True)]
    assert expected != list(directions[0])
    found = rectiformer(*arguments(world, *both(world, how)))
    assert (found.code, found.err) == (0, "")
    assert found.out == "".join(f"{line}\n" for line in write_links(expected))


def test_a_reverse_run_reads_pairs_the_other_way_and_its_links_are_turned_back(world, directions):
    """By hand: pairs exchanged before, links after."""
    reverse = Translator.from_run(world.folder / "en-de")
    backward = align_direction(reverse, [(target, source) for source, target in world.pairs]).links
    assert directions[1] == [{(i, j) for j, i in links} for links in backward]


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_written_and_read(world, directions, rectiformer, tmp_path, format):
    """Links written once, then given as gold: each of them is right."""
    own = ["--layer", 2, "--head", "average", "--induction", "normal", "--format", format]
    written = rectiformer(*arguments(world, *own, "--out", tmp_path / "links"))
    assert (written.code, written.out) == (0, "")
    assert (tmp_path / "links").read_text() == "".join(f"{line}\n" for line in write_links(directions[0], format))
    scored = rectiformer(*arguments(world, *own, "--gold", tmp_path / "links", "--out", tmp_path / "again"))
    assert scored.err.startswith(
        "layer 2, head average, normal: AER 0.0000 (95 % 0.0000 to 0.0000), precision 1.0000, "
    )


def test_scores_are_of_each_direction_and_of_both_together(world, rectiformer, tmp_path):
    gold = ["--gold", world.folder / "test.align", "--out", tmp_path / "links"]
    plain, wide = (rectiformer(*arguments(world, *both(world), *gold, *more)) for more in ([], ["--intervals"]))
    for found, intervals in ((plain, 1), (wide, 3)):
        lines = found.err.removesuffix("\n").split("\n")
        starts = ["forward, layer ", "backward, layer ", "grow-diag-final-and: AER "]
        assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))
        assert [line.count("(95 % ") for line in lines] == [intervals] * 3
    links = read_gold((tmp_path / "links").read_text().split("\n")[:-1])
    score = alignment_error([each.sure for each in links], world.gold)
    assert f"grow-diag-final-and: AER {score.aer:.4f} (95 % " in plain.err
    table = rectiformer(*arguments(world, *both(world), *gold[:2], "--table"))
    assert table.out.count("induction") == 2
    assert table.out.endswith(plain.err.split("\n")[2] + "\n")


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--reverse", "en-de"], 2, "--reverse and --symmetrize need each other"),
        (["--symmetrize", "union"], 2, "--reverse and --symmetrize need each other"),
        (
            ["--reverse", "en-de", "--symmetrize", "grow-diag-finale"],
            2,
            "unknown symmetrization 'grow-diag-finale'; did",
        ),
        (["--format", "giza"], 2, "unknown value of --format 'giza'; known are pharaoh, talp, naacl"),
        (["--format", "pharao"], 2, "unknown value of --format 'pharao'; did you mean 'pharaoh'"),
        (["--intervals"], 2, "--intervals need --gold, the right links"),
        (["--gold", "test.align", "--format", "talp"], 3, "test.align:1:1: '0-0' is not a link; write i-j"),
        (["--gold", "test.align", "--format", "naacl"], 3, "test.align:1: '0-0 "),
        (["--gold", "beyond.align"], 3, "beyond.align: pair 1: link 99-0 is beyond the sentence, which has "),
        (["--gold", "short.align"], 3, "12 sentence pairs for 1 gold alignments"),
        (["--reverse", "missing", "--symmetrize", "union"], 4, "there is no run folder missing"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(world, rectiformer, monkeypatch, more, code, words):
    monkeypatch.chdir(world.folder)
    (world.folder / "beyond.align").write_text("99-0\n" + "\n" * 11)
    (world.folder / "short.align").write_text("0-0\n")
    found = rectiformer("align", "de-en", "test.de", "test.en", *more)
    assert found.err.startswith(f"rectiformer: {words}")
    assert (found.code, found.out, found.err.count("\n")) == (code, "", 1)


def run_benchmark(world, *more, **environment):
    files = [world.folder / name for name in ("de-en", "test.de", "test.en")]
    command = [sys.executable, ROOT / "benchmarks" / "alignment.py", *files, "--gold", world.folder / "test.align"]
    run = subprocess.run(
        [*command, "--reverse", world.folder / "en-de", *more],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_benchmark_scores_the_runs_and_says_when_eflomal_is_missing(world, tmp_path):
    printed = run_benchmark(world, "--out", tmp_path / "points.jsonl", "--symmetrize", "union", "intersection")
    points = [json.loads(line) for line in (tmp_path / "points.jsonl").read_text().split("\n") if line]
    ours = [f"de-en, {what}" for what in ("forward", "backward", "union", "intersection")]
    assert [point["name"] for point in points][:4] == ours
    for point in points:
        rate, low, high = point["aer"]
        assert 0 <= low <= rate <= high <= 1
        assert f"{point['name']}: AER {rate:.4f} (95 % {low:.4f} to {high:.4f})" in printed
        assert {"commit", "device", "command", "sentences"} <= point.keys()
    assert len(points) == 8 or "eflomal is not installed and left out; pip install eflomal" in printed


STAND_IN = '''
class Aligner:
    """Links word i to word i; so does the reverse. The files it writes are eflomal's."""
    def align(self, source, target, links_filename_fwd, links_filename_rev):
        for name in (links_filename_fwd, links_filename_rev):
            with open(name, "w") as file:
                for left, right in zip(source, target, strict=True):
                    words = range(min(len(left.split()), len(right.split())))
                    print(" ".join(f"{i}-{i}" for i in words), file=file)
'''


def test_the_benchmark_scores_what_eflomal_writes_for_the_pairs_only(world, tmp_path):
    """A diagonal aligner in eflomal's place, so that its scores are known; it gets the text to learn from first."""
    (tmp_path / "eflomal.py").write_text(STAND_IN)
    train = ["--train-source", world.folder / "train.de", "--train-target", world.folder / "train.en"]
    printed = run_benchmark(world, *train, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    sizes = zip(*(
        [len(line.split()) for line in (world.folder / f"test.tok.{side}").read_text("utf-8").split("\n")[:-1]]
        for side in ("de", "en")
    ), strict=True)  # fmt: skip
    diagonal = [{(i, i) for i in range(min(pair))} for pair in sizes]
    assert f"eflomal, grow-diag-final-and: AER {alignment_error(diagonal, world.gold).aer:.4f} " in printed
