"""`score` and `evaluate` as a user calls them: n-best lists, what is kept, and how far they are."""

import json

import pytest
import torch
from commands import lines, run_main
from end_to_end.tiny import overrides

from rectiformer.cli import output
from rectiformer.terminal import Terminal, counting_bar
from rectiformer.toml import load_config
from rectiformer.train.start import train


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A run, a test set of 12 sentences and one of 3 documents."""
    folder = tmp_path_factory.mktemp("world")
    torch.set_num_threads(1)  # as in every test, whose own fixture comes later
    train(load_config(None, overrides(training_steps=2, validation_every=2, checkpoint_every=2)), folder / "run")
    run_main("data", "generate", folder / "test", "--sentences", 12, "--split", "test")
    run_main("data", "generate", folder / "told", "--documents", 3, "--split", "test")
    return folder


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_every_candidate_of_an_nbest_list_is_scored(world, rectiformer, tmp_path, form):
    source, listed = world / "test.de", tmp_path / "test.nbest"
    assert rectiformer("translate", world / "run", source, "--nbest", 3, *form, "--out", listed).code == 0
    records = [
        json.loads(line) for line in lines(rectiformer("translate", world / "run", source, "--nbest", 3, "--json").out)
    ]
    expected = [
        (record["line"], record["source"], each["translation"]) for record in records for each in record["nbest"]
    ]
    found = rectiformer("score", world / "run", source, listed, "--nbest", "--json")
    assert (found.code, found.err) == (0, "")
    scored = [json.loads(line) for line in lines(found.out)]
    assert [(each["line"], each["source"], each["target"]) for each in scored] == expected
    assert len(scored) == 36
    (tmp_path / "flat.de").write_text("".join(f"{source}\n" for _, source, _ in expected), encoding="utf-8")
    (tmp_path / "flat.en").write_text("".join(f"{target}\n" for _, _, target in expected), encoding="utf-8")
    flat = rectiformer("score", world / "run", tmp_path / "flat.de", tmp_path / "flat.en")
    assert rectiformer("score", world / "run", source, listed, "--nbest").out == flat.out


def test_bars_inside_a_candidate_and_empty_candidates_are_kept(world, rectiformer, tmp_path):
    listed = tmp_path / "list"
    listed.write_text("2 ||| a ||| b ||| -1.0\n1 |||  ||| -2.0\n", encoding="utf-8")
    found = rectiformer("score", world / "run", world / "test.de", listed, "--nbest", "--json")
    records = [json.loads(line) for line in lines(found.out)]
    assert [(each["line"], each["target"]) for each in records] == [(2, "a ||| b"), (1, "")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 ||| one ||| 0\nA dog sleeps.", "list:2: not `line ||| text ||| score`, nor a JSON record of"),
        ("1 ||| one", "list:1: not `line ||| text ||| score`"),
        ("one ||| one ||| 1", "list:1: not `line ||| text ||| score`"),
        ('{"line": 1}', "list:1: not `line ||| text ||| score`"),
        ('{"line": 1, "nbest": 3}', "list:1: not `line ||| text ||| score`"),
        ("0 ||| none ||| 1", "list:1: line 0 of test.de, which has lines 1 to 12"),
        ("13 ||| none ||| 1", "list:1: line 13 of test.de, which has lines 1 to 12"),
    ],
)
def test_what_is_no_nbest_list_is_one_line(world, rectiformer, monkeypatch, text, words):
    monkeypatch.chdir(world)
    (world / "list").write_text(text + "\n", encoding="utf-8")
    found = rectiformer("score", "run", "test.de", "list", "--nbest")
    assert (found.code, found.out) == (3, "")
    assert found.err.startswith(f"rectiformer: {words}")
    assert found.err.count("\n") == 1


@pytest.mark.parametrize("documents", ["none", "marker", "blank"])
def test_translations_that_were_kept_score_the_same(world, rectiformer, tmp_path, documents):
    name, how = ("test", []) if documents == "none" else ("told", ["--documents", documents])
    sides = []
    for ending in ("de", "en"):
        text = (world / f"{name}.{ending}").read_text(encoding="utf-8")
        sides.append(tmp_path / ending)
        sides[-1].write_text(text.replace("<d>\n", "\n") if documents == "blank" else text, encoding="utf-8")
    common = ["--reference", sides[1], *how, "--json"]
    ran = rectiformer("evaluate", world / "run", "--source", sides[0], *common, "--out", tmp_path / "out", "--beam", 1)
    assert ran.code == 0
    read = rectiformer("evaluate", "--hypothesis", tmp_path / "out", *common)
    values = [[json.loads(line)["value"] for line in lines(found.out)] for found in (ran, read)]
    assert values[0] == values[1]
    if documents == "none":
        assert (tmp_path / "out").read_text() == rectiformer("translate", world / "run", sides[0], "--beam", 1).out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--hypothesis test.en --reference test.en --out new", "--out is for the translations of a RUN"),
        ("run --source test.de --reference test.en --out test.en", "test.en is named twice, or is also read"),
        ("run --source test.de --reference test.en --out no/new", "cannot write no/new: there is no folder no"),
        ("run --agreement 2 --out new", "--agreement needs a RUN and no texts"),
    ],
)
def test_where_translations_cannot_be_kept_nothing_is_translated(world, rectiformer, monkeypatch, arguments, words):
    monkeypatch.chdir(world)
    before = (world / "test.en").read_bytes()
    found = rectiformer("evaluate", *arguments.split(" "))
    assert found.code == 2
    assert found.err.startswith(f"rectiformer: {words}")
    assert (world / "test.en").read_bytes() == before
    assert not (world / "new").exists()


@pytest.mark.parametrize(
    ("documents", "said"),
    [("none", "translating: 4 of 4"), ("marker", "translating documents: 2 of 2")],
)
def test_a_long_evaluation_says_now_and_then_how_far_it_is(world, rectiformer, monkeypatch, tmp_path, documents, said):
    for ending in ("de", "en"):
        first, second, third, fourth, *_ = (world / f"test.{ending}").read_text(encoding="utf-8").split("\n")
        marker = ["<d>"] * (documents == "marker")
        text = [*marker, first, second, *marker, third, fourth, ""]
        (tmp_path / ending).write_text("\n".join(text), encoding="utf-8")
    texts = ["--source", tmp_path / "de", "--reference", tmp_path / "en", "--documents", documents]
    how = ["--beam", 1, "--batch-tokens", 20]
    assert rectiformer("evaluate", world / "run", *texts, *how).err == ""
    monkeypatch.setattr(output, "SECONDS", 0.0)
    lines_said = lines(rectiformer("evaluate", world / "run", *texts, *how).err)
    assert len(lines_said) > 1
    assert lines_said[-1] == said


def test_on_a_terminal_there_is_a_bar(monkeypatch, capfd):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # makes rich take any stream for a terminal
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(output, "SECONDS", 0.0)
    with output.counting("translating") as tell:
        tell(1, 4)
        tell(4, 4)
    shown = capfd.readouterr().err
    assert "4/4" in shown
    assert "━" in shown
    assert "translating" not in shown


def test_a_bar_of_lines_says_of_what(monkeypatch, capfd):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "60")
    with counting_bar("translating", 4) as tell:
        tell(1.5)
    shown = capfd.readouterr().err
    assert "translating" in shown
    assert "1/4" in shown
    with counting_bar("translating", None) as tell:
        tell(1)
    assert capfd.readouterr().err == ""


def test_a_cell_of_a_notebook_gets_plain_lines(monkeypatch, capfd):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter does for commands, whose output is piped
    monkeypatch.setattr(output, "SECONDS", 0.0)
    with output.counting("translating") as tell:
        tell(1, 4)
        tell(4, 4)
    with Terminal() as terminal:
        terminal.begin(0, 4)
        terminal.advance(1)
        terminal.table(["a"], [["b"]])
    out, err = capfd.readouterr()
    assert "translating" in err
    assert "\x1b" not in out + err
