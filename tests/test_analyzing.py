"""`analyze` and `explore` as a user calls them: what they print and write, and one line for every mistake."""

import json
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from commands import read_json, run_main
from end_to_end.tiny import overrides

from rectiformer.analyze.record import read_record
from rectiformer.cli import analyzing
from rectiformer.measure.alignment import read_gold
from rectiformer.runs import folder as run_folder
from rectiformer.toml import load_config, override_config
from rectiformer.train.start import train
from rectiformer.translate.align import alignment_table
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Runs of three variants, and a test set with links."""
    folder = tmp_path_factory.mktemp("world")
    torch.set_num_threads(1)  # as in every test, whose own fixture comes later
    changes = {"training_steps": 4, "validation_every": 4, "checkpoint_every": 4}
    for variants in ({"model_variant": "rela-g"}, {"model_variant": "softmax"}, {"model_cross_variant": "inhibitor"}):
        name = next(iter(variants.values()))
        data = None if name == "rela-g" else folder / "rela-g" / "data"
        train(load_config(None, overrides(**changes, **variants)), folder / name, data=data)
    run_main("data", "generate", folder / "test", "--sentences", 12, "--split", "test")
    lines = (folder / "test.align").read_text().split("\n")
    (folder / "short.align").write_text("\n".join(lines[:5]) + "\n")
    (folder / "far.align").write_text("\n".join(["99-0", *lines[1:]]))
    (folder / "bad.align").write_text("\n".join(["0-0 sure", *lines[1:]]))
    (folder / "longer.en").write_bytes((folder / "test.en").read_bytes() + b"One more.\n")
    (folder / "latin1").write_bytes(b"Gut.\nSch\xf6n.\n")
    (folder / "empty").write_bytes(b"")
    return folder


def files(world, gold="test.align"):
    return ["--source", world / "test.de", "--target", world / "test.en", *(["--gold", world / gold] if gold else [])]


def test_the_table_says_what_the_findings_say(world, rectiformer, tmp_path):
    page = tmp_path / "page.html"
    found = rectiformer("analyze", world / "rela-g", *files(world), "--out", tmp_path / "found.json", "--report", page)
    assert (found.code, found.err) == (0, "")
    findings = read_json(tmp_path / "found.json")
    assert (findings.model.name, findings.data.name, findings.data.sentences) == ("rela-g", "test.de", 12)
    lines = found.out.split("\n")
    for kind in ("encoder", "decoder", "cross"):
        (site,) = [site for site in findings.sites if site.kind == kind]
        (line,) = [line for line in lines if line.startswith(f"rela-g  {kind} ")]
        cells = line.split()[2:]
        assert cells[:3] == ["1", f"{np.mean(site.sparsity):.1%}", f"{np.mean(site.null_rate):.1%}"]
        assert cells[3:6] == [str(site.null_rate.count(1.0)), "of", "2"]
        assert cells[6] == f"{site.diversity.js:.3f}"
    best = min(findings.alignment, key=lambda row: row.aer)
    assert cells[7] == f"{best.aer:.3f}"
    head = ["mean", "of", "heads,"] if best.head == "average" else ["head", f"{best.head + 1},"]
    assert cells[8:] == [*head, best.induction]
    assert f"BLEU: rela-g {findings.quality.bleu:.1f} ({findings.quality.signature})" in lines
    report = json.loads(re.search('id="page-data">(.*?)</script>', page.read_text())[1])["summary"]
    assert {report["data"], report["bleu"]} <= set(lines)
    printed = [line.split() for line in lines]
    for row in (report["measure_columns"], *report["measures"]):
        assert " ".join(row).split() in printed
    assert f"wrote {tmp_path / 'found.json'}" in lines


def test_without_gold_links_no_column_is_empty(world, rectiformer):
    head = "model    attention  layer  zeros  null rows  dead heads  diversity"
    for gold, more in (("", ""), ("test.align", "    AER  aligned by")):
        found = rectiformer("analyze", world / "rela-g", *files(world, gold))
        (line,) = [line.rstrip() for line in found.out.split("\n") if line.startswith("model ")]
        assert " ".join(line.split()) == " ".join((head + more).split())


def test_the_alignment_error_is_that_of_align(world, rectiformer):
    found = json.loads(rectiformer("analyze", world / "softmax", *files(world), "--json").out)
    translator = Translator.from_run(world / "softmax", device="cpu")
    pairs = list(zip(*((world / name).read_text().splitlines() for name in ("test.de", "test.en")), strict=True))
    rows = alignment_table(translator, pairs, read_gold((world / "test.align").read_text().splitlines()))
    assert [row["aer"] for row in found["alignment"]] == pytest.approx([row.score.aer for row in rows])


def test_two_runs_share_a_report_and_keep_their_own_files(world, rectiformer, tmp_path):
    arguments = [
        "--report",
        tmp_path / "page.html",
        "--record",
        tmp_path / "seen.json.gz",
        "--out",
        tmp_path / "f.json",
    ]
    arguments += ["--examples", 3]
    found = rectiformer(
        "analyze", world / "rela-g", "--compare", world / "softmax", *files(world), *arguments, "--json"
    )
    assert found.code == 0
    assert [json.loads(line)["model"]["name"] for line in found.out.splitlines()] == ["rela-g", "softmax"]
    names = ["f.json", "seen.json.gz", "f-2.json", "seen-2.json.gz", "page.html"]
    assert found.err.splitlines() == [f"wrote {tmp_path / name}" for name in names]
    records = [read_record(tmp_path / name) for name in ("seen.json.gz", "seen-2.json.gz")]
    assert [record.model.name for record in records] == ["rela-g", "softmax"]
    assert read_json(tmp_path / "f-2.json").model.id == records[1].model.id
    sources = (world / "test.de").read_text().splitlines()
    for record, run in zip(records, ("rela-g", "softmax"), strict=True):
        assert len(record.examples) == 3
        own = Translator.from_run(world / run, device="cpu").translate(sources, SearchOptions())
        for example in record.examples:
            assert example.forced
            assert example.gold is not None
            assert example.translation == own[sources.index(example.source.text)].text
    assert [e.source.text for e in records[0].examples] == [e.source.text for e in records[1].examples]
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<title>rela-g vs. softmax: test.de</title>" in page
    assert records[0].model.id in page
    assert records[1].model.id in page


def test_figures_are_of_all_measures_and_the_examples(world, rectiformer, tmp_path):
    folder = tmp_path / "new" / "figures"
    found = rectiformer("analyze", world / "rela-g", *files(world), "--figures", folder, "--examples", 1)
    assert (found.code, found.err) == (0, "")
    assert found.out.endswith(f"wrote {folder}\n")
    names = {path.name for path in folder.iterdir()}
    for name in ("sparsity", "null-rate", "diversity", "aer", "sparsity-by-length", "memories", "attention-1-1"):
        assert {f"{name}.svg", f"{name}.pdf"} <= names


def test_the_seed_decides_the_examples(world, rectiformer, tmp_path):
    chosen = []
    for seed in (1, 1, 2):
        path = tmp_path / "seen.json"
        rectiformer("analyze", world / "rela-g", *files(world), "--record", path, "--examples", 4, "--seed", seed)
        chosen.append([example.source.text for example in read_record(path).examples])
    assert chosen[0] == chosen[1] != chosen[2]


def test_kinds_and_layers_are_all_that_is_shown(world, rectiformer, tmp_path):
    path = tmp_path / "seen.json"
    asked = ["--sites", "cross,decoder", "--layers", "1", "--record", path, "--examples", 1]
    found = rectiformer("analyze", world / "rela-g", *files(world, ""), *asked)
    assert {(site.kind, site.layer) for site in read_record(path).examples[0].sites} == {("cross", 0), ("decoder", 0)}
    assert [line.split()[1] for line in found.out.split("\n") if line.startswith("rela-g  ")] == ["cross", "decoder"]


def test_the_built_in_corpus_comes_with_links(world, rectiformer, monkeypatch):
    monkeypatch.setattr(analyzing, "BUILT_IN", 10)
    found = json.loads(rectiformer("analyze", world / "rela-g", "--json", "--seed", 3).out)
    assert found["data"]["name"] == "built-in grammar, seed 3"
    assert found["data"]["sentences"] == 10
    assert found["alignment"]


def test_a_run_of_other_text_is_not_measured_on_the_built_in_grammar(world, rectiformer, tmp_path):
    shutil.copytree(world / "rela-g", tmp_path / "run")
    for key, value, text in (("source", '["a.de", "b.de"]', "a.de, b.de"), ("stream", "true", "standard input")):
        other = override_config(run_folder.open_run(world / "rela-g").config, [f"data.{key}={value}"])
        run_folder.change_config(run_folder.open_run(tmp_path / "run"), other)
        found = rectiformer("analyze", world / "rela-g", "--compare", tmp_path / "run")
        line = f"{tmp_path / 'run'} was trained on {text}, not on the built-in grammar; name sentences of your own by "
        assert (found.code, found.out) == (2, "")
        assert found.err == f"rectiformer: {line}--source, and their translations by --target\n"


def test_without_targets_each_model_decodes_its_own_translations(world, rectiformer, tmp_path):
    arguments = ["--source", world / "test.de", "--json", "--record", tmp_path / "seen.json", "--examples", 2]
    found = rectiformer("analyze", world / "rela-g", "--compare", world / "softmax", *arguments)
    assert found.code == 0, found.err
    for number, (line, run) in enumerate(zip(found.out.splitlines(), ("rela-g", "softmax"), strict=True)):
        rectiformer("translate", world / run, world / "test.de", "--out", tmp_path / run)
        given = ["--source", world / "test.de", "--target", tmp_path / run]
        forced = json.loads(rectiformer("analyze", world / run, *given, "--json").out)
        own = json.loads(line)
        assert own["data"].pop("name") == "test.de, own translations"
        assert own["data"] == {key: value for key, value in forced["data"].items() if key != "name"}
        assert own["sites"] == forced["sites"]
        assert (own["quality"], own["alignment"]) == (None, None)
        record = read_record(tmp_path / ("seen-2.json" if number else "seen.json"))
        assert all(example.target.text == example.translation for example in record.examples)


def test_an_attention_without_weights_is_left_out_and_named(world, rectiformer):
    found = rectiformer("analyze", world / "inhibitor", *files(world))
    assert found.code == 0
    assert found.err == ("rectiformer: warning: cross attention is 'inhibitor', which has no weights; it is left out\n")
    assert [line.split()[1] for line in found.out.split("\n") if line.startswith("inhibitor  ")] == [
        "encoder",
        "decoder",
    ]


def test_runs_of_the_same_name_are_called_by_their_paths(world, rectiformer, tmp_path):
    shutil.copytree(world / "softmax", tmp_path / "rela-g")
    found = rectiformer("analyze", world / "rela-g", "--compare", tmp_path / "rela-g", *files(world), "--json")
    names = [json.loads(line)["model"]["name"] for line in found.out.splitlines()]
    assert names == [str(world / "rela-g"), str(tmp_path / "rela-g")]


WRONG = {
    "no such run": (4, ["analyze", "{}/nothing"], "there is no run folder {}/nothing; "),
    "unknown site": (2, ["--sites", "crosss"], "{}/rela-g: unknown attention site 'crosss'; did you mean 'cross'?"),
    "layer that is not there": (
        2,
        ["--layers", "1,5"],
        "{}/rela-g: layer 5 does not exist; layers count from 1, and the encoder has 1, the decoder 1",
    ),
    "layer that is none": (
        2,
        ["--layers", "last"],
        "--layers 'last' is not a list of layers; write their numbers, from 1, as in 1,6",
    ),
    "layer before the first": (
        2,
        ["--layers", "0"],
        "--layers '0' is not a list of layers; write their numbers, from 1, as in 1,6",
    ),
    "kind without weights": (
        2,
        ["--compare", "{}/inhibitor", "--sites", "cross"],
        "{}/inhibitor: cross attention is 'inhibitor', which has no weights; ask for other --sites",
    ),
    "gold of other count": (
        3,
        ["--gold", "{}/short.align"],
        "12 sentence pairs for 5 gold alignments; each pair needs one",
    ),
    "link beyond the sentence": (
        3,
        ["--gold", "{}/far.align"],
        "{}/far.align: pair 1: link 99-0 is beyond the sentence",
    ),
    "no link": (3, ["--gold", "{}/bad.align"], "{}/bad.align:1:5: 'sure' is not a link"),
    "lines that do not match": (3, ["--target", "{}/longer.en"], "{}/test.de"),
    "not UTF-8": (3, ["--source", "{}/latin1", "--target", "{}/latin1"], "{}/latin1:2:4: not UTF-8 (0xF6)"),
    "no such file": (3, ["--source", "{}/none.de"], "cannot read {}/none.de: No such file or directory"),
    "no sentences": (
        3,
        ["--source", "{}/empty", "--target", "{}/empty"],
        "0 sentence pairs; there is nothing to analyze",
    ),
    "too long": (3, ["--max-length", "2"], "pair 1: "),
    "report in no folder": (
        2,
        ["--report", "{}/no/page.html"],
        "cannot write {}/no/page.html: there is no folder {}/no",
    ),
    "record that is a folder": (
        2,
        ["--record", "{}/rela-g"],
        "cannot write {}/rela-g: it is a folder; name another file",
    ),
    "output that is read": (
        2,
        ["--out", "{}/test.en"],
        "{}/test.en is named twice, or is also read; it is untouched; name another file",
    ),
    "one file for two runs": (
        2,
        ["--compare", "{}/softmax", "--out", "{}/x.json", "--record", "{}/x-2.json"],
        "{}/x-2.json is named twice",
    ),
    "one file for two": (2, ["--out", "{}/x", "--record", "{}/x"], "{}/x is named twice"),
    "unknown format": (2, ["--format", "moses"], "unknown value of --format 'moses'"),
}


@pytest.mark.parametrize(("code", "arguments", "line"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_one_line(world, rectiformer, code, arguments, line):
    given = [argument.replace("{}", str(world)) for argument in arguments]
    start = [] if given[0] == "analyze" else ["analyze", world / "rela-g", *files(world, "")]
    found = rectiformer(*start, *given)
    assert found.code == code
    assert found.err.startswith(f"rectiformer: {line.replace('{}', str(world))}")
    assert found.err.count("\n") == 1
    assert found.out == ""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--source", "a", "--gold", "b"],
            "--source and --gold alone; name --source and --target, or neither for built-in text",
        ),
        (
            ["--source", "a", "--documents", "blank"],
            "--documents is about files; name --source and --target, or leave it out",
        ),
        (["--target", "a"], "--target alone; name --source and --target, or neither for built-in text"),
        (["--gold", "a"], "--gold alone; name --source and --target, or neither for built-in text"),
        (["--tokenized"], "--tokenized is about files; name --source and --target, or leave it out"),
    ],
)
def test_half_a_test_set_is_one_line(world, rectiformer, arguments, line):
    found = rectiformer("analyze", world / "rela-g", *arguments)
    assert (found.code, found.err) == (2, f"rectiformer: {line}\n")


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn"])
def test_explore_says_what_to_install(world, rectiformer, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    for name in ("analyze.explorer", "connections", "web"):
        monkeypatch.delitem(sys.modules, f"rectiformer.{name}", raising=False)
    found = rectiformer("explore", world / "rela-g", "--no-browser")
    assert (found.code, found.err) == (
        2,
        f"rectiformer: {missing} is not installed; pip install 'rectiformer[serve]'\n",
    )


def test_explore_of_no_run_is_one_line(world, rectiformer):
    found = rectiformer("explore", world / "rela-g", world / "nothing", "--no-browser")
    assert found.code == 4
    assert found.err.startswith(f"rectiformer: there is no run folder {world / 'nothing'}; ")
    assert found.err.count("\n") == 1
