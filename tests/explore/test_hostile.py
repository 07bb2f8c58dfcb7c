"""Nothing in a record does more than be read: hostile text, saved drawings, broken data, foreign frames."""

import json
from html import escape
from xml.etree import ElementTree

import pytest
from explore.reading import act_and_wait, make_findings

from rectiformer.analyze.html_report import report_html

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = [
    "</script><img/src=x/onerror=alert(1)>",
    "<!--<script>",
    "&lt;b&gt;${alert(1)}",
    "a\u202eb\u2066c",
    "👩\u200d👩\u200d👧",
    "\u2028\u2029\x01\x7f",
    "e\u0301\u0301",
    "\ud800",
    "x" * 10_000,
]


def views_of(page):
    """Each view in turn, once it is drawn."""
    for number in range(page.locator("#tabs button").count()):
        if number:
            act_and_wait(page, lambda key=str(number + 1): page.keyboard.press(key))
        yield page.locator("body").get_attribute("data-view")


def test_hostile_text_stays_text(show, make_example, make_record):
    text = " ".join(HOSTILE)
    record = make_record([make_example(text, text, length=20_000)] * 2, name=HOSTILE[0])
    findings = make_findings([("cross", 0)])
    findings["data"]["name"] = findings["model"]["name"] = findings["quality"]["signature"] = HOSTILE[0]
    page = show([record, record], [findings, findings], at="layer=2", title=HOSTILE[0])
    assert page.title() == HOSTILE[0]
    seen = []
    for view in views_of(page):
        seen.append(view)
        assert page.locator("img, iframe, object").count() == 0, view
        assert page.locator("script").count() == 2, view
        assert page.locator("h1").inner_text() == HOSTILE[0]
        if view == "attention":
            titles = page.eval_on_selector_all(".keys title", "nodes => nodes.map(e => e.textContent)")
            assert titles[:3] == HOSTILE[:3]
            assert titles[3] == "a\u2039U+202E\u203ab\u2039U+2066\u203ac"
            assert titles[8] == "x" * 300
            page.locator(".figure.wide [data-action=table]").click()
            assert HOSTILE[0] in page.locator(".figure.wide table").inner_text()
    assert seen == ["attention", "heads", "gold", "test", "compare"]


@pytest.mark.parametrize("view", ["attention", "heads", "gold", "test", "compare"])
def test_every_drawing_is_saved_as_xml(show, make_example, make_record, view):
    """In a page of its own: Chromium refuses a page that saves too many files."""
    text = " ".join(HOSTILE)
    record = make_record([make_example(text, text, length=20_000)])
    page = show([record, record], [make_findings([("cross", 0)])] * 2, at=f"view={view}&unit=piece&layer=2")
    figures = page.locator("[data-figure]").all()
    assert figures
    for figure in figures[:4]:
        drawn = figure.locator(".edge").count()
        with page.expect_download() as download:
            figure.locator("[data-action=svg]").click()
        root = ElementTree.parse(download.value.path()).getroot()
        assert root.tag == f"{SVG}svg"
        assert len([node for node in root.iter(f"{SVG}path") if node.get("data-weight")]) == drawn
        assert root.find(f"{SVG}image") is not None or len(list(root.iter())) > 5


def test_page_works_in_the_frame_of_a_notebook(visit, made_up, tmp_path):
    frame = f'<iframe sandbox="allow-scripts allow-downloads" srcdoc="{escape(report_html([made_up]))}"></iframe>'
    (tmp_path / "notebook.html").write_text(f"<!doctype html><meta charset=utf-8>{frame}", encoding="utf-8")
    page = visit(f"file://{tmp_path}/notebook.html", ready=False)
    inner = page.frame_locator("iframe")
    switch = inner.locator("[data-head-switch='0']")
    assert switch.get_attribute("aria-pressed") == "true"
    switch.click()
    inner.locator("[data-head-switch='0'][aria-pressed=false]").wait_for()
    assert switch.get_attribute("aria-pressed") == "false"


def test_corrupt_arrays_are_said_in_words(visit, tmp_path, made_up):
    data = made_up.examples[0].site("cross", 1)
    page = report_html([made_up])
    broken = page.replace(json.dumps({"shape": [len(data.weights)]})[1:-1].replace(" ", ""), '"shape":[3]')
    assert broken != page
    (tmp_path / "broken.html").write_text(broken, encoding="utf-8")
    shown = visit(f"file://{tmp_path}/broken.html#layer=2")
    assert "cannot be shown" in shown.get_by_role("alert").inner_text()
