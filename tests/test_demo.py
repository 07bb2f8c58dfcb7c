"""The demonstration, with fewer steps: it trains, looks, and writes a page that shows text and runs nothing."""

from html.parser import HTMLParser

import numpy as np
import pytest

from rectiformer import demo
from rectiformer.demo_page import Example, weight_map, write_page
from rectiformer.errors import RectiformerError
from rectiformer.terminal import Terminal


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def short(monkeypatch):
    settings = ["data.sentences=300", "data.valid_sentences=20", "vocabulary.size=400", "training.steps=20"]
    settings += ["model.width=32", "model.heads=2", "training.tokens=400", "validation.every=20", "log.every=5"]
    monkeypatch.setattr(demo, "SETTINGS", (*settings, "checkpoint.every=20"))
    monkeypatch.setattr(demo, "TEST_SENTENCES", 12)


def test_both_models_are_trained_and_looked_at(short, tmp_path, capsys):
    with Terminal() as terminal:
        findings = demo.run_demo(tmp_path / "demo", terminal)
    assert [finding.variant for finding in findings] == ["rela-g", "softmax"]
    rectified, softmax = findings
    assert softmax.sparsity == softmax.null_rate == [0.0, 0.0]
    assert all(0 < value < 1 for value in rectified.sparsity)
    printed = capsys.readouterr().out
    assert "rela-g: step 20 of 20" in printed
    assert f"report: {tmp_path / 'demo' / 'report.html'}" in printed
    page = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    assert "script" not in Tags(page).tags
    assert "default-src 'none'" in page


def test_a_failed_training_is_one_line(short, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "VARIANTS", ("rela-g",))
    (tmp_path / "demo" / "rela-g").mkdir(parents=True)
    (tmp_path / "demo" / "rela-g" / "run.json").write_text("{}")
    with pytest.raises(RectiformerError, match=r"^training rela-g ended with exit code 4: rectiformer: [^\n]*$"):
        demo.run_demo(tmp_path / "demo", Terminal())


def test_the_page_shows_hostile_text_and_exact_zeros(tmp_path):
    hostile = "</td><script>alert(1)</script>"
    weights = np.array([[0.0, 2.0], [0.0, 0.0]])
    example = Example("rela-g", hostile, [hostile, "b"], ["x", "y"], weights, {(1, 0)})
    page = write_page(tmp_path / "page.html", (("model",), [(hostile,)]), [[example]])
    seen = Tags(page.read_text(encoding="utf-8"))
    assert "script" not in seen.tags
    assert "".join(seen.text).count(hostile) == 4  # table, sentence, translation, column
    table = weight_map(example)
    assert table.count("background") == 1
    assert table.count("nothing") == 1
    assert table.count("class='gold'") == 1
