"""The report as a file: whole, closed to the outside, within its size, and clear about what it leaves out."""

import base64
import dataclasses
import hashlib
import json
import re

import numpy as np
import pytest

from rectiformer.analyze import html_report as report
from rectiformer.analyze.html_report import live_html, report_html, write_report
from rectiformer.analyze.record import from_json, to_json
from rectiformer.errors import ArgumentError, DataError


def data_of(page):
    return json.loads(re.search('id="page-data">(.*?)</script>', page)[1])


def test_page_holds_the_records_as_they_are(made_up):
    data = data_of(report_html([made_up, made_up], title="both"))
    assert data["records"] == [to_json(made_up)] * 2
    assert (data["title"], data["findings"], data["left_out"]) == ("both", [None, None], [])


def test_policy_allows_only_the_script_and_style_of_the_page(made_up):
    page = report_html([made_up])
    policy = re.search('Content-Security-Policy" content="(.*?)"', page)[1]
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy


def test_page_refers_to_no_other_file(made_up):
    page = report_html([made_up])
    assert not re.findall(r"(?:src|href)=", page.replace('href="http://www.w3.org/2000/svg"', ""))
    assert not re.search(r"^(import|export) ", page, re.MULTILINE)
    assert set(re.findall(r"https?://[^\s\"']+", page)) <= {"http://www.w3.org/2000/svg"}


def test_texts_cannot_end_an_element(make_example, make_record):
    text = "</script></title><script>alert(1)</script>"
    page = report_html([make_record([make_example(text, text)], name=text)], title=text)
    assert page.count("</script>") == 2
    assert page.count("</title>") == 1


def test_live_page_names_its_models_and_keeps_its_modules():
    page = live_html(["</script>", "softmax"], ("de", "en"), [("</script>", "b")])
    told = {"live": True, "models": ["</script>", "softmax"], "languages": ["de", "en"]}
    assert data_of(page) == {**told, "examples": [["</script>", "b"]]}
    assert '<script type="module" src="main.js">' in page


@pytest.mark.parametrize(("records", "findings"), [(0, None), (3, None), (2, 1)])
def test_wrong_numbers_of_records_are_one_clear_line(made_up, records, findings):
    with pytest.raises(ArgumentError, match=f"{findings or records} .* give") as error:
        report_html([made_up] * records, findings and [None] * findings)
    assert "\n" not in str(error.value)


def test_a_path_that_cannot_be_written_is_one_clear_line(made_up, tmp_path):
    with pytest.raises(DataError, match=r"cannot write .*missing"):
        write_report(tmp_path / "missing" / "report.html", [made_up])


def test_weights_lose_bits_before_anything_is_left_out(made_up, monkeypatch):
    whole = report.size([to_json(made_up)])
    monkeypatch.setattr(report, "BUDGET", whole - 1)
    data = data_of(report_html([made_up]))
    assert data["left_out"] == [
        "To keep this file small, weights are cut to 12 significant bits: less than 0.05 % off."
    ]
    for example, kept in zip(made_up.examples, from_json(data["records"][0], "page").examples, strict=True):
        for site, cut in zip(example.sites, kept.sites, strict=True):
            np.testing.assert_allclose(cut.weights, site.weights, rtol=0.0005)
            assert np.count_nonzero(cut.weights) == len(site.weights)


def test_tiny_weights_do_not_become_zero():
    weights = np.array([1e-45, -1e-45, 1e-38, 3.4e38], np.float32)
    assert np.count_nonzero(report.cut_weights(weights)) == 4
    assert np.isfinite(report.cut_weights(weights)).all()


def test_what_does_not_fit_is_left_out_from_the_end_and_said(made_up, monkeypatch):
    monkeypatch.setattr(report, "BUDGET", 13_000)
    data = data_of(report_html([made_up]))
    kept = from_json(data["records"][0], "page")
    assert report.size(data["records"]) <= 13_000 + 500
    for kind in ("cross", "encoder", "decoder"):
        lacking = [
            n for n, example in enumerate(kept.examples, 1) if sum(site.kind == kind for site in example.sites) < 2
        ]
        said = [note for note in data["left_out"] if f"layers of the {kind} attention" in note]
        assert (kind == "cross") == (not lacking)  # cross-attention goes last
        assert [note.endswith(f" {report.ranges(lacking)}.") for note in said] == [True] * bool(lacking)


def test_examples_that_do_not_fit_are_counted(make_example, make_record, monkeypatch):
    record = make_record([make_example()] * 40)
    monkeypatch.setattr(report, "BUDGET", 20_000)
    data = data_of(report_html([record]))
    kept = len(data["records"][0]["examples"])
    assert 1 <= kept < 40
    assert f"the examples after {kept}, of 40" in data["left_out"][1]


def test_page_shows_what_was_left_out(show, made_up, monkeypatch):
    monkeypatch.setattr(report, "BUDGET", 13_000)
    page = show([made_up])
    assert "Left out to keep this file below 0.013 MB" in page.locator("#notices").inner_text()


def test_an_example_without_sites_says_so(show, made_up):
    empty = dataclasses.replace(made_up, examples=[dataclasses.replace(made_up.examples[0], sites=[])])
    assert "No attention" in show([empty]).locator(".empty").inner_text()
