"""Where a model runs, and in how many bits."""

from __future__ import annotations

import torch

from rectiformer.errors import ArgumentError
from rectiformer.model.transformer import Transformer

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}


def hold_weights(model: Transformer, dtype: torch.dtype) -> None:
    """Hold every parameter in `dtype`, tied ones still tied; position signals stay as they are, exact.

    For a model that learns no more: what projections are multiplied with is multiplied in.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for site in model.sites():
        site.attention.fold_projections()


def find_device(device: str | torch.device) -> torch.device:
    """The device itself, "auto" being a GPU if there is one; ArgumentError where it is not there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f"unknown device {device!r}; use auto, cpu or cuda") from error
    if found.type not in ("cpu", "cuda"):
        raise ArgumentError(f"device {str(device)!r} is not supported; use auto, cpu or cuda")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(f"device {str(device)!r}, but torch finds no GPU here; use auto or cpu")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(f"device {str(device)!r}, but torch finds {torch.cuda.device_count()} GPUs, from cuda:0")
    return found
