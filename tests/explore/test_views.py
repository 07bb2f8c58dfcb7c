"""Map of heads, gold links, dashboards and comparison in a real browser: their values are those of Python."""

import numpy as np
import pytest
from explore.reading import SITES, act_and_wait, drawn_edges, edges_of, make_findings, words_of_pieces

from rectiformer.analyze.html_report import write_report
from rectiformer.measure.alignment import alignment_error, count_links, links_from_steps, rows_for, strongest
from rectiformer.measure.words import merge_links

CELLS = """
all => all.map(({ dataset: cell, parentElement: { dataset: map } }) =>
  [map.kind, cell.layer, cell.head, cell.active, cell.nonzero, cell.badge])
"""


def test_map_shows_shares_and_marks_dead_and_always_on_heads(show, made_up):
    page = show([made_up], at="view=heads")
    for examples in (made_up.examples[:1], made_up.examples):
        if len(examples) > 1:
            act_and_wait(page, page.get_by_role("button", name="all 3 examples here").click)
        cells = {
            (kind, int(layer), int(head)): (float(active), float(nonzero), badge)
            for kind, layer, head, active, nonzero, badge in page.eval_on_selector_all(".onoff .cell", CELLS)
        }
        assert len(cells) == 18
        for (kind, layer, head), (active, nonzero, badge) in cells.items():
            sites = [example.site(kind, layer) for example in examples]
            on = 1 - np.concatenate([site.null.reshape(site.heads, -1)[head] for site in sites]).mean()
            seen = sum(site.visible.reshape(site.heads, -1)[head].sum() for site in sites)
            used = sum(np.count_nonzero(site.dense()[head]) for site in sites)
            assert active == pytest.approx(on, abs=1e-12)
            assert nonzero == pytest.approx(used / seen, abs=1e-12)
            assert badge == {0: "dead", 1: "always on"}.get(on, "")


def test_choosing_a_cell_of_the_map_opens_its_head(show, made_up):
    page = show([made_up], at="view=heads&unit=piece")
    act_and_wait(page, page.locator("[data-kind=encoder] [data-layer='1'][data-head='2']").click)
    assert drawn_edges(page) == edges_of(made_up.examples[0].site("encoder", 1).dense(), heads={2})


def predicted_links(example, layer, head, induction):
    weights = example.site("cross", layer).dense()
    matrix = weights.mean(0) if head == "average" else weights[head]
    rows = rows_for(matrix, induction, len(example.source.pieces) - 1)
    return merge_links(
        links_from_steps(strongest(rows)), words_of_pieces(example.source), words_of_pieces(example.target)
    )


def choose_aligner(page, layer, head, induction):
    act_and_wait(page, page.get_by_role("group", name="Induction").get_by_role("button", name=induction).click)
    act_and_wait(page, page.get_by_role("group", name="Layer").get_by_role("button", name=str(layer + 1)).click)
    act_and_wait(page, lambda: page.get_by_label("Links from").select_option(str(head)))


def test_gold_verdicts_and_scores_are_those_of_python(show, made_up):
    page = show([made_up], at="view=gold")
    gold = [example.gold for example in made_up.examples]
    for aligner in ((1, 0, "normal"), (0, "average", "normal"), (1, "average", "shifted"), (0, 2, "shifted")):
        choose_aligner(page, *aligner)
        predicted = [predicted_links(example, *aligner) for example in made_up.examples]
        found_sure, found, links, sure, _ = count_links(predicted, gold)[0]
        counts = [page.locator(f"[data-link][data-verdict={verdict}]").count() for verdict in ("hit", "miss", "false")]
        assert counts == [found, sure - found_sure, links - found], aligner
        rows = page.locator(".scores tbody tr").all()
        for row, score in zip(
            rows, (alignment_error(predicted[:1], gold[:1]), alignment_error(predicted, gold)), strict=True
        ):
            shown = [float(row.get_attribute(f"data-{name}")) for name in ("aer", "precision", "recall")]
            assert shown == pytest.approx([score.aer, score.precision, score.recall], abs=1e-12), aligner


def test_place_with_the_least_error_is_chosen(show, made_up):
    gold = [example.gold for example in made_up.examples]
    aligners = [(la, h, i) for la in (0, 1) for h in (0, 1, 2, "average") for i in ("normal", "shifted")]
    errors = {
        aligner: alignment_error([predicted_links(example, *aligner) for example in made_up.examples], gold).aer
        for aligner in aligners
    }
    page = show([made_up], at="view=gold")
    layer, head, induction = page.locator("[data-aligner]").get_attribute("data-aligner").split(" ")
    chosen = (int(layer), head if head == "average" else int(head), induction)
    assert errors[chosen] == min(errors.values())


def test_hits_misses_and_false_links_differ_in_shape(show, made_up):
    page = show([made_up], at="view=gold")
    shapes = {}
    for kind in ("hit", "miss", "false", "allowed"):
        node = page.locator(f".legend .link-{kind}")
        shapes[kind] = node.evaluate("e => e.tagName + (e.getAttribute('d') ?? getComputedStyle(e).strokeDasharray)")
    assert len(set(shapes.values())) == 4


def points(page, figure):
    return page.eval_on_selector_all(
        f"[data-figure='{figure}'] [data-series]",
        "nodes => nodes.map(e => [...e.querySelectorAll('.point')].map(p => +p.dataset.value))",
    )


def test_dashboards_draw_the_numbers_of_the_findings(show, made_up):
    findings = make_findings([(kind, layer) for kind in SITES for layer in (0, 1)])
    page = show([made_up], [findings], at="view=test")
    of = {(site["kind"], site["layer"]): site for site in findings["sites"]}
    for kind in SITES:
        means = [np.mean(of[kind, layer]["sparsity"]) for layer in (0, 1)]
        assert points(page, f"Zeros, {kind}") == [pytest.approx(means)]
        assert points(page, f"Support overlap, {kind}") == [
            [of[kind, la]["diversity"]["support_overlap"] for la in (0, 1)]
        ]
    best = [
        [
            row["aer"]
            for row in findings["alignment"]
            if row["layer"] == la and row["induction"] == "normal" and row["head"] != "average"
        ]
        for la in (0, 1)
    ]
    assert points(page, "AER, measured")[0] == [min(errors) for errors in best]
    first = findings["by_length"][0]["null_rate"]
    assert points(page, "Null rows, cross, measured")[0] == [first[0], first[2]]  # the empty bin is left out
    assert points(page, "Used slots") == [[0.75], [0.75]]
    assert points(page, "Anisotropy") == [[-0.1], [-0.1]]


def test_axes_have_round_ticks_that_hold_all_values(show, made_up):
    findings = make_findings([(kind, 0) for kind in SITES])
    expected = {
        0.62: "0 0.2 0.4 0.6 0.8",
        0.6: "0 0.1 0.2 0.3 0.4 0.5 0.6",
        0.0: "0 0.2 0.4 0.6 0.8 1",
        1234.0: "0 500 1000 1500",
        0.0071: "0 0.002 0.004 0.006 0.008",
        7.0: "0 2 4 6 8",
    }
    shown = [(site, key) for site in findings["sites"] for key in ("mass", "entropy")]
    for value, (site, key) in zip(expected, shown, strict=True):
        site[key] = [value / 2, value / 4, value]
    page = show([made_up], [findings], at="view=test")
    titles = {"mass": "Row sum", "entropy": "Entropy"}
    for ticks, (site, key) in zip(expected.values(), shown, strict=True):
        labels = page.locator(f"[data-figure='{titles[key]}, {site['kind']}'] .axes text[text-anchor=end]")
        assert " ".join(labels.all_text_contents()) == ticks
    fixed = page.locator("[data-figure='Zeros, cross'] .axes text[text-anchor=end]").all_text_contents()
    assert fixed == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    negative = page.locator("[data-figure='Anisotropy'] .axes text[text-anchor=end]").all_text_contents()
    assert negative == ["-0.1", "-0.08", "-0.06", "-0.04", "-0.02", "0"]


def test_dashboards_draw_two_models_in_one_chart(show, made_up):
    findings = [make_findings([("cross", 0), ("cross", 1)]), make_findings([("cross", 0)])]
    page = show([made_up, made_up], findings, at="view=test")
    assert [len(series) for series in points(page, "Row sum, cross")] == [2, 1]


def test_models_side_by_side_are_pointed_at_together(show, make_example, make_record):
    records = [make_record([make_example()], name) for name in ("one", "other")]
    page = show(records, at="view=compare&unit=piece")
    for index, record in enumerate(records):
        assert drawn_edges(page, f".pair > :nth-child({index + 1})") == edges_of(
            record.examples[0].site("cross", 1).dense()
        )
    page.locator(".pair > :first-child .rows [data-row='2']").hover()
    for index, record in enumerate(records):
        lit = page.locator(f".pair > :nth-child({index + 1}) .edge.lit").count()
        assert lit == np.count_nonzero(record.examples[0].site("cross", 1).dense()[:, 2])


def test_difference_sorts_pairs_into_only_one_model_and_both(show, make_example, make_record):
    records = [make_record([make_example()], name) for name in ("one", "other")]
    page = show(records, at="view=compare&unit=piece&comparing=difference")
    a, b = ((record.examples[0].site("cross", 1).dense() != 0).any(0) for record in records)
    counts = page.locator(".bipartite").evaluate("e => [+e.dataset.onlyA, +e.dataset.onlyB, +e.dataset.both]")
    assert counts == [(a & ~b).sum(), (b & ~a).sum(), (a & b).sum()]
    classes = [page.locator(f".edge.{group}").count() for group in ("only-a", "only-b", "both")]
    assert classes == counts


def test_difference_is_not_offered_for_different_words(show, make_example, make_record):
    records = [
        make_record([make_example()]),
        make_record([make_example("einsam wohnen drei alte Leute", "they live alone")]),
    ]
    page = show(records, at="view=compare&comparing=difference")
    assert page.get_by_role("button", name="difference").is_disabled()
    assert page.locator(".pair .bipartite").count() == 2


VIEWS = ("attention", "heads", "gold", "test", "compare", "compare&comparing=difference")
SPANS = """
all => all.map(e => {
  const [own, outer] = [e, e.closest(".scroll") ?? e.closest(".frame")].map(each => each.getBoundingClientRect());
  return [own.left, own.right, outer.left, outer.right];
})
"""
"""Where each null column begins and ends, and what it is seen in."""
LONG = " ".join(f"wort{number}" for number in range(24))


@pytest.mark.parametrize("width", [390, 890])
def test_a_narrow_window_has_room_for_every_drawing(visit, make_example, make_record, tmp_path, width):
    """Nothing hangs over, from the first moment on, and the null column is in sight wherever one has scrolled."""
    examples = [make_example(LONG, "one two three four", length=6), make_example()]
    records = [make_record(examples, name) for name in ("first", "second")]
    findings = [make_findings([("cross", 0), ("cross", 1)])] * 2
    findings[0]["quality"]["signature"] = "|".join(["a:long"] * 20)
    path = write_report(tmp_path / "report.html", records, findings)
    page = visit("about:blank", ready=False, size=(width, 1000))
    for view in VIEWS:
        page.goto("about:blank")
        page.goto(f"file://{path}#view={view}")
        page.wait_for_selector("body[data-ready]")
        drawings = page.locator("#view .frame svg:not(.legend svg)")
        widths = drawings.evaluate_all("all => all.map(e => e.getBoundingClientRect().width)")
        assert widths, view
        assert min(widths) > 200, view
        assert page.evaluate("document.scrollingElement.scrollWidth") <= width, view
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        page.locator("#view .scroll").evaluate_all("all => all.forEach(e => { e.scrollLeft = 1e4; })")
        page.locator("#view").evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
        nulls = page.locator(".gutter, .kept").evaluate_all(SPANS)
        assert len(nulls) == {"heads": 0, "test": 0, "compare": 2}.get(view, 1), view
        assert all(first - 1 < left < right < last + 1 <= width + 1 for left, right, first, last in nulls), (
            view,
            nulls,
        )
