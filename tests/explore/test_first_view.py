"""What a reader meets first: a picture that can be read, tabs with something in them, keys that do what is expected."""

import dataclasses

import numpy as np
import pytest
from explore.conftest import site
from explore.reading import act_and_wait, drawn_edges, edges_of, make_findings

from rectiformer.analyze.summary import MEASURES, summarize

FEW = 3


def strongest_of_each_row(weights, count=FEW):
    kept = []
    for row in range(weights.shape[1]):
        own = [edge for edge in edges_of(weights) if edge[1] == row]
        kept += sorted(own, key=lambda edge: -edge[3])[:count]
    return sorted(kept)


@pytest.fixture
def dense(make_example, make_record):
    """As softmax would: an edge from every row to every key, in every head."""
    example = make_example()
    sites = []
    for each in example.sites:
        sees = each.visible.reshape(each.heads, -1)
        weights = np.random.default_rng(2).random((each.heads, each.queries, each.keys)) + 0.01
        weights *= np.arange(each.keys) < sees[..., None]
        sites.append(type(each).from_dense(each.kind, each.layer, weights.astype(np.float32), sees))
    return make_record([dataclasses.replace(example, sites=sites)], "dense")


def test_a_tangle_is_cut_to_the_strongest_edges_of_each_row_and_says_so(show, dense):
    page = show([dense], at="edges=auto&unit=piece&layer=2")
    weights = dense.examples[0].site("cross", 1).dense()
    shown, total = strongest_of_each_row(weights), np.count_nonzero(weights)
    assert drawn_edges(page) == shown
    counts = page.locator(".counts")
    assert counts.inner_text().startswith(f"{len(shown)} of {total} edges shown: the 3 strongest of each row Show all")
    act_and_wait(page, page.get_by_role("button", name="Show all").click)
    assert drawn_edges(page) == edges_of(weights)
    assert counts.inner_text().startswith(f"all {total} edges shown")
    act_and_wait(
        page, page.get_by_role("group", name="Edges per row").get_by_role("button", name="1", exact=True).click
    )
    assert drawn_edges(page) == strongest_of_each_row(weights, 1)
    assert "the strongest of each row" in counts.inner_text()


def test_what_is_readable_is_shown_whole(show, made_up):
    page = show([made_up], at="edges=auto&unit=piece&layer=2&heads=1")
    weights = made_up.examples[0].site("cross", 1).dense()
    assert drawn_edges(page) == edges_of(weights, heads={0})
    assert page.locator(".counts").inner_text().startswith(f"all {np.count_nonzero(weights[0])} edges shown")


def test_compared_models_are_cut_alike(show, dense, make_record, made_up):
    other = make_record(made_up.examples[:1], "sparse")
    page = show([other, dense], at="edges=auto&unit=piece&view=compare")
    for number, record in enumerate([other, dense], 1):
        weights = record.examples[0].site("cross", 1).dense()
        assert drawn_edges(page, f".pair > :nth-child({number})") == strongest_of_each_row(weights)


def test_heads_that_are_too_many_for_the_null_column_are_counted_there(show, random, make_example, make_record):
    example = make_example()
    queries, keys = len(example.target.pieces), len(example.source.pieces)
    many = site(random, "cross", 0, queries, keys, heads=24)
    page = show([make_record([dataclasses.replace(example, sites=[many])])], at="unit=piece", size=(390, 844))
    counted = page.eval_on_selector_all(".gutter [data-nulls]", "all => all.map(e => +e.textContent)")
    assert counted == many.null.reshape(24, queries).sum(0).tolist()


def tabs(page):
    return page.locator("#tabs button").all_inner_texts()


def test_tabs_without_content_are_hidden(show, make_example, make_record):
    bare = make_record([dataclasses.replace(make_example(), gold=None)])
    page = show([bare], at="view=gold")
    assert tabs(page) == ["Attention", "Heads"]
    assert page.locator(".bipartite").count() == 1  # in place of the view that is not there
    page = show([bare, bare], [make_findings([("cross", 0)]), None])
    assert tabs(page) == ["Attention", "Heads", "Test set", "Compare"]


def test_the_report_repeats_what_is_printed(show, made_up):
    findings = make_findings([("encoder", 0), ("cross", 0), ("cross", 1)])
    page = show([made_up], [findings], at="view=test")
    summary = summarize([findings])
    box = page.locator("#glance")
    table = [[*row.locator("th,td").all_inner_texts()] for row in box.locator("tr").all()]
    assert table == [list(MEASURES), *summary.measures]
    assert [row[1:3] for row in table[1:]] == [["cross", "1"], ["cross", "2"], ["encoder", "1"]]
    assert {summary.data, summary.bleu} == set(box.locator(".note").all_inner_texts())
    assert summary.bleu == "BLEU: measured 31.2 (nrefs:1)"


def test_without_gold_links_the_report_has_no_columns_of_links(show, made_up):
    findings = {**make_findings([("cross", 0)]), "alignment": None}
    page = show([made_up], [findings], at="view=test")
    (head, row) = (each.locator("th,td").all_inner_texts() for each in page.locator("#glance tr").all())
    assert (len(head), head[-1], len(row)) == (7, "diversity", 7)


def expect_scrolled(page, tries=40):
    """Soon; not by `wait_for_function`, which evaluates text again and again: the page's policy forbids that."""
    while tries and not page.evaluate("scrollY > 0"):
        page.wait_for_timeout(25)
        tries -= 1
    assert tries


FOCUS = "document.activeElement.textContent"


def test_everything_is_reached_by_keys(show, made_up):
    page = show([made_up], [make_findings([("cross", 0), ("cross", 1)])], at="unit=piece&layer=2")
    press = page.keyboard.press
    press("Tab")
    assert page.evaluate(FOCUS) == "Skip to the view"
    assert page.locator(".skip").evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
    press("Enter")
    assert page.evaluate("document.activeElement.id") == "view"
    press("ArrowDown")
    said = page.locator("[role=status]").inner_text()
    nulls = made_up.examples[0].site("cross", 1).null.reshape(3, -1)[:, 1].sum()
    assert said.startswith("row 2, ")
    assert said.count(" null") == nulls
    page.get_by_role("button", name="Attention", exact=True).focus()
    press("ArrowRight")
    assert page.evaluate(FOCUS) == "Heads"  # the focus moves, the view stays
    assert page.locator(".bipartite").count() == 1
    act_and_wait(page, lambda: press("4"))
    page.locator("#view").focus()
    press("PageDown")
    expect_scrolled(page)  # no rows to move over here: the page scrolls as any other
    press("?")
    page.get_by_label("use letters and digits as keys").uncheck()
    press("Escape")
    press("1")
    assert page.locator("#tabs [aria-pressed=true]").inner_text() == "Test set"
