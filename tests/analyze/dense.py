"""All weights of a test set at once, and every measure of them by its definition."""

import itertools
from collections import defaultdict
from contextlib import ExitStack

import numpy as np
import torch

from rectiformer.analyze.survey import forced_batches, memory_layers, observing, observing_memory, weighing_sites
from rectiformer.translate.evaluate import decode_forced


def look_densely(translator, pairs, weigh=lambda kind, call: call.weights()[0]):
    """All weights [H, M, N] in float64 of each (kind, layer), and all (weights, output, stream) of each memory, pair by
    pair: alone, a pair has no padding. `weigh` has the weights of a call."""
    weights, memories = defaultdict(list), defaultdict(list)
    for pair in pairs:
        [batch] = forced_batches(translator, [pair])
        with translator.inference(), ExitStack() as stack:
            for site in weighing_sites(translator.model):
                seen = weights[site.kind, site.layer]
                stack.enter_context(
                    observing(
                        site.attention, lambda call, kind=site.kind, seen=seen: seen.append(weigh(kind, call).double())
                    )
                )
            for side, index, layer in memory_layers(translator.model):
                seen = memories[side, index]
                stack.enter_context(
                    observing_memory(
                        layer, lambda call, x, seen=seen: seen.append((call.weights()[0], call.output[0], x[0]))
                    )
                )
            decode_forced(translator, batch)
    return weights, memories


def seen_cells(kind, weights):
    """Which cells of weights [H, M, N] are visible."""
    cells = torch.ones_like(weights, dtype=torch.bool)
    return cells.tril() if kind == "decoder" else cells


def entropy(share, axis=-1):
    return -torch.special.xlogy(share, share).sum(axis)


def summarize_densely(kind, sentences):
    """What `analyze` says of a site, from all its weights at once."""
    rows = [row for weights in sentences for row in weights.unbind(1)]  # one per query, each [H, N]
    cells = torch.cat([seen_cells(kind, weights).flatten(1) for weights in sentences], 1)
    zeros = torch.cat([(weights == 0).flatten(1) for weights in sentences], 1)
    null = torch.stack([(row == 0).all(-1) for row in rows], 1)  # [H, Q]
    shares = [row.abs() / row.abs().sum(-1, keepdim=True).clamp_min(1e-300) for row in rows]
    entropies = torch.stack([entropy(share) for share in shares], 1)
    return {
        "sparsity": ((zeros & cells).sum(1) / cells.sum(1)).tolist(),
        "null_rate": null.double().mean(1).tolist(),
        "mass": torch.stack([row.sum(-1) for row in rows], 1).mean(1).tolist(),
        "entropy": (entropies.sum(1) / (~null).sum(1).clamp_min(1)).tolist(),
        "active_queries": (~null).double().mean(1).tolist(),
        "nonzero_keys": torch.stack([(row != 0).sum(-1) for row in rows], 1).double().mean(1).tolist(),
        "diversity": diversity_densely(shares, null),
    }


def diversity_densely(shares, null):
    js, js_zero, overlap = [], [], []
    for share, without in zip(shares, null.T, strict=True):
        left = share[~without]
        js_zero.append(entropy(share.mean(0)) - entropy(share).mean())
        if len(left):
            js.append(entropy(left.mean(0)) - entropy(left).mean())
        pairs = list(itertools.combinations(left != 0, 2))
        if pairs:
            overlap.append(np.mean([((a & b).sum() / (a | b).sum()).item() for a, b in pairs]))
    means = [float(np.mean(found)) if found else 0.0 for found in (js, js_zero, overlap)]
    return {"js": means[0], "js_zero": means[1], "dropped": null.double().mean().item(), "support_overlap": means[2]}


def lengths_densely(kind, sentences):
    """Zeros, null rate and rows of the sentences of a bin, all heads together."""
    cells = sum(seen_cells(kind, weights).sum().item() for weights in sentences)
    zeros = sum(((weights == 0) & seen_cells(kind, weights)).sum().item() for weights in sentences)
    null = sum((weights == 0).all(-1).sum().item() for weights in sentences)
    rows = sum(weights[..., 0].numel() for weights in sentences)
    return zeros / cells, null / rows, rows
