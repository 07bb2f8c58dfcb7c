"""Sentence by sentence: the values of the page are sums of the record's weights."""

import dataclasses

import numpy as np
import pytest

SENTENCES = {"source": [(0, 4), (5, 7), (7, 10)], "target": [(0, 3), (4, 8)]}


@pytest.fixture
def document(make_example, make_record):
    example = make_example()
    sides = {name: dataclasses.replace(getattr(example, name), sentences=SENTENCES[name]) for name in SENTENCES}
    return make_record([dataclasses.replace(example, **sides)])


@pytest.mark.parametrize("kind", ["cross", "encoder", "decoder"])
def test_cells_are_mean_row_sums_of_the_record(show, document, kind):
    page = show([document], at=f"kind={kind}&layer=2&heads=1%2C3")
    site = document.examples[0].site(kind, 1)
    weights, null = site.dense()[[0, 2]], site.null.reshape(3, site.queries)[[0, 2]]
    queries = SENTENCES["source" if kind == "encoder" else "target"]
    keys = SENTENCES["target" if kind == "decoder" else "source"]
    shift = int(kind == "decoder")  # key 0 is the start symbol
    expected = [
        [weights[:, a:b, c + shift : d + shift].sum(-1, dtype=np.float64).mean() for c, d in keys] for a, b in queries
    ]
    cells = page.eval_on_selector_all(".sentence-cell", "all => all.map(e => +e.dataset.mass)")
    assert cells == pytest.approx(np.array(expected).ravel().tolist(), abs=1e-9)
    nulls = page.eval_on_selector_all(".sentence-null", "all => all.map(e => +e.dataset.null)")
    assert nulls == pytest.approx([null[:, a:b].mean() for a, b in queries])
    page.locator("[data-figure^=sentences] [data-action=table]").click()
    rows = page.locator("[data-figure^=sentences] tbody tr")
    assert rows.count() == len(queries)


def test_what_is_no_document_has_no_such_map(show, made_up):
    assert show([made_up]).locator(".sentence-cell").count() == 0
