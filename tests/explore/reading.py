"""Reading what a page has drawn, and what a record says should be drawn."""

import numpy as np

SITES = ("cross", "encoder", "decoder")
EDGES = "nodes => nodes.map(e => [+e.dataset.head, +e.dataset.row, +e.dataset.key, +e.dataset.weight])"


def drawn_edges(page, scope=""):
    return sorted(map(tuple, page.eval_on_selector_all(f"{scope} .bipartite .edge", EDGES)))


def edges_of(weights, heads=None):
    """(head, row, key, weight) of what is not 0 in [H, M, N]."""
    found = zip(*weights.nonzero(), weights[weights.nonzero()], strict=True)
    return sorted((int(h), int(m), int(n), float(w)) for h, m, n, w in found if heads is None or h in heads)


def act_and_wait(page, act):
    """Do something and wait until the page was drawn anew."""
    before = page.evaluate("document.body.dataset.ready")
    act()
    assert before is not None
    page.locator(f'body:not([data-ready="{before}"])').wait_for(state="attached")


def words_of_pieces(side):
    return [[w for w, (a, b, _, _) in enumerate(side.words) if a <= piece < b] for piece in range(len(side.pieces))]


def make_findings(sites):
    rng = np.random.default_rng(3)
    measures = ("sparsity", "null_rate", "mass", "entropy", "active_queries", "nonzero_keys")
    return {
        "format": "rectiformer-findings",
        "version": 1,
        "model": {"name": "measured"},
        "data": {"name": "some set", "sentences": 12, "source_tokens": 100, "target_tokens": 90},
        "sites": [
            {"kind": kind, "layer": layer, "heads": 3, **{name: rng.random(3).tolist() for name in measures}}
            | {"diversity": dict(zip(("js", "js_zero", "dropped", "support_overlap"), rng.random(4), strict=True))}
            for kind, layer in sites
        ],
        "by_length": [
            {"kind": kind, "layer": layer, "lengths": [1, 5, 6, 20], "rows": [4, 0, 8]}
            | {name: rng.random(3).tolist() for name in ("sparsity", "null_rate")}
            for kind, layer in sites
        ],
        "alignment": [
            {"layer": layer, "head": head, "induction": way, "aer": rng.random(), "precision": 0.5, "recall": 0.5}
            for layer in (0, 1)
            for head in (0, 1, 2, "average")
            for way in ("normal", "shifted")
        ],
        "shuffled": {name: {"null_rate": [0.1, 0.2], "mass": [1.5, 2.5]} for name in ("gold", "shuffled")},
        "memories": [
            {"side": side, "layer": 0, "variance_ratio": 0.3, "top_score_ratio": {"0.01": 0.25}, "anisotropy": -0.1}
            | {"slots": 64, "used_slots": 0.75, "usage_entropy": 3.5}
            for side in ("encoder", "decoder")
        ],
        "quality": {"bleu": 31.25, "signature": "nrefs:1"},
    }
