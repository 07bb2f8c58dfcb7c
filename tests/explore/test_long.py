"""A whole document in a real browser."""

import time

import numpy as np
from explore.reading import act_and_wait, drawn_edges

from rectiformer.analyze.html_report import BUDGET, write_report
from rectiformer.analyze.record import AttentionRecord, Example, ModelCard, PieceSpan, Side, SiteRecord


def long_record(length=8192, layers=6, heads=8, per_row=8):
    """A document through an encoder whose rows weigh a few keys each, and some none."""
    rng = np.random.default_rng(1)
    rows = heads * length
    words = [f"w{i}" for i in range(length - 1)]
    text = " ".join(words)
    starts = np.cumsum([0, *(len(word) + 1 for word in words)])
    pieces = [PieceSpan(word, int(at), int(at) + len(word)) for word, at in zip(words, starts, strict=False)]
    spans = [(i, i + 1, piece.start, piece.stop) for i, piece in enumerate(pieces)]
    side = Side(text, [*pieces, PieceSpan("</s>", len(text), len(text))], spans)
    sites = []
    for layer in range(layers):
        block = length // per_row
        columns = (np.arange(per_row) * block + rng.integers(0, block, (rows, per_row))).astype(np.uint32)
        null = rng.random(rows) < 0.1
        counts = np.where(null, 0, per_row)
        weights = rng.random((rows, per_row), np.float32) + np.float32(0.01)
        weights[null] = 0
        sites.append(
            SiteRecord(
                "encoder",
                layer,
                heads,
                length,
                length,
                np.concatenate([[0], counts.cumsum()]).astype(np.uint32),
                columns[~null].reshape(-1),
                weights[~null].reshape(-1),
                weights.sum(1, dtype=np.float64).astype(np.float32),
                null.astype(np.uint8),
                np.full(rows, length, np.uint32),
            )
        )
    card = ModelCard(
        "long", "", {"encoder": "rela", "decoder": "", "cross": ""}, {"encoder": layers, "decoder": 0}, heads
    )
    return AttentionRecord(card, [Example(side, None, False, None, None, sites)])


def drawn_places(page):
    return [edge[1:3] for edge in drawn_edges(page)]


def window_of(site, first, rows=40):
    """(row, key) of the edges of head 0 in a window."""
    starts = site.row_starts[first : first + rows + 1]
    counts = np.diff(starts.astype(int))
    return list(
        zip(np.repeat(np.arange(rows), counts).tolist(), site.columns[starts[0] : starts[-1]].tolist(), strict=True)
    )


def seconds_to_open(page, address):
    """Until it is painted; other work on the machine may disturb one try."""
    page.goto("about:blank")
    start = time.monotonic()
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return time.monotonic() - start


def test_a_document_of_8192_tokens_and_48_heads_opens_in_three_seconds(visit, tmp_path):
    record = long_record()
    path = write_report(tmp_path / "long.html", [record])
    assert path.stat().st_size < BUDGET * 1.05
    page = visit("about:blank", ready=False)
    assert min(seconds_to_open(page, f"file://{path}#edges=all") for _ in range(2)) < 3
    assert not [note for note in page.locator("[data-left-out]").all_text_contents() if "Left out" in note]
    site = record.examples[0].sites[-1]
    assert drawn_places(page) == window_of(site, 0)
    canvas = page.locator(".minimap canvas").first
    rows, columns = (int(canvas.get_attribute(f"data-{name}")) for name in ("rows", "columns"))
    end = site.row_starts[site.queries]
    query = np.repeat(np.arange(site.queries), np.diff(site.row_starts[: site.queries + 1])).astype(int)
    dots = (query * rows // 8192) * columns + site.columns[:end].astype(int) * columns // 8192
    assert int(canvas.get_attribute("data-dots")) == len(np.unique(dots))
    act_and_wait(page, lambda: canvas.click(position={"x": 100, "y": 100}))
    first = int(page.locator(".bipartite").get_attribute("data-first"))
    assert first > 2000
    assert drawn_places(page) == window_of(site, first)
    act_and_wait(page, lambda: page.keyboard.press("2"))
    assert page.locator(".onoff .cell").count() == 48
