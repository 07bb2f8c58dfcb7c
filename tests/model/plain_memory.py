"""Memories to test, and the formula of every row of MEMORIES written out plainly."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from rectiformer.model.memory import MEMORIES, KeyValueMemory

WIDTH, SLOTS = 8, 16
DENSE = ["relu", "softmax", "softmax-ln", "relu2", "topk"]
PRODUCT = ["product-softmax", "product-relu"]
ACTIVATIONS = {
    "relu": F.relu,
    "softmax": lambda scores: scores.softmax(-1),
    "softmax-ln": lambda scores: scores.softmax(-1),
    "relu2": lambda scores: F.relu(scores) ** 2,
    "product-softmax": lambda scores: scores.softmax(-1),
    "product-relu": F.relu,
}
every_memory = pytest.mark.parametrize("name", MEMORIES)
every_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])


def build(name, width=WIDTH, slots=SLOTS, dtype=torch.float64, **options):
    """A memory whose biases and norms have left their initial 0 and 1, so that a test sees them."""
    if MEMORIES[name].keeps:
        options.setdefault("keep", min(3, slots))
    if MEMORIES[name].keeps == "experts":
        options.setdefault("experts", 4)
    memory = KeyValueMemory(width, slots, name, **options)
    with torch.no_grad():
        for part in memory.parameters():
            if part.dim() == 1 or part is memory.lookup.key_bias:
                part.add_(torch.randn_like(part) / 4)
    return memory.to(dtype)


def tokens(*shape, dtype=torch.float64):
    return torch.randn(*shape, WIDTH, dtype=dtype)


def watch(memory, x):
    """The output and the observed weights of one forward pass."""
    seen = []
    memory.observer = seen.append
    out = memory(x)
    memory.observer = None
    (observation,) = seen
    assert observation.output is out
    return out, observation.weights()


def keep_largest(scores, keep, rest):
    """`scores` with all but the `keep` largest of the last axis set to `rest`; the plain way, by sorting."""
    rank = scores.argsort(-1, descending=True).argsort(-1)
    return scores.where(rank < keep, rest)


def zero_if_none(tensor):
    return 0 if tensor is None else tensor


def plain_scores(memory, x):
    """x K^T + b1 over all slots, for every way to store keys."""
    lookup = memory.lookup
    if memory.memory.name not in PRODUCT:
        return x @ lookup.keys.T + zero_if_none(lookup.key_bias)
    side = math.isqrt(memory.slots)
    query = F.layer_norm(x, [memory.width], lookup.norm.weight, lookup.norm.bias)
    u_a, u_b = (half @ keys.T for half, keys in zip(query.chunk(2, -1), lookup.keys, strict=True))
    if lookup.key_bias is not None:
        u_a, u_b = u_a + lookup.key_bias[0], u_b + lookup.key_bias[1]
    slot = torch.arange(memory.slots)
    return u_b[..., slot // side] + u_a[..., slot % side]


def plain_weights(memory, x):
    """The weights of all slots by the row's formula, scoring every slot and choosing afterwards."""
    name, scores, keep = memory.memory.name, plain_scores(memory, x), getattr(memory.lookup, "keep", None)
    if name == "topk":
        return keep_largest(F.relu(scores), keep, 0.0)
    if name == "sigma-moe":
        gates = keep_largest((x @ memory.lookup.gate.T).sigmoid(), keep, 0.0)
        return gates.repeat_interleave(memory.slots // memory.lookup.experts, -1) * F.relu(scores)
    if name in PRODUCT:
        scores = keep_largest(scores, keep, -math.inf)
    return ACTIVATIONS[name](scores)


def plain_output(memory, x):
    out = plain_weights(memory, x) @ memory.values + zero_if_none(memory.value_bias)
    if memory.memory.name == "softmax-ln":
        centered = out - out.mean(-1, keepdim=True)
        out = centered / centered.square().mean(-1, keepdim=True).sqrt() * memory.norm.weight + memory.norm.bias
    return out


class Recorder(TorchDispatchMode):
    """The operations run inside it, each with the shape and dtype of what came out."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple | list) else result
        if isinstance(first, torch.Tensor):
            self.calls.append((func.overloadpacket.__name__, tuple(first.shape), first.dtype))
        return result
