"""What each head of a teacher became in its student: how far its output is off, and where it looks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rectiformer.model.attention import Observation, RectifiedAttention
from rectiformer.model.imitation import ModuleCall, recording
from rectiformer.model.transformer import Transformer
from rectiformer.text.batches import Batch, Symbols, collate
from rectiformer.text.prepared import Prepared
from rectiformer.train.teacher import attentions, differing, real_queries

SENTENCES, AT_ONCE = 200, 20
RESISTS = 0.5
"""The share of its output that a head may have wrong."""


@dataclass(frozen=True)
class HeadComparison:
    """One head, for the inputs that its teacher had; means are over the queries that are no padding."""

    kind: str
    layer: int
    head: int
    swapped: float
    """Squared error of its output, as a share of the teacher's, where no more than the variant is changed."""
    error: float
    """The same of the converted head."""
    zeros: float
    """Share of exact zeros among the weights of visible keys."""
    null_rate: float
    """Share of queries that attend to nothing."""
    agreement: float
    """Share of all other queries whose strongest key is the teacher's."""
    teacher_keys: float
    """How many keys the teacher attends to, in effect: e to the power of the mean entropy of its rows."""
    keys: float

    @property
    def resists(self) -> bool:
        return self.error > RESISTS


def some_batches(prepared: Prepared, symbols: Symbols, device: torch.device) -> Iterator[Batch]:
    """The first pairs of validation text, of training text where there is none, a few at a time."""
    pairs = prepared.valid if prepared.valid is not None else prepared.train[0]
    for first in range(0, min(SENTENCES, pairs.pairs), AT_ONCE):
        last = min(first + AT_ONCE, SENTENCES, pairs.pairs)
        yield collate(pairs, np.arange(first, last), symbols).to(device)


@torch.no_grad()
def compare_heads(
    teacher: Transformer, swapped: Transformer, student: Transformer, batches: Iterable[Batch]
) -> list[HeadComparison]:
    """Each head whose variant is not its teacher's, encoder first.

    Args:
        swapped: the teacher with the student's variants, and nothing else changed.
    """
    pairs, plain = differing(student, teacher), differing(swapped, teacher)
    sums = [HeadSums() for _ in pairs]
    for batch in batches:
        with recording(attentions(teacher)) as calls:
            teacher(batch.source, batch.source_lengths, batch.target_input)
        for found, pair, before in zip(sums, pairs, plain, strict=True):
            call = calls[pair.teacher.attention]
            real = real_queries(pair.student, batch.source_lengths, batch.target_lengths, call.output.shape[1])
            modules = [each.attention for each in (pair.teacher, pair.student, before.student)]
            found.add_call(*(HeadView(module, call, real) for module in modules))
    return [
        comparison
        for found, pair in zip(sums, pairs, strict=True)
        for comparison in found.summarize(pair.student.kind, pair.student.layer)
    ]


class HeadView:
    """What the heads of one attention do in a call, for its real queries."""

    def __init__(self, module: RectifiedAttention, call: ModuleCall, real: Tensor) -> None:
        seen: list[Observation] = []
        entered: list[Tensor] = []
        hook = module.output.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
        held, module.observer = module.observer, seen.append
        try:
            call.repeat(module)
        finally:
            module.observer = held
            hook.remove()
        heads = entered[0].unflatten(-1, (module.num_heads, -1))[real]  # [n, H, D]
        projection = module.output.weight.unflatten(1, (module.num_heads, -1))  # [E, H, D]
        self.output = torch.einsum("nhd,ehd->nhe", heads, projection)
        """What each head adds to the output of the attention: [n, H, E]."""
        self.weights = seen[0].weights().transpose(1, 2)[real]  # [n, H, N]
        self.visible = seen[0].visible().expand(call.output.shape[0], module.num_heads, -1).transpose(1, 2)[real]

    @property
    def null(self) -> Tensor:
        return (self.weights == 0).all(-1)

    @property
    def strongest(self) -> Tensor:
        return self.weights.abs().argmax(-1)

    @property
    def entropy(self) -> Tensor:
        """In nats, of weights divided by their sum."""
        shares = self.weights.abs() / self.weights.abs().sum(-1, keepdim=True).clamp_min(1e-30)
        return torch.special.entr(shares).sum(-1)


class HeadSums:
    """Sums over the queries of all calls of one attention, [H] each."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))

    def add_call(self, teacher: HeadView, student: HeadView, swapped: HeadView) -> None:
        found = {
            "output": teacher.output.square().sum(-1),
            "error": (student.output - teacher.output).square().sum(-1),
            "swapped": (swapped.output - teacher.output).square().sum(-1),
            "nonzero": (student.weights != 0).sum(-1),
            "visible": student.visible,
            "null": student.null,
            "agreeing": (student.strongest == teacher.strongest) & ~student.null,
            "entropy": student.entropy,
            "teacher_entropy": teacher.entropy,
            "queries": torch.ones_like(student.null),
        }
        for name, values in found.items():
            self.sums[name] = self.sums[name] + values.double().sum(0).cpu()

    def summarize(self, kind: str, layer: int) -> Iterator[HeadComparison]:
        total = self.sums
        queries, output = total["queries"], total["output"].clamp_min(1e-30)
        columns = (
            total["swapped"] / output,
            total["error"] / output,
            1 - total["nonzero"] / total["visible"].clamp_min(1),
            total["null"] / queries,
            total["agreeing"] / (queries - total["null"]).clamp_min(1),
            (total["teacher_entropy"] / queries).exp(),
            (total["entropy"] / (queries - total["null"]).clamp_min(1)).exp(),
        )
        for head, numbers in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            yield HeadComparison(kind, layer, head, *numbers)
