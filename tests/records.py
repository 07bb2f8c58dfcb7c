"""A small attention record made by hand, and copies of it with something changed."""

import copy

import numpy as np

from rectiformer.analyze.record import AttentionRecord, Example, ModelCard, PieceSpan, Side, SiteRecord
from rectiformer.measure.alignment import Links

HOSTILE = [
    "</script><script>alert(1)</script>",
    "a\0b",
    "x\u2028y",
    "\u202egnp.exe",
    "👩‍🚀",
    "\u0301",
    "\ud800",
    "z" * 10_000,
]
CARD = ModelCard(
    "rela-g", "", {"encoder": "rela-g", "decoder": "cog", "cross": "rela"}, {"encoder": 2, "decoder": 2}, 3
)


def draw_weights(heads, queries, keys, seed=0):
    """Weights with zeros, rows of nothing and negative weights, and how many keys each query sees."""
    random = np.random.default_rng(seed)
    weights = random.normal(size=(heads, queries, keys)).astype(np.float32)
    weights[random.random(weights.shape) < 0.6] = 0
    weights[random.random((heads, queries)) < 0.3] = 0
    visible = np.maximum((weights != 0).sum(-1), random.integers(0, keys + 1, (heads, queries)))
    return weights, visible


def make_side(*texts):
    """A side of one piece and word a text, and its end."""
    pieces, start = [], 0
    for text in texts:
        pieces.append(PieceSpan(text, start, start + len(text)))
        start += len(text)
    words = [(index, index + 1, piece.start, piece.stop) for index, piece in enumerate(pieces)]
    return Side("".join(texts), [*pieces, PieceSpan("</s>", start, start)], words)


def make_site(kind, layer, queries, keys, seed=0):
    return SiteRecord.from_dense(kind, layer, *draw_weights(3, queries, keys, seed))


def make_record():
    """A forced pair with gold links, a translation of nothing by nothing, and an example without a target."""
    source, target = make_side("das", " Haus", " da"), make_side("the", " house")
    sites = [make_site("encoder", 0, 4, 4), make_site("decoder", 1, 3, 3, 1), make_site("cross", 1, 3, 4, 2)]
    gold = Links(frozenset({(0, 0), (1, 1)}), frozenset({(2, 1)}))
    empty = Example(make_side(), make_side(), False, "", None, [make_site("cross", 0, 1, 1)])
    alone = Example(make_side(*HOSTILE), None, True, None, None, [make_site("encoder", 1, 9, 9, 3)])
    return AttentionRecord(CARD, [Example(source, target, True, "a house", gold, sites), empty, alone])


def change(content, path, value):
    """A copy with one value changed; `None` for the value deletes it."""
    content = copy.deepcopy(content)
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return content
