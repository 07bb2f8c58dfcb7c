"""Plans: what eager calls of one layout launch, worked out once.

Sizes, strides, dtypes and options decide which kernels run, with what grid and which flags. A plan holds the prepared
launches of a call and of its gradient; calls that differ in nothing but their numbers share it. In eager mode autograd
meets one `torch.autograd.Function` around a plan, which costs a fifth of an operator of torch. Operators stay for
whatever traces or intercepts them: torch.compile, export, dispatch modes, tensor subclasses, second derivatives.

This file needs no Triton; the plans themselves are next to their kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
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
    return any(type(tensor) not in PLAIN for tensor in tensors)


class KernelPlan:
    """The launches of an operator and of its gradient, for one layout of the tensors that its inputs begin with.

    `tensors` are these tensors, None where there is none; `numbers` are the other inputs, the same for all calls.
    """

    operator: ClassVar[Callable[..., Tensor]]
    backward_operator: ClassVar[Callable[..., tuple[Tensor, ...]]]
    """Takes the gradient of the result before all that the operator takes."""
    num_tensors: ClassVar[int]
    first_table: ClassVar[int]
    """From which tensor on they are read by address alone, so that they may have no gaps."""
    gradient_of: ClassVar[Mapping[int, int]]
    """Which result of the backward pass belongs to which tensor."""

    def __init__(self, tensors: Sequence[Tensor | None], numbers: tuple[Any, ...]) -> None:
        self.numbers = numbers
        self.present = [index for index, tensor in enumerate(tensors) if tensor is not None]
        self.absent = len(tensors) - len(self.present)

    def forward(self, tensors: Sequence[Any]) -> Tensor:
        raise NotImplementedError

    def backward(self, d_out: Tensor, tensors: Sequence[Any]) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def differentiable_backward(self, d_out: Tensor, tensors: Sequence[Any]) -> tuple[Tensor, ...]:
        """`backward` by the operator, which knows its own gradient."""
        return self.backward_operator(d_out, *tensors, *self.numbers)

    def __call__(self, tensors: Sequence[Any]) -> Tensor:
        held = [tensor for tensor in tensors if tensor is not None]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in held):
            return Planned.apply(self, *held)
        return self.forward(tensors)

    def restore(self, held: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """All tensors of a call, from those that there are."""
        tensors: list[Tensor | None] = [None] * (len(held) + self.absent)
        for index, tensor in zip(self.present, held, strict=True):
            tensors[index] = tensor
        return tensors


class Planned(torch.autograd.Function):
    """A planned call with its gradient: the same kernels as the operators, without torch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, plan: KernelPlan, *held: Tensor) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(*held)
        return plan.forward(plan.restore(held))

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        plan: KernelPlan = ctx.plan
        tensors = plan.restore(ctx.saved_tensors)
        differentiable = torch.is_grad_enabled() or is_intercepted(d_out)
        found = (plan.differentiable_backward if differentiable else plan.backward)(d_out, tensors)
        results = [plan.gradient_of.get(index) for index in plan.present]
        return None, *[None if result is None else found[result] for result in results]


PLANS: PlanCache[KernelPlan] = PlanCache()


def open_plan(kind: type[KernelPlan], inputs: Sequence[Any]) -> tuple[KernelPlan, list[Any]]:
    """The plan of an operator's inputs, and the tensors among them, tables without gaps."""
    tensors, numbers = inputs[: kind.num_tensors], tuple(inputs[kind.num_tensors :])
    tables = [None if table is None else table.contiguous() for table in tensors[kind.first_table :]]
    tensors = [*tensors[: kind.first_table], *tables]
    aligned = is_aligned(*[tensor for tensor in tensors if tensor is not None])
    key = (kind.__name__, numbers, aligned, *map(layout, tensors))
    return PLANS.get(key) or PLANS.keep(key, kind(tensors, numbers)), tensors


def run_kernels(kind: type[KernelPlan], inputs: Sequence[Any]) -> Tensor:
    """What an operator makes of these inputs: by a plan, or by the operator where somebody has to see that."""
    if is_intercepted(*[tensor for tensor in inputs[: kind.num_tensors] if tensor is not None]):
        return kind.operator(*inputs)
    plan, tensors = open_plan(kind, inputs)
    return plan(tensors)
