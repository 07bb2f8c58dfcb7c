"""The demonstration, with fewer steps: it trains, looks, and writes a report that shows both models."""

import json
import re

import numpy as np
import pytest

from rectiformer import demo
from rectiformer.analyze.findings import AlignmentFindings
from rectiformer.analyze.record import Example, PieceSpan, Side, SiteRecord, from_json
from rectiformer.errors import RectiformerError
from rectiformer.measure.alignment import Links
from rectiformer.terminal import Terminal
from rectiformer.text.grammar import draw_sentences
from rectiformer.translate.align import alignment_table, choose, cross_attention
from rectiformer.translate.evaluate import evaluate
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator


@pytest.fixture
def short(monkeypatch):
    settings = ["data.sentences=300", "data.valid_sentences=20", "vocabulary.size=400", "training.steps=20"]
    settings += [
        "model.hidden_size=32",
        "model.num_heads=2",
        "training.batch_tokens=400",
        "validation.every=20",
        "log.every=5",
    ]
    monkeypatch.setattr(demo, "SETTINGS", (*settings, "checkpoint.every=20"))
    monkeypatch.setattr(demo, "TEST_SENTENCES", 12)


def test_both_models_are_trained_and_looked_at(short, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # rows of the table in one line each
    with Terminal() as terminal:
        looks = demo.run_demo(tmp_path / "demo", terminal)
    printed = capsys.readouterr().out
    assert "rela-g: step 20 of 20" in printed
    assert f"report: {tmp_path / 'demo' / 'report.html'}" in printed
    for line in expected_rows(tmp_path / "demo"):
        assert line in [" ".join(line.split()) for line in printed.split("\n")]
    page = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    data = json.loads(re.search('id="page-data">(.*?)</script>', page)[1])
    records = [from_json(content, "page") for content in data["records"]]
    assert [record.model.name for record in records] == ["rela-g", "softmax"]
    assert data["findings"] == [look.findings.to_json() for look in looks]
    gold = {pair.source: Links(pair.sure, pair.possible) for pair in draw_sentences(12, demo.TEST_SEED, "test")}
    for record in records:
        assert record.examples
        assert all(example.gold == gold[example.source.text] for example in record.examples)


def expected_rows(folder):
    """The rows of the printed table, each number computed from dense weights and by the commands' own parts."""
    pairs = list(draw_sentences(12, demo.TEST_SEED, "test"))
    texts = [(pair.source, pair.target) for pair in pairs]
    for variant in demo.VARIANTS:
        translator = Translator.from_run(folder / variant, device="cpu")
        result = evaluate(translator, [s for s, _ in texts], [t for _, t in texts], SearchOptions(beam=4), ("bleu",))
        best = choose(alignment_table(translator, texts, [Links(pair.sure, pair.possible) for pair in pairs]))
        head = "mean of heads" if best.head == "average" else f"head {best.head + 1}"
        weights = [pair.weights for pair in cross_attention(translator, texts, weights=True)]
        zeros, nulls = [], []
        for layer in range(2):
            flat = [pair[layer] for pair in weights]
            zeros.append(np.concatenate([(each == 0).ravel() for each in flat]).mean())
            nulls.append(np.concatenate([(each == 0).all(-1).ravel() for each in flat]).mean())
        shares = " ".join(f"{share:.1%}" for share in (*zeros, *nulls))
        place = f"layer {best.layer + 1}, {head}, {best.induction}"
        yield f"{variant} {result.scores['bleu'].value:.1f} {best.score.aer:.3f} {place} {shares}"


def test_a_failed_training_is_one_line(short, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "VARIANTS", ("rela-g",))
    (tmp_path / "demo" / "rela-g").mkdir(parents=True)
    (tmp_path / "demo" / "rela-g" / "run.json").write_text("{}")
    with pytest.raises(RectiformerError, match=r"^training rela-g ended with exit code 4: rectiformer: [^\n]*$"):
        demo.run_demo(tmp_path / "demo", Terminal())


def test_words_are_read_off_the_head_that_aligns_best():
    """The pieces of a source word are added up, those of a target word averaged; the end of the source is no word."""
    source = Side(
        "ab c d e", pieces((0, 1), (1, 2), (3, 4), (5, 6), (7, 8), (8, 8)), words((0, 2), (3, 4), (5, 6), (7, 8))
    )
    target = Side("xy z", pieces((0, 1), (1, 2), (3, 4), (4, 4)), words((0, 2), (3, 4)))
    first, second = np.zeros((2, 4, 6), np.float32)
    first[0] = [1, 2, 0, 0, 0, 9]
    first[1] = [3, 0, 4, 1, 1, 9]
    first[3] = [0, 0, 0, 0, 8, 0]
    second[0] = [0, 0, 2, 0, 0, 0]
    site = SiteRecord.from_dense("cross", 0, np.stack([first, second]), np.full((2, 4), 6))
    example = Example(source, target, True, "xy z", None, [site])

    def read(head, induction):
        return demo.read_words(example, AlignmentFindings(0, head, induction, 0.0, 0.0, 0.0))

    assert read(0, "normal") == [("xy", "ab 3.00, c 2.00, d 0.50 and 1 more", "6.00"), ("z", "nothing", "0.00")]
    assert read(0, "shifted") == [("xy", "c 2.00, ab 1.50, d 0.50 and 1 more", "4.50"), ("z", "e 8.00", "8.00")]
    assert read(1, "normal") == [("xy", "c 1.00", "1.00"), ("z", "nothing", "0.00")]
    assert read("average", "normal")[0] == ("xy", "ab 1.50, c 1.50, d 0.25 and 1 more", "3.50")


def pieces(*spans):
    return [PieceSpan("piece", start, stop) for start, stop in spans]


def words(*spans):
    return [(0, 0, start, stop) for start, stop in spans]
