"""`analyze --documents` as a user calls it: segments of whole documents in table, record and report."""

import json
from itertools import chain

import pytest
import torch
from commands import read_json
from end_to_end.tiny import overrides

from rectiformer.analyze.record import read_record
from rectiformer.cli.analyzing import read_document_pairs
from rectiformer.text.documents import split_documents
from rectiformer.text.grammar import draw_documents
from rectiformer.toml import load_config
from rectiformer.train.start import train

SHORT = {"training_steps": 4, "validation_every": 4, "checkpoint_every": 4, "data_grammar": "documents"}
RUNS = {"rela": ("rela-g", 32), "softmax": ("softmax", 32), "longer": ("rela-g", 64), "sentences": ("softmax", 0)}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Runs of documents and of sentences, and documents to look at."""
    folder = tmp_path_factory.mktemp("world")
    torch.set_num_threads(1)  # as in every test, whose own fixture comes later
    for name, (variant, segment) in RUNS.items():
        data = folder / "rela" / "data" if name == "softmax" else None
        changes = {**SHORT, "model_variant": variant, "data_segment_length": segment}
        train(load_config(None, overrides(**changes)), folder / name, data=data)
    openings = [document[:4] for document in draw_documents(3, 1, "test")]
    for side, name in (("de", "source"), ("en", "target")):
        marked = "".join(
            f"{line}\n" for pairs in openings for line in ("<d>", *(getattr(pair, name) for pair in pairs))
        )
        (folder / f"test.{side}").write_text(marked)
        (folder / f"blank.{side}").write_text(marked.replace("<d>\n", "\n"))
        (folder / f"holed.{side}").write_text(marked + ("Ja.\n" if side == "de" else "\n"))
        (folder / f"odd.{side}").write_text(marked + ("<d>\n" if side == "de" else "Yes.\n"))
        (folder / f"empty.{side}").write_text("<d>\n<d>\n")
    return folder


@pytest.fixture
def analyze(world, rectiformer):
    """Calls `analyze` with runs by name."""

    def run(name, *arguments, files="test", documents="marker", other=None):
        given = [world / name, "--source", world / f"{files}.de", "--target", world / f"{files}.en"]
        given += ["--compare", world / other] if other else []
        return rectiformer("analyze", *given, "--documents", documents, *arguments)

    return run


def documents_of(world):
    return [each.sentences for each in split_documents((world / "test.de").read_text().splitlines(), "marker")]


def own_notes(said):
    """Warnings but the one on how an untrained model translates."""
    lines = [line.removeprefix("rectiformer: warning: ") for line in said.splitlines()]
    return [line for line in lines if not line.startswith("for BLEU, ")]


def test_two_runs_of_documents_show_the_same_segments(world, analyze, tmp_path):
    outputs = ["--record", tmp_path / "seen.json", "--report", tmp_path / "page.html", "--out", tmp_path / "f.json"]
    found = analyze("rela", *outputs, "--examples", 3, other="softmax")
    assert found.code == 0
    assert own_notes(found.err) == []
    records = [read_record(tmp_path / name) for name in ("seen.json", "seen-2.json")]
    assert [each.model.name for each in records] == ["rela", "softmax"]
    texts = [[example.source.text for example in each.examples] for each in records]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 3
    assert any(len(example.source.sentences) > 1 for example in records[0].examples)
    for example in records[0].examples:
        assert any(example.source.text in " ".join(document) for document in documents_of(world))
        assert len(example.source.pieces) <= 32
        assert example.translation is not None
    page = (tmp_path / "page.html").read_text()
    assert "<title>rela vs. softmax: test.de</title>" in page
    assert '"sentences":' in page


def test_the_table_says_where_cross_attention_goes(world, analyze, tmp_path):
    found = analyze("rela", "--out", tmp_path / "f.json")
    findings = read_json(tmp_path / "f.json")
    (each,) = findings.distances
    documents = documents_of(world)
    counts = (findings.data.documents, findings.data.sentences)
    assert counts == (len(documents), sum(map(len, documents)))
    lines = found.out.split("\n")
    assert lines[0].startswith(f"test.de: {counts[0]} documents, {counts[1]} sentences, ")
    shares = (each.aligned, each.neighbors, each.farther, each.between, each.null_rate)
    row = ["rela", str(findings.data.segments), "1", *(f"{share:.1%}" for share in shares)]
    assert row in [line.split() for line in lines]
    assert sum(shares[:4]) == pytest.approx(1)
    assert each.neighbors > 0


def test_a_run_of_sentences_reads_each_by_itself_and_that_is_said(world, analyze, tmp_path):
    found = analyze("rela", "--record", tmp_path / "seen.json", "--json", other="sentences")
    sentences = list(chain.from_iterable(documents_of(world)))
    data = [json.loads(line)["data"] for line in found.out.splitlines()]
    assert data[0]["segments"] < data[1]["segments"] == data[1]["sentences"] == len(sentences)
    note = "sentences was trained on sentences (data.segment_length = 0), so it reads each one by itself"
    assert own_notes(found.err)[0] == note
    shown = [read_record(tmp_path / name).examples for name in ("seen.json", "seen-2.json")]
    for whole, single in zip(*shown, strict=True):
        assert single.source.text in sentences
        assert whole.source.text.endswith(single.source.text)


def test_runs_of_other_segments_are_compared_on_the_smaller_ones(analyze):
    found = analyze("longer", "--json", other="rela")
    alone = json.loads(analyze("longer", "--json").out)
    assert own_notes(found.err)[0] == (
        "the runs were trained on segments of 64 and 32 subwords; to be compared, both read those of 32"
    )
    segments = [json.loads(line)["data"]["segments"] for line in found.out.splitlines()]
    assert segments[0] == segments[1] > alone["data"]["segments"]


def test_blank_lines_are_borders_and_pairs_with_a_blank_side_are_left_out(world, capfd):
    def read(name, documents):
        return read_document_pairs(str(world / f"{name}.de"), str(world / f"{name}.en"), documents)

    marked = read("test", "marker")
    assert [[source for source, _ in each] for each in marked] == documents_of(world)
    assert read("blank", "blank") == marked
    assert capfd.readouterr().err == ""
    assert read("holed", "marker") == marked
    assert own_notes(capfd.readouterr().err) == ["1 sentence pairs have a blank side; they are left out"]


@pytest.mark.parametrize(
    ("code", "how", "line"),
    [
        (2, {"documents": "paragraph"}, "unknown value of --documents 'paragraph'"),
        (2, {"more": ["--gold", "x"]}, "--gold is about single lines; leave it or --documents out"),
        (3, {"files": "odd"}, "{}/odd.de:"),
        (3, {"files": "empty"}, "0 sentence pairs; there is nothing to analyze"),
        (3, {"more": ["--max-length", "4"]}, "document 1, sentence "),
    ],
    ids=["unknown", "gold", "marker on one side", "no sentences", "too long"],
)
def test_a_mistake_is_one_line(world, analyze, code, how, line):
    more = how.pop("more", [])
    found = analyze("rela", *more, **how)
    assert (found.code, found.out) == (code, "")
    assert found.err.startswith(f"rectiformer: {line.format(world)}")
    assert found.err.count("\n") == 1


def test_documents_need_files(world, rectiformer):
    found = rectiformer("analyze", world / "rela", "--documents", "marker")
    said = "rectiformer: --documents is about files; name --source and --target, or leave it out\n"
    assert (found.code, found.err) == (2, said)
