"""What each rank of tests/ops/test_distributed.py does; started processes import it by its name."""

from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from closeness import grid, grid_inputs
from torch.utils.checkpoint import checkpoint

from rectiformer import VARIANTS, context_parallel_attention, shard_sequence, unshard_sequence
from rectiformer.errors import RectiformerError

RECTIFIED = [name for name, variant in VARIANTS.items() if variant.rectified]
SHAPES = {  # B, H, K, M, N, D, Dv
    "self": (2, 4, 4, 16, 16, 8, 6),
    "grouped": (2, 4, 2, 16, 16, 8, 6),
    "more keys": (2, 4, 4, 16, 40, 8, 6),
    "more queries": (2, 4, 4, 40, 16, 8, 6),
}


@dataclass(frozen=True)
class Case:
    variant: str
    dtype: str
    shape: str
    causal: bool
    lengths: bool

    def __str__(self) -> str:
        words = [self.variant, self.dtype, self.shape, "causal" * self.causal, "lengths" * self.lengths]
        return " ".join(word for word in words if word)

    @property
    def inputs(self):
        return grid_inputs(*SHAPES[self.shape])

    @property
    def arguments(self):
        lengths = [SHAPES[self.shape][4] - 3, 5] if self.lengths else None
        return {"causal": self.causal, "key_lengths": lengths}


SETTINGS = list(product(["float32", "bfloat16"], SHAPES, [False, True], [False, True]))
CASES = [  # a third of the settings per variant, as gloo is slow where ranks share cores: each setting meets two
    Case(variant, *setting)
    for offset, variant in enumerate(RECTIFIED)
    for index, setting in enumerate(SETTINGS)
    if (index + offset) % 3 == 0
]

FEWER_CASES = CASES[::6]  # for groups of half the ranks: each variant once or twice
RANKS = 4


def find(rank, size):
    """What this rank found, by name."""
    found = {str(case): attend(case) for case in CASES}
    found |= {"refusals": refusals(rank), "bytes": bytes_sent(), "gamma": gradient_of_gamma(), "round": round_trip()}
    found |= {"frozen": frozen_queries(), "checkpoint": attend(CASES[0], through_checkpoint)}
    found["halves"] = halves(rank, size)
    return found


def attend(case, function=context_parallel_attention, group=None):
    """This rank's shards of the output and all gradients."""
    q, k, v, upstream = (shard_sequence(x.to(getattr(torch, case.dtype)), group) for x in case.inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = function(q, k, v, case.variant, group=group, **case.arguments)
    d_q, d_k, d_v = torch.autograd.grad(out, leaves, upstream)
    return {"out": out.detach(), "d_q": d_q, "d_k": d_k, "d_v": d_v}


def through_checkpoint(*args, **arguments):
    return checkpoint(context_parallel_attention, *args, use_reentrant=False, **arguments)


def halves(rank, size):
    """Two groups, each with sequences of its own."""
    groups = [dist.new_group(range(size // 2)), dist.new_group(range(size // 2, size))]
    return {str(case): attend(case, group=groups[rank >= size // 2]) for case in FEWER_CASES}


def bytes_sent():
    """Bytes sent by each collective of two calls and their gradients, by the tensors that are handed to torch."""
    sent, real = [], (dist.all_gather, dist.reduce_scatter)
    others = dist.get_world_size() - 1

    def all_gather(outputs, shard, group=None):
        sent.append(others * shard.nbytes)
        real[0](outputs, shard, group=group)

    def reduce_scatter(output, shards, group=None):
        sent.append(others * output.nbytes)
        real[1](output, shards, group=group)

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter
    try:
        for case in (
            Case("rela", "bfloat16", "more keys", True, True),
            Case("relu2", "float32", "grouped", False, False),
        ):
            attend(case)
    finally:
        dist.all_gather, dist.reduce_scatter = real
    return sent


def gradient_of_gamma():
    q, k, v, upstream = (shard_sequence(x) for x in grid_inputs(*SHAPES["self"]))
    gamma = torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=torch.float64, requires_grad=True)
    out = context_parallel_attention(q, k, v, "reluformer", causal=True, gamma=gamma)
    return torch.autograd.grad(out, gamma, upstream)[0]


def frozen_queries():
    q, k, v, upstream = (shard_sequence(x) for x in grid_inputs(*SHAPES["self"]))
    out = context_parallel_attention(q, k, v.requires_grad_(), causal=True)
    return torch.autograd.grad(out, v, upstream)[0]


def round_trip():
    """A shard, the whole sequence, and the gradient that all ranks' use of the whole gives the shard."""
    shard = shard_sequence(grid(3, 16), dim=-1).requires_grad_()
    whole = unshard_sequence(shard, dim=-1)
    (d_shard,) = torch.autograd.grad(whole, shard, (dist.get_rank() + 1) * grid(3, 16, seed=1))
    ids = unshard_sequence(shard_sequence(torch.arange(16), dim=0), dim=0)
    return {"shard": shard.detach(), "whole": whole.detach(), "d_shard": d_shard, "ids": ids}


def refusals(rank):
    """What each rank raises when some or all of them call wrongly, and that they can go on afterwards."""
    q, k, v, _ = (shard_sequence(x) for x in grid_inputs(*SHAPES["self"]))
    last = rank == dist.get_world_size() - 1
    calls = {
        "softmax": lambda: context_parallel_attention(q, k, v, "softmax"),
        "unknown option": lambda: context_parallel_attention(q, k, v, dropout_p=0.1),
        "odd shard": lambda: context_parallel_attention(q[:, :, 1:], k, v),
        "empty shard": lambda: context_parallel_attention(q[:, :, :0], k, v),
        "long lengths": lambda: context_parallel_attention(q, k, v, key_lengths=[3, 17]),
        "one odd shard": lambda: context_parallel_attention(q[:, :, last:], k, v),
        "one of three axes": lambda: context_parallel_attention(q[0] if last else q, k, v),
        "one is no tensor": lambda: context_parallel_attention(None if last else q, k, v),
        "one longer": lambda: context_parallel_attention(q, *(torch.cat([x, x], 2) if last else x for x in (k, v))),
        "one wider": lambda: context_parallel_attention(q, k, v[..., last:]),
        "one of another dtype": lambda: context_parallel_attention(*((x.float() if last else x) for x in (q, k, v))),
        "one causal": lambda: context_parallel_attention(q, k, v, causal=last),
        "one another variant": lambda: context_parallel_attention(q, k, v, "rela" if last else "relu2"),
        "one with gradients": lambda: context_parallel_attention(q.clone().requires_grad_(last), k, v),
        "indivisible": lambda: shard_sequence(torch.zeros(1, 1, 15)),
        "no such axis": lambda: shard_sequence(torch.zeros(16), dim=1),
        "one odd to join": lambda: unshard_sequence(q[:, :, last:]),
        "one longer to join": lambda: unshard_sequence(torch.cat([q, q], 2) if last else q),
    }
    return {name: error_of(call) for name, call in calls.items()}


def error_of(call):
    try:
        call()
    except (RectiformerError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
