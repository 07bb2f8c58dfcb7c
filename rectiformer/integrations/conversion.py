"""convert_attention(): a trained softmax model of Hugging Face to rectified attention.

The stages are those of `rectiformer convert`: each attention first learns to give what its softmax gave for the same
inputs, then the model learns to predict what it predicted. The attention functions of transformers have no weights of
their own, so nothing is fitted before, and keys are not centered.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rectiformer.errors import ArgumentError
from rectiformer.integrations.reach import NAMES, OBSERVERS
from rectiformer.model.imitation import divergence, recording, relative_error

IGNORED = -100
"""The label of tokens that do not count, in transformers."""


@dataclass(frozen=True)
class ConvertedModule:
    """One attention of a converted model, for the last batch."""

    name: str
    """The path of the module."""
    swapped: float
    """Squared error of its output for the softmax's inputs, as a share of the softmax's output, before training."""
    error: float
    """The same at the end."""


def convert_attention(
    model: PreTrainedModel,
    name: str,
    batches: Sequence[Mapping[str, Any]],
    *,
    align: float = 0.5,
    learning_rate: float = 1e-3,
    progress: Callable[[int, float], None] | None = None,
) -> list[ConvertedModule]:
    """Change a causal or encoder-decoder language model, in place, so that it does with attention `name` what it does
    now; returns what became of each attention.

    The text needs no labels of its own; that of the model's training is best. All parameters are trained, with Adam
    and a rate that falls to 0. Afterwards load the saved model with `attn_implementation=name`.

    Args:
        model: attends by softmax; any `attn_implementation` of transformers.
        name: one that `register` has registered.
        batches: arguments of `model`, one update each: `input_ids`, `attention_mask` and, of an encoder-decoder,
            `labels` or `decoder_input_ids`.
        align: share of updates, at first, in which each attention learns by itself.
        progress: told how many updates are done, and the loss of the last.
    """
    if name not in NAMES:
        raise ArgumentError(
            f"attention {name!r} is not registered; call rectiformer.integrations.transformers.register"
        )
    own = model.config._attn_implementation
    if own in NAMES:
        raise ArgumentError(f"the model attends by {own!r} already; load it with its own attention, such as 'sdpa'")
    if not batches:
        raise ArgumentError("there are no batches to learn on; give one for each update")
    trained = model.training
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    model.set_attn_implementation(name)
    try:
        paths = find_attentions(model.eval(), batches[0])
    except Exception:
        model.set_attn_implementation(own)
        model.train(trained)
        raise
    pairs = {path: (model.get_submodule(path), teacher.get_submodule(path)) for path in paths}
    swapped = site_errors(pairs, teacher, batches[-1])
    optimizer = torch.optim.Adam(model.parameters())
    for index, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * (1 - index / len(batches))
        if index < align * len(batches):
            errors = list(losses_of_sites(pairs, teacher, batch).values())
            loss = torch.stack(errors).mean()
        else:
            loss = loss_of_predictions(model, teacher, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if progress is not None:
            progress(index + 1, loss.item())
    ended = site_errors(pairs, teacher, batches[-1])
    model.train(trained)
    return [ConvertedModule(path, swapped[path], ended[path]) for path in paths]


def find_attentions(model: nn.Module, batch: Mapping[str, Any]) -> list[str]:
    """The paths of the modules that attend by our functions, in the order in which they are called."""
    found: dict[nn.Module, None] = {}
    with torch.no_grad(), observing(lambda module, _: found.setdefault(module)):
        model(**batch, use_cache=False)
    names = {module: path for path, module in model.named_modules()}
    if not found:
        raise ArgumentError(
            f"no attention of {type(model).__name__} takes a registered function; see docs/huggingface.md"
        )
    return [names[module] for module in found]


@contextmanager
def observing(see: Callable[[nn.Module, Any], None]) -> Iterator[None]:
    OBSERVERS.append(see)
    try:
        yield
    finally:
        OBSERVERS.remove(see)


Pairs = Mapping[str, tuple[nn.Module, nn.Module]]
"""Student and teacher of each attention, by its path."""


def losses_of_sites(pairs: Pairs, teacher: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """How far each attention is off, given what goes into its teacher's."""
    with torch.no_grad(), recording(theirs for _, theirs in pairs.values()) as calls:
        teacher(**batch, use_cache=False)
    two_sided = teacher.config.is_encoder_decoder  # the only stack of a causal model may be called "decoder" too
    errors = {}
    for path, (ours, theirs) in pairs.items():
        call, side = calls[theirs], "decoder" if two_sided and "decoder" in path.split(".") else "encoder"
        errors[path] = relative_error(call.repeat(ours), call.output, real_positions(batch, side, call.output))
    return errors


@torch.no_grad()
def site_errors(pairs: Pairs, teacher: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, float]:
    return {path: error.item() for path, error in losses_of_sites(pairs, teacher, batch).items()}


def loss_of_predictions(model: PreTrainedModel, teacher: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The mean divergence of the model's predictions from the teacher's."""
    with torch.no_grad():
        wanted = teacher(**batch, use_cache=False).logits
    logits = model(**batch, use_cache=False).logits
    side = "decoder" if model.config.is_encoder_decoder else "encoder"
    real = real_positions(batch, side, logits)
    return torch.where(real, divergence(logits, wanted), 0).sum() / real.sum().clamp_min(1)


def real_positions(batch: Mapping[str, Any], side: str, like: Tensor) -> Tensor:
    """Which positions [B, M] of a side are no padding; the tokens of a model with one side are its "encoder"'s."""
    mask = batch.get("attention_mask" if side == "encoder" else "decoder_attention_mask")
    if mask is None and side == "decoder" and batch.get("labels") is not None:
        mask = batch["labels"] != IGNORED
    if mask is None or mask.shape != like.shape[:2]:
        return torch.ones(like.shape[:2], dtype=torch.bool, device=like.device)
    return mask.bool().to(like.device)
