"""Plans: what eager calls of one layout launch, worked out once.

Sizes, strides, dtypes and options decide which kernels run, with what grid and which flags. A plan holds the prepared
launches of a call and of its gradient; calls that differ in nothing but their numbers share it. In eager mode autograd
meets one `torch.autograd.Function` around a plan, which costs a fifth of an operator of torch. Operators stay for
whatever traces or intercepts them: torch.compile, export, dispatch modes, tensor subclasses, second derivatives.

This file needs no Triton; the plans themselves are next to their kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

ALIGNMENT = 15
"""Bits of an address that are 0 in what a kernel was specialized for: Triton tells multiples of 16 from the rest."""
MAX_PLANS = 4096
"""Plans kept at once, each a few kilobytes; beyond that all are made anew."""
PLAIN = {Tensor, torch.nn.Parameter}

P = TypeVar("P")


class PlanCache(dict[Hashable, P]):
    """Plans by layout. Reading and writing a dict is atomic, and a plan that two threads make is the same twice."""

    def keep(self, key: Hashable, plan: P) -> P:
        if len(self) >= MAX_PLANS:
            self.clear()
        self[key] = plan
        return plan


def layout(tensor: Tensor | None) -> Hashable:
    """What a launch depends on, apart from the address."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def is_aligned(*tensors: Tensor) -> bool:
    """Whether all addresses are multiples of 16 bytes, as those of new tensors are."""
    low_bits = 0
    for tensor in tensors:
        low_bits |= tensor.data_ptr()
    return not low_bits & ALIGNMENT


def is_intercepted(*tensors: Tensor) -> bool:
    """Whether somebody has to see operators of torch: a compiler, a dispatch mode, a subclass of Tensor."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    return not PLAIN.issuperset(map(type, tensors))


Gradients = tuple[Tensor | None, ...]


class KernelPlan(ABC):
    """The launches of an operator and of its gradient, for one layout of the tensors that its inputs begin with.

    A plan is called with `held`, those of the tensors that are not None; `numbers` are the other inputs, the same for
    all calls.
    """

    operator: ClassVar[Callable[..., Tensor]]
    backward_operator: ClassVar[Callable[..., tuple[Tensor, ...]]]
    """Takes the gradient of the result before all that the operator takes."""
    fields: ClassVar[tuple[str, ...]]
    """Names of the tensors."""
    first_table: ClassVar[int]
    """From which tensor on they are read by address alone, so that they may have no gaps."""
    gradient_of: ClassVar[Mapping[str, int]]
    """Which result of the backward pass is the gradient of which tensor."""

    def __init__(self, tensors: Sequence[Tensor | None], numbers: tuple[Any, ...]) -> None:
        self.numbers = numbers
        present = [name for name, tensor in zip(self.fields, tensors, strict=True) if tensor is not None]
        self.slots = {name: slot for slot, name in enumerate(present)}
        """Where a tensor is among `held`."""
        self.results = [self.gradient_of.get(name) for name in present]

    @abstractmethod
    def forward(self, held: Sequence[Tensor]) -> Tensor:
        """What the operator returns."""

    def backward(self, d_out: Tensor, held: Sequence[Tensor]) -> Gradients:
        """What the backward operator returns, with None for the gradient of what is not there.

        Decoding has none: calls that want gradients never come to its plans.
        """
        raise NotImplementedError(f"{type(self).__name__} has no gradient")

    def differentiable_backward(self, d_out: Tensor, held: Sequence[Tensor]) -> Gradients:
        """`backward` by the operator, which knows its own gradient."""
        return self.backward_operator(d_out, *self.restore(held), *self.numbers)

    def __call__(self, held: Sequence[Tensor]) -> Tensor:
        if torch.is_grad_enabled():
            for tensor in held:
                if tensor.requires_grad:
                    return APPLY(self, *held)
        return self.forward(held)

    def restore(self, held: Sequence[Tensor]) -> list[Any]:
        """All tensors of a call, None where there is none."""
        return [held[self.slots[name]] if name in self.slots else None for name in self.fields]

    def find(self, names: Iterable[str]) -> list[int]:
        """Where tensors are among `held`; any place for those that are not there, as flags keep them unread."""
        return [self.slots.get(name, 0) for name in names]


class DifferencePlan:
    """The plans of both views of calls whose weights are a difference: first - lam * second."""

    def __init__(self, plans: Sequence[Any], lam: float) -> None:
        self.plans, self.lam = plans, lam

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *tables: Tensor | None) -> Tensor:
        views = zip(self.plans, q.chunk(2, -1), k.chunk(2, -1), strict=True)
        first, second = [plan.attend(*view, v, *tables) for plan, *view in views]
        return torch.sub(first, second, alpha=self.lam)


class Planned(torch.autograd.Function):
    """A planned call with its gradient: the same kernels as the operators, without torch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, plan: KernelPlan, *held: Tensor) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(*held)
        return plan.forward(held)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        plan: KernelPlan = ctx.plan
        differentiable = torch.is_grad_enabled() or is_intercepted(d_out)
        found = (plan.differentiable_backward if differentiable else plan.backward)(d_out, ctx.saved_tensors)
        return None, *[None if result is None else found[result] for result in plan.results]


APPLY = super(torch.autograd.Function, Planned).apply
"""`Planned.apply` without its check for torch.func transforms, under which no plan is called; the check costs 3 us."""


def fill_gradients(found: Gradients, like: Tensor) -> tuple[Tensor, ...]:
    """The results of an operator, which cannot be None: empty where there is no gradient."""
    return tuple(like.new_empty(0, dtype=torch.float32) if grad is None else grad for grad in found)


PLANS: PlanCache[KernelPlan] = PlanCache()
K = TypeVar("K", bound=KernelPlan)


def open_plan(kind: type[K], inputs: Sequence[Any]) -> tuple[K, list[Tensor]]:
    """The plan of an operator's inputs, and the tensors among them, tables without gaps."""
    count, first = len(kind.fields), kind.first_table
    tables = [None if table is None else table.contiguous() for table in inputs[first:count]]
    tensors, numbers = [*inputs[:first], *tables], tuple(inputs[count:])
    held = [tensor for tensor in tensors if tensor is not None]
    key = (kind.__name__, numbers, is_aligned(*held), *map(layout, tensors))
    plan = PLANS.get(key) or PLANS.keep(key, kind(tensors, numbers))
    assert isinstance(plan, kind)
    return plan, held


def run_kernels(kind: type[KernelPlan], inputs: Sequence[Any]) -> Tensor:
    """What an operator makes of these inputs: by a plan, or by the operator where somebody has to see that."""
    if is_intercepted(*[tensor for tensor in inputs[: len(kind.fields)] if tensor is not None]):
        return kind.operator(*inputs)
    plan, held = open_plan(kind, inputs)
    return plan(held)
