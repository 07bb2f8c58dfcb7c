"""Examples to draw: any weights, any words."""

import numpy as np

from rectiformer.analyze.record import AttentionRecord, Example, ModelCard, PieceSpan, Side, SiteRecord

SITES = ("encoder", "decoder", "cross")


def side(words):
    text = " ".join(words)
    starts = [len(" ".join(words[:index])) for index in range(len(words))]
    pieces = [PieceSpan(word, start, start) for word, start in zip(words, starts, strict=True)]
    return Side(text, [*pieces, PieceSpan("</s>", len(text), len(text))], [])


def example(weights, kind="cross", words=None):
    """An example whose one site has these weights [H, M, N]."""
    _, queries, keys = weights.shape
    site = SiteRecord.from_dense(kind, 1, weights, np.full(weights.shape[:2], keys))
    sides = [side([*(words or []), *(f"w{index}" for index in range(size))][: size - 1]) for size in (keys, queries)]
    return Example(*sides, True, None, None, [site])


def sparse_weights(heads=2, queries=5, keys=4, seed=0):
    """About half zeros, and the second row of the first head null."""
    weights = np.random.default_rng(seed).normal(size=(heads, queries, keys)).clip(0)
    weights[0, 1] = 0
    return weights.astype(np.float32)


def record(*examples, name="rela-g"):
    card = ModelCard(name, "", dict.fromkeys(SITES, "rela-g"), {"encoder": 2, "decoder": 2}, 2)
    return AttentionRecord(card, list(examples))
