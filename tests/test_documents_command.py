"""`translate` and `evaluate` with documents: lines keep their places, scores are sacreBLEU's, mistakes are one line."""

import json

import pytest
import sacrebleu
import torch
from commands import lines, run_main

from rectiformer.toml import load_config
from rectiformer.train.start import train

TINY = [
    "data.sentences=200", "data.valid_sentences=20", "vocabulary.size=300", "model.hidden_size=32", "model.num_heads=2",
    "model.encoder_layers=1", "model.decoder_layers=1", "model.ffn_size=32", "training.steps=6",
    "training.batch_tokens=300", "training.device=cpu", "validation.every=6", "validation.sentences=10",
    "data.grammar=documents",
]  # fmt: skip
HOSTILE = "vorher\n<d>\nDer Hund schläft.\n\n<sep> und <d>\n<d>\n<d>\nA\u2028B\u0085C\rD\n\0\n<d>"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A run of documents and one of sentences, briefly trained, and documents to test them on."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("world")
    for name, segment in (("documents", 64), ("sentences", 0)):
        train(load_config(None, [*TINY, f"data.segment_length={segment}"]), folder / name)
    assert run_main("data", "generate", folder / "test", "--split", "test", "--documents", 3) == 0
    (folder / "fewer.en").write_text((folder / "test.en").read_text("utf-8").partition("\n<d>")[0] + "\n", "utf-8")
    return folder


@pytest.mark.parametrize("run", ["documents", "sentences"])
def test_lines_keep_their_places(world, rectiformer, run):
    found = rectiformer("translate", world / run, "--documents", "marker", "--beam", 1, stdin=HOSTILE.encode())
    assert found.code == 0
    given, out = lines(HOSTILE), lines(found.out)
    assert len(out) == len(given)
    assert [index for index, line in enumerate(out) if line == "<d>"] == [1, 5, 6, 9]
    assert all(not line for line, source in zip(out, given, strict=True) if not source.strip())


def test_blank_lines_are_borders_too(world, rectiformer):
    text = "\nDer Hund schläft.\nEr ist alt.\n\n \nDas Haus\n"
    found = rectiformer("translate", world / "documents", "--documents", "blank", "--beam", 1, stdin=text.encode())
    out = lines(found.out)
    assert [out[0], *out[3:5]] == ["", "", " "]
    assert len(out) == 6


def test_json_has_a_record_a_document(world, rectiformer):
    how = ["--documents", "marker", "--beam", 1, "--json"]
    found = rectiformer("translate", world / "documents", *how, stdin=HOSTILE.encode())
    records = [json.loads(line) for line in lines(found.out)]
    assert [record["document"] for record in records] == [1, 2, 3, 4]
    assert [record["line"] for record in records] == [1, 3, 8, 11]
    assert records[1]["sources"] == ["Der Hund schläft.", "", "<sep> und <d>"]
    assert all(len(record["sources"]) == len(record["translations"]) for record in records)
    for record in records:
        assert bool(record["fallbacks"]) == any("did not come back" in note for note in record["warnings"])
        assert all(f"document {record['document']}: {note}" in found.err for note in record["warnings"])


def test_lines_that_are_not_utf8_are_empty_and_told(world, rectiformer):
    how = ["--documents", "blank", "--beam", 1, "--bad-utf8", "skip"]
    found = rectiformer("translate", world / "documents", *how, stdin=b"Der Hund\nSch\xf6n\nEr schl\xc3\xa4ft.\n")
    assert "line 2: not UTF-8, so its translation is empty" in found.err
    assert lines(found.out)[1] == ""
    assert len(lines(found.out)) == 3


def test_documents_are_scored_by_sentence_and_by_document(world, rectiformer):
    source, reference = world / "test.de", world / "test.en"
    how = ["--documents", "marker", "--beam", 1]
    hypothesis = world / "hypothesis"
    assert rectiformer("translate", world / "documents", source, *how, "--out", hypothesis).code == 0
    common = ["--reference", reference, "--documents", "marker", "--json", "--metrics", "bleu"]
    ran = rectiformer("evaluate", world / "documents", "--source", source, *common, "--beam", 1)
    read = rectiformer("evaluate", "--hypothesis", hypothesis, *common)
    assert (ran.code, read.code) == (0, 0)
    assert "3 documents in" in ran.err
    texts = [lines(path.read_text("utf-8")) for path in (hypothesis, reference)]
    sentences = [[line for line in text if line != "<d>"] for text in texts]
    joined = [
        [" ".join(part.split("\n")) for part in "\n".join(text).removeprefix("<d>\n").split("\n<d>\n")]
        for text in texts
    ]
    for found in (ran, read):
        by_sentence, by_document = (json.loads(line) for line in lines(found.out))
        assert (by_sentence["name"], by_document["name"]) == ("s-BLEU", "d-BLEU")
        assert (by_sentence["lines"], by_document["lines"]) == (len(sentences[1]), 3)
        assert by_sentence["value"] == pytest.approx(sacrebleu.corpus_bleu(sentences[0], [sentences[1]]).score)
        assert by_document["value"] == pytest.approx(sacrebleu.corpus_bleu(joined[0], [joined[1]]).score)
        assert "tok:13a" in by_document["signature"]


def test_an_empty_translation_is_no_border(world, rectiformer, tmp_path):
    files = {name: tmp_path / name for name in ("source", "reference", "out", "hypothesis")}
    for name, words in (("source", "Der Hund schläft."), ("reference", "The dog sleeps.")):
        files[name].write_text(f"\n{words}\n{words}\n\n \n{words}\n", "utf-8")
    common = ["--reference", files["reference"], "--documents", "blank", "--json", "--metrics", "bleu"]
    how = ["--source", files["source"], "--beam", 1, "--out", files["out"]]
    ran = rectiformer("evaluate", world / "documents", *common, *how)
    again = rectiformer("evaluate", "--hypothesis", files["out"], *common)
    values = [[json.loads(line)["value"] for line in lines(found.out)] for found in (ran, again)]
    assert values[0] == values[1]
    translated = rectiformer("translate", world / "documents", files["source"], "--documents", "blank", "--beam", 1)
    assert files["out"].read_text("utf-8") == translated.out

    files["hypothesis"].write_text("\n\nThe dog sleeps.\n\n \nThe dog sleeps.\n", "utf-8")
    found = rectiformer("evaluate", "--hypothesis", files["hypothesis"], *common)
    assert [json.loads(line)[name] for line in lines(found.out) for name in ("lines", "empty")] == [3, 1, 2, 0]
    files["hypothesis"].write_text("The dog sleeps.\n\n\nThe dog sleeps.\n", "utf-8")  # other lines: blank is a border
    found = rectiformer("evaluate", "--hypothesis", files["hypothesis"], *common)
    assert found.code == 3
    assert "document 1 has 1 sentences for 2 references" in found.err


def test_two_systems_are_compared_at_both_levels(world, rectiformer):
    reference = world / "test.en"
    how = ["--reference", reference, "--documents", "marker", "--metrics", "bleu", "--samples", 10]
    found = rectiformer("evaluate", "--hypothesis", reference, "--baseline-hypothesis", world / "test.de", *how)
    assert found.code == 0
    assert found.out.count("s-BLEU") == found.out.count("d-BLEU") == 3  # two rows and a signature each
    assert "100.00" in found.out


def test_agreement_is_printed_by_kind(world, rectiformer):
    found = rectiformer("evaluate", world / "documents", "--agreement", 3, "--beam", 1)
    assert found.code == 0
    assert [line.split()[0] for line in lines(found.out)[:4]] == ["words", "all", "pronoun", "term"]
    assert "3 documents in" in found.out
    record = json.loads(rectiformer("evaluate", world / "sentences", "--agreement", 3, "--beam", 1, "--json").out)
    assert record["documents"] == 3
    assert record["fallbacks"] == 0
    assert set(record["counts"]["all"]) == {"right", "wrong", "neither"}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("translate documents test.de --documents paragraph", 2, "unknown value of --documents 'paragraph'"),
        ("translate documents test.de --documents blank --nbest 2", 2, "nbest = 2, but a document has one translation"),
        ("translate documents test.de --documents blank --prefix test.de", 2, "--prefix is about single lines"),
        ("translate documents test.de --documents blank --too-long cut", 2, "--too-long is about single lines"),
        ("translate sentences test.de --documents marker --segment 50", 2, "this model knows single sentences only"),
        ("evaluate documents --agreement 3 --source test.de", 2, "--agreement needs a RUN and no texts"),
        ("evaluate --agreement 3", 2, "--agreement needs a RUN"),
        ("evaluate documents --source test.de", 2, "--reference is missing"),
        (
            "evaluate documents --documents marker --source test.de --reference fewer.en",
            3,
            "sources: 3 documents for 1 references",
        ),
        ("evaluate --hypothesis test.en --documents blank --reference fewer.en", 3, "document 1 has"),
    ],
)
def test_mistakes_are_one_line(world, rectiformer, monkeypatch, arguments, code, words):
    monkeypatch.chdir(world)
    found = rectiformer(*arguments.split())
    assert found.code == code
    assert words in found.err
    assert len(lines(found.err)) == 1
    assert found.out == ""
