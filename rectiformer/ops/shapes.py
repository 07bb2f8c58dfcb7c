"""Named axes, checked at the boundary, so that every operation speaks of shapes in the same words."""

import torch
from torch import Tensor

from rectiformer.errors import ArgumentError, ShapeError


def match_shapes(**named: tuple[Tensor, str]) -> dict[str, int]:
    """Bind each axis letter to one size over all tensors, or say which two clash.

    `match_shapes(q=(q, "B H M D"), k=(k, "B K N D"))` returns `{"B": ..., "H": ..., ...}`.
    """
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    for name, (tensor, axes) in named.items():
        letters = axes.split()
        if not isinstance(tensor, Tensor):
            raise ArgumentError(f"{name} is a {type(tensor).__name__}, but it needs to be a tensor")
        if tensor.dim() != len(letters):
            raise ShapeError(f"{name} has {tensor.dim()} axes but needs {len(letters)}; {describe(named)}")
        for letter, size in zip(letters, tensor.shape, strict=True):
            if letter not in sizes:
                sizes[letter], owner[letter] = size, name
            elif sizes[letter] != size:
                clash = f"{name} has {letter} = {size} but {owner[letter]} has {letter} = {sizes[letter]}"
                raise ShapeError(f"{clash}; {describe(named)}")
    return sizes


def match_heads(sizes: dict[str, int], keys: str, named: dict[str, tuple[Tensor, str]]) -> None:
    """Refuse heads of size 0, and key heads (of the tensor called `keys`) that query heads cannot share evenly."""
    if sizes["D"] == 0:
        raise ShapeError(f"heads of size D = 0 have no scores; {describe(named)}")
    if sizes["K"] == 0 or sizes["H"] % sizes["K"]:
        raise ShapeError(f"{keys} has {sizes['K']} heads, which do not divide the {sizes['H']} of q; {describe(named)}")


def describe(named: dict[str, tuple[Tensor, str]]) -> str:
    """Every tensor with its axes and shape, for the end of a message."""
    return ", ".join(f"{name} [{axes}] is {list(tensor.shape)}" for name, (tensor, axes) in named.items())


def match_broadcast(name: str, tensor: Tensor, target: tuple[int, int, int, int]) -> Tensor:
    """View `tensor` with four axes that broadcast to `target`, or say why it cannot."""
    fits = tensor.dim() <= 4 and all(
        have in (1, want) for have, want in zip(reversed(tensor.shape), reversed(target), strict=False)
    )
    if not fits:
        raise ShapeError(f"{name} is {list(tensor.shape)}, which does not broadcast to [B H M N] = {list(target)}")
    return tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))


def match_floating(**named: Tensor) -> torch.dtype:
    """The one floating dtype and device all tensors share, or say which differs."""
    first_name, first = next(iter(named.items()))
    for name, tensor in named.items():
        if not tensor.is_floating_point():
            raise ArgumentError(
                f"{name} holds {tensor.dtype}, but attention needs a floating dtype; call .float() on it"
            )
        if tensor.dtype != first.dtype:
            raise ArgumentError(f"{name} is {tensor.dtype} but {first_name} is {first.dtype}; give both one dtype")
        if tensor.device != first.device:
            raise ArgumentError(f"{name} is on {tensor.device} but {first_name} is on {first.device}")
    return first.dtype
