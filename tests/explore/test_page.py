"""The attention view in a real browser: it draws what the record holds, by pointer and by keys."""

import numpy as np
import pytest
from explore.reading import EDGES, SITES, act_and_wait, drawn_edges, edges_of, words_of_pieces

from rectiformer.measure.words import merge_weights

NULLS = "nodes => nodes.map(e => [+e.dataset.head, +e.dataset.row])"


def test_drawn_are_the_nonzeros_and_null_bits_of_the_record(show, made_up):
    page = show([made_up], at="layer=1&unit=piece")
    for kind in SITES:
        if kind != "cross":
            act_and_wait(page, page.get_by_role("button", name=kind.capitalize(), exact=True).click)
        for layer in (0, 1):
            choose = page.get_by_role("group", name="Layer").get_by_role("button", name=str(layer + 1))
            act_and_wait(page, choose.click)
            site = made_up.examples[0].site(kind, layer)
            assert drawn_edges(page) == edges_of(site.dense())
            assert page.locator(".bipartite").get_attribute("data-total") == str(len(site.weights))
            marks = page.eval_on_selector_all(".bipartite [data-null]", NULLS)
            assert sorted(map(tuple, marks)) == sorted(divmod(int(row), site.queries) for row in site.null.nonzero()[0])
            assert page.locator(".counts").get_attribute("data-nulls") == str(site.null.sum())


def test_negative_weights_are_drawn_with_their_sign(show, make_example, make_record):
    example = make_example(signed=True)
    page = show([make_record([example])], at="unit=piece&layer=2")
    weights = example.site("cross", 1).dense()
    assert drawn_edges(page) == edges_of(weights)
    assert page.locator(".edge.negative").count() == (weights < 0).sum() > 0


def test_layers_and_heads_are_counted_from_1_in_words_and_address(show, made_up):
    page = show([made_up], at="layer=2&heads=1&unit=piece")
    site = made_up.examples[0].site("cross", 1)
    assert drawn_edges(page) == edges_of(site.dense(), heads={0})
    assert page.locator("[data-head-switch]").all_inner_texts() == ["1", "2", "3"]
    assert page.get_by_role("heading", name="layer 2", exact=False).count() == 1
    assert page.locator(".head-details b").all_inner_texts() == ["head 1 "]
    act_and_wait(page, page.locator("[data-head-switch='2']").click)
    assert page.evaluate("location.hash") == "#layer=2&heads=1%2C3&unit=piece&edges=all"
    act_and_wait(page, lambda: page.keyboard.press("2"))
    labels = [*(f"head {head}" for head in (1, 2, 3)), *(f"layer {layer}" for layer in (1, 2))]
    assert page.locator(".onoff").first.locator("text.heading").all_text_contents() == labels


def test_toggling_a_head_takes_exactly_its_edges_away(show, made_up):
    page = show([made_up], at="layer=2&unit=piece")
    weights = made_up.examples[0].site("cross", 1).dense()
    act_and_wait(page, page.locator("[data-head-switch='1']").click)
    assert drawn_edges(page) == edges_of(weights, heads={0, 2})
    act_and_wait(page, page.locator("[data-head-switch='1']").click)
    assert drawn_edges(page) == edges_of(weights)
    act_and_wait(page, lambda: page.locator("[data-head-switch='2']").click(modifiers=["Shift"]))
    assert drawn_edges(page) == edges_of(weights, heads={2})


@pytest.mark.parametrize("example", [0, 2], ids=["latin", "hebrew and japanese"])
def test_words_are_merged_as_python_merges_them(show, made_up, example):
    page = show([made_up], at=f"layer=2&example={example}")
    shown = made_up.examples[example]
    source, target = words_of_pieces(shown.source), words_of_pieces(shown.target)
    drawn = {edge[:3]: edge[3] for edge in drawn_edges(page)}
    for head, weights in enumerate(shown.site("cross", 1).dense()):
        merged = merge_weights(weights, source, target, len(shown.source.words), len(shown.target.words))
        for (j, i), weight in np.ndenumerate(merged):
            assert drawn.pop((head, j, i), 0) == pytest.approx(weight, rel=1e-6)
    ends = (len(shown.source.words), len(shown.target.words))
    assert all(key == ends[0] or row == ends[1] for _, row, key in drawn)  # what is left belongs to the end pieces


def test_labels_are_the_words_and_keep_their_direction(show, made_up):
    page = show([made_up], at="example=2")
    assert page.locator(".keys text").all_text_contents() == ["שלום", "עולם", "日本語", "テキスト", "end"]
    assert [text.get_attribute("direction") for text in page.locator(".keys text").all()] == [
        "rtl",
        "rtl",
        None,
        None,
        None,
    ]


def test_threshold_says_how_many_edges_it_hides(show, made_up):
    page = show([made_up], at="layer=2&unit=piece")
    weights = made_up.examples[0].site("cross", 1).dense()
    page.get_by_label("Hide weights below").fill("0.5")
    shown = [edge for edge in edges_of(weights) if abs(edge[3]) >= 0.25 * abs(weights).max()]
    total = np.count_nonzero(weights)
    assert drawn_edges(page) == shown
    assert 0 < len(shown) < total
    said = page.locator(".counts").inner_text()
    assert said.startswith(f"{len(shown)} of {total} edges shown: weights of at least ")


def test_scale_prints_the_range_of_raw_weights(show, made_up):
    page = show([made_up], at="layer=2&unit=piece&heads=1")
    largest = made_up.examples[0].site("cross", 1).weights.max()
    assert float(page.locator(".legend[data-high]").get_attribute("data-high")) == largest > 1


def test_a_scale_of_rows_ends_at_the_largest_weight_of_any_head_in_the_row(show, made_up):
    """The widths and what a threshold hides follow it; the weights stay raw."""
    page = show([made_up], at="layer=2&unit=piece&heads=2&edges=all")
    weights = made_up.examples[0].site("cross", 1).dense()
    act_and_wait(page, page.get_by_role("group", name="Scale").get_by_role("button", name="row").click)
    assert drawn_edges(page) == edges_of(weights, heads={1})
    ends = abs(weights).max((0, 2))
    widths = page.eval_on_selector_all(
        ".edge", "all => all.map(e => [+e.dataset.row, +e.dataset.weight, +e.getAttribute('stroke-width')])"
    )
    for row, weight, width in widths:
        assert width == pytest.approx(1 + 3 * abs(weight) / ends[int(row)], abs=0.006)
    page.get_by_label("Hide weights below").fill("0.5")
    assert drawn_edges(page) == [edge for edge in edges_of(weights, {1}) if abs(edge[3]) >= 0.25 * ends[edge[1]]]
    assert "weights of at least 25.0% of the row's largest" in page.locator(".counts").inner_text()
    assert "scale=row" in page.evaluate("location.hash")


def test_pointing_at_a_row_shows_raw_weights_and_sums(show, made_up):
    page = show([made_up], at="layer=2&unit=piece")
    site = made_up.examples[0].site("cross", 1)
    row = int(np.flatnonzero(site.null.reshape(site.heads, -1).sum(0) == 0)[0])
    page.locator(f".rows [data-row='{row}']").hover()
    masses = [float(text) for text in page.eval_on_selector_all(".head-details", "n => n.map(e => e.dataset.mass)")]
    assert masses == [float(mass) for mass in site.mass.reshape(site.heads, -1)[:, row]]
    lit = page.eval_on_selector_all(".edge.lit", EDGES)
    assert sorted(map(tuple, lit)) == [edge for edge in edges_of(site.dense()) if edge[1] == row]


def test_filter_leaves_rows_where_every_head_is_null(show, made_up):
    page = show([made_up], at="layer=2&unit=piece")
    act_and_wait(page, lambda: page.get_by_label("Rows").select_option("every-null"))
    null = made_up.examples[0].site("cross", 1).null.reshape(3, -1).all(0)
    assert page.locator(".rows .unit").count() == null.sum() > 0
    assert drawn_edges(page) == []


def test_table_holds_what_is_drawn(show, made_up):
    page = show([made_up], at="layer=2&unit=piece")
    drawn = drawn_edges(page)
    page.locator("[data-figure='cross-2'] [data-action=table]").click()
    rows = [row.split("\t") for row in page.locator("[data-figure='cross-2'] tbody").inner_text().split("\n")]
    nulls = [row for row in rows if row[3] == "null"]
    edges = [row for row in rows if row not in nulls]
    assert sorted((int(row[4]) - 1, int(row[0]) - 1, int(row[2]) - 1) for row in edges) == [edge[:3] for edge in drawn]
    assert sum(float(row[5]) for row in edges) == pytest.approx(sum(edge[3] for edge in drawn), rel=1e-5)
    assert len(nulls) == made_up.examples[0].site("cross", 1).null.sum() > 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colors_follow_the_system_and_the_switch(show, made_up, scheme):
    page = show([made_up], color_scheme=scheme)
    brightness = "() => getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
    assert (page.evaluate(brightness) < 100) == (scheme == "dark")
    act_and_wait(page, page.locator("#theme").click)
    assert (page.evaluate(brightness) < 100) == (scheme == "light")


def test_keys_move_rows_heads_layers_and_examples(show, made_up):
    page = show([made_up], at="unit=piece&layer=2")
    press = page.keyboard.press
    press("ArrowDown")
    assert page.locator(".details [data-row]").get_attribute("data-row") == "1"
    act_and_wait(page, lambda: press("ArrowRight"))
    assert {edge[0] for edge in drawn_edges(page)} == {0}
    act_and_wait(page, lambda: press("ArrowLeft"))
    act_and_wait(page, lambda: press("["))
    assert drawn_edges(page) == edges_of(made_up.examples[0].site("cross", 0).dense(), heads={2})
    act_and_wait(page, lambda: press("n"))
    act_and_wait(page, lambda: press("a"))
    assert drawn_edges(page) == edges_of(made_up.examples[1].site("cross", 0).dense())
    act_and_wait(page, lambda: press("w"))
    assert page.get_by_role("button", name="words").get_attribute("aria-pressed") == "true"
    act_and_wait(page, lambda: press("2"))
    assert page.locator(".onoff").count() == 3


def test_help_opens_and_closes_by_keys(show, made_up):
    page = show([made_up])
    page.keyboard.press("?")
    assert page.get_by_role("dialog").is_visible()
    page.keyboard.press("Escape")
    assert not page.get_by_role("dialog").is_visible()


def test_a_switch_keeps_the_focus_when_the_page_is_drawn_anew(show, made_up):
    page = show([made_up], at="layer=2")
    page.locator("[data-head-switch='1']").focus()
    act_and_wait(page, lambda: page.keyboard.press("Enter"))
    assert page.evaluate("document.activeElement.dataset.headSwitch") == "1"


def test_page_says_what_attention_does_not_prove(show, made_up):
    assert "no proof of cause" in show([made_up]).locator("footer").inner_text()
