"""The costs of an update, fitted to the points in results/; some points are held out to check the fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from marian import SIZES

RESULTS = Path(__file__).parent / "results"
BACKWARD = 2.5
"""Matrix products in the backward pass of attention per product of the forward pass: five for two."""
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Network:
    """An encoder-decoder; a language model has `encoder` = 0 and no cross-attention."""

    hidden_size: int
    ffn_size: int
    encoder: int
    decoder: int
    vocabulary: int
    cross: bool = True
    ffn_matrices: int = 2

    @property
    def encoder_weights(self) -> int:
        """Weights of all matrices that a source token is multiplied by."""
        return self.encoder * (4 * self.hidden_size**2 + self.ffn_matrices * self.hidden_size * self.ffn_size)

    @property
    def decoder_weights(self) -> int:
        """Weights of all matrices that a target token is multiplied by, output and keys of the source included."""
        attentions = 2 if self.cross else 1
        layer = 4 * attentions * self.hidden_size**2 + self.ffn_matrices * self.hidden_size * self.ffn_size
        return self.decoder * layer + self.vocabulary * self.hidden_size

    @property
    def weights(self) -> int:
        return self.encoder_weights + self.decoder_weights

    def product_flops(self, tokens: float) -> float:
        """FLOPs of matrix products with `tokens` per side, forward and backward."""
        return 6 * self.weights * tokens

    def attention_flops(self, length: float, sequences: float) -> float:
        """FLOPs of scores and mixing, both passes: encoder and cross-attention in full, decoder self-attention half."""
        calls = self.encoder + self.decoder * (0.5 + self.cross)
        return calls * 4 * sequences * length**2 * self.hidden_size * (1 + BACKWARD)

    def elements(self, tokens: float) -> float:
        """Elements of the residual stream that sublayers read: two per layer, three with cross-attention."""
        return tokens * self.hidden_size * (2 * self.encoder + (2 + self.cross) * self.decoder)

    @property
    def attentions(self) -> int:
        return self.encoder + self.decoder * (1 + self.cross)


@dataclass(frozen=True)
class Fit:
    """Non-negative costs of some features, and their errors on points that were held out."""

    name: str
    costs: np.ndarray
    fitted: int
    errors: list[float]
    """Predicted / measured - 1 of the held-out points."""

    def row(self) -> str:
        size = np.abs(self.errors)
        return f"| {self.name} | {self.fitted} | {len(size)} | {size.mean():.0%} | {size.max():.0%} |"


def fit(name: str, points: Sequence[tuple[Sequence[float], float]], held_out: Callable[[int], bool]) -> Fit:
    """Least squares of relative errors over (features, seconds or bytes); costs are at least 0."""
    own = [point for index, point in enumerate(points) if not held_out(index)]
    features = np.array([np.array(row) / seconds for row, seconds in own])
    scale = np.maximum(features.max(0), 1e-300)
    used = list(range(features.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(features[:, used] / scale[used], np.ones(len(own)), rcond=None)
        if (found >= 0).all():
            break
        used = [column for column, cost in zip(used, found, strict=True) if cost > 0]
    costs = np.zeros(features.shape[1])
    costs[used] = found / scale[used]
    rest = [point for index, point in enumerate(points) if held_out(index)]
    return Fit(name, costs, len(own), [float(costs @ np.array(row)) / seconds - 1 for row, seconds in rest])


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]


def fit_attention(who: str, points: Iterable[dict[str, Any]]) -> Fit:
    """Seconds of attention forward and backward, head size 128; 4,096 keys are held out."""
    chosen = [point for point in points if point["section"] in ("forward", "backward") and point["case"]["size"] == 128]
    found = []
    for point in chosen:
        case = point["case"]
        flops = 4 * case["batch"] * case["heads"] * case["length"] ** 2 * 128 * (0.5 if case["mask"] == "causal" else 1)
        forward = case["pass"] == "forward"
        work = (flops, 0.0) if forward else (0.0, BACKWARD * flops)
        found.append(((float(forward), float(not forward), *work), point["ms"][who] / 1e3))
    variant = {"ours": "rectified", "cudnn": "softmax (cuDNN)"}[who]
    return fit(f"{variant} attention on an H200", found, lambda index: chosen[index]["case"]["length"] == 4096)


def fit_updates(points: Sequence[dict[str, Any]]) -> Fit:
    """Seconds of an update on the CPU: fixed, per FLOP of products, per FLOP of attention; every third is held out."""
    found = []
    for point in points:
        size = SIZES[point["size"]]
        network = Network(size["hidden_size"], size["ffn_size"], size["layers"], size["layers"], size["vocabulary"])
        tokens, length = point["sentences"] * point["length"], point["length"]
        flops = network.product_flops(tokens), network.attention_flops(length, point["sentences"])
        found.append(((1.0, *flops), point["seconds"]))
    return fit("update on a CPU", found, lambda index: index % 3 == 2)


def fit_memory(points: Iterable[dict[str, Any]]) -> Fit:
    """Bytes of an update on an H200: fixed, and per element of the residual stream; every third is held out."""
    network = Network(hidden_size=512, ffn_size=2048, encoder=2, decoder=2, vocabulary=8000)  # that of memory.py
    chosen = [point for point in points if point["contestant"] == "rela-g"]
    found = [((1.0, network.elements(point["length"])), point["mib"] * 2**20) for point in chosen]
    return fit("memory of an update on an H200", found, lambda index: index % 3 == 2)


def sent(collective: str, ranks: int, size: int) -> float:
    """Bytes that each rank sends."""
    return 2 * (ranks - 1) / ranks * size if collective == "all_reduce" else (ranks - 1) * size


def fit_collectives(points: Sequence[dict[str, Any]], ranks: int) -> Fit:
    """Seconds of gloo's collectives: fixed, and per byte; every second size is held out."""
    chosen = [point for point in points if point["ranks"] == ranks]
    found = []
    for point in chosen:
        own = (1.0, sent(point["collective"], ranks, point["bytes"]))
        features = [cost if name == point["collective"] else 0.0 for name in COLLECTIVES for cost in own]
        found.append((features, point["seconds"]))
    sizes = sorted({point["bytes"] for point in chosen})
    held_out = sizes[1::2]
    return fit(f"gloo on {ranks} ranks", found, lambda index: chosen[index]["bytes"] in held_out)


def per_flop(found: Fit) -> float:
    """Seconds per FLOP over both passes of long sequences, where the fixed cost of a call does not count."""
    _, _, forward, backward = found.costs
    return float((forward + BACKWARD * backward) / (1 + BACKWARD))
