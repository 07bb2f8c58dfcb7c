"""Which attention modules of a Hugging Face model call our attention: `verify`.

transformers takes a registered name for any model, also for one whose layers never ask the registry and compute their
own softmax. What is called is the only sure sign. So one forward pass is followed: every attention module that runs is
noted, and which of them call us. watch.py has this done for the first forward of every model set to our names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from rectiformer.errors import ArgumentError, RectiformerError
from rectiformer.model.attention import Observation

NAMES: set[str] = set()
"""Every name that `register` has registered."""

OBSERVERS: list[Callable[[nn.Module, Observation], None]] = []
"""Told of every call of our attention, and by which module; empty unless someone watches."""

TRACES: list[Trace] = []
"""Forward passes that are being followed; the inner models of a followed one need no trace of their own."""

ATTENTION = re.compile(r"(Attention|MLA)\d*$")
"""How transformers names the classes that attend; Output, Layer, Block and the like contain one or belong to one."""


class MisusedMaskError(ArgumentError, AttributeError):
    """A model works with our mask as with a tensor, so that it attends by itself."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model} applies its attention mask itself instead of calling transformers' AttentionInterface, so it "
            "would keep its softmax; load it with attn_implementation='eager', or use another model"
        )


@dataclass(frozen=True)
class Reach:
    """What became of the attention modules of a model in a forward pass, by their names in it."""

    model: str
    reached: tuple[str, ...]
    """Called our attention."""
    missed: tuple[str, ...]
    """Ran without calling it: their softmax, or whatever they compute, is their own."""
    idle: tuple[str, ...]
    """Did not run with these inputs, so that nothing is known of them."""
    complaint: str = ""
    """In one line why this is not the attention that was asked for; empty where it is."""


class Trace:
    """Follows one forward pass of a model: which attention modules run, and which of them call us."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        attending = {module for root in our_models(model) for module in attention_modules(root, config_of(root))}
        self.names = {module: name for name, module in model.named_modules() if module in attending}
        self.running: list[nn.Module] = []
        self.ran: set[nn.Module] = set()
        self.reached: set[nn.Module] = set()
        self.ending = ExitStack()

    def start(self) -> None:
        """Follow what the model does from now on."""
        for module in self.names:
            self.ending.callback(module.register_forward_pre_hook(self.enter).remove)
            self.ending.callback(module.register_forward_hook(self.leave).remove)
        OBSERVERS.append(self.see)
        self.ending.callback(OBSERVERS.remove, self.see)
        TRACES.append(self)
        self.ending.callback(TRACES.remove, self)

    def stop(self) -> None:
        """Leave nothing behind."""
        self.ending.close()

    def enter(self, module: nn.Module, _: object) -> None:
        self.running.append(module)
        self.ran.add(module)

    def leave(self, module: nn.Module, *_: object) -> None:
        if module in self.running:
            self.running.remove(module)

    def see(self, module: nn.Module, _: Observation) -> None:
        """Our attention was called; `module` is who transformers says it is, mostly the attention module itself."""
        self.reached.update((*self.running, module))

    def result(self) -> Reach:
        """What was seen so far."""
        names = {module: name for name, module in self.model.named_modules()}
        reached = [name for module, name in names.items() if module in self.reached]
        missed = {module: name for module, name in self.names.items() if module in self.ran - self.reached}
        idle = {module: name for module, name in self.names.items() if module not in self.ran | self.reached}
        complaint = complain(self.model, missed or idle) if missed or not reached else ""
        return Reach(type(self.model).__name__, tuple(reached), tuple(missed.values()), tuple(idle.values()), complaint)


def verify(model: nn.Module, **inputs: Any) -> Reach:
    """Run a model once and see which attention modules call the attention it was set to; ArgumentError, in one line
    that names them, if any computes its own.

    Args:
        model: a Hugging Face model loaded with one of our names, or a module that holds one (compiled, PEFT, DDP).
        inputs: what to call it with. Unless given, a few tokens or an empty image or sound: once without padding and
            once with, since some models attend differently then. Gradients, dropout and training mode are left out,
            and nothing of the model changes.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps; it has to run uncompiled to be followed
    if not any(our_models(model)):
        found = {config._attn_implementation for module in model.modules() if (config := config_of(module)) is not None}
        raise ArgumentError(
            f"{type(model).__name__} is set to {', '.join(sorted(map(repr, found))) or 'no attention implementation'}, "
            f"none of ours ({', '.join(sorted(NAMES)) or 'call register() first'}); pass attn_implementation when "
            "loading it"
        )
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        for given in [inputs] if inputs else dummy_inputs(model):
            reach = follow(model, given, known=bool(inputs))
    finally:
        for module in training:
            module.training = True
    return reach


def follow(model: nn.Module, given: dict[str, Any], known: bool) -> Reach:
    """What one call of the model reaches; ArgumentError if not all of its attention."""
    trace = Trace(model)  # for each call, since a call may replace modules: BigBird's does
    trace.start()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            run_dummy(model, given, known)
    except MisusedMaskError:
        pass  # which module it was is known, and is part of the complaint
    finally:
        trace.stop()
    reach = trace.result()
    if reach.complaint:
        raise ArgumentError(reach.complaint)
    return reach


def run_dummy(model: nn.Module, given: dict[str, Any], known: bool) -> None:
    """Call the model; what goes wrong with inputs that are not the caller's is said to be about these."""
    try:
        model(**given)
    except RectiformerError:
        raise
    except Exception as error:
        if known:
            raise
        first = str(error).strip().partition("\n")[0][:200]
        raise ArgumentError(
            f"{type(model).__name__} does not run on the dummy inputs {', '.join(given)} ({type(error).__name__}: "
            f"{first}); give it some of yours: verify(model, {next(iter(given))}=...)"
        ) from error


def dummy_inputs(model: nn.Module) -> list[dict[str, Any]]:
    """A few tokens, an empty image or a second of silence for the model, without and with padding."""
    inner = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    config, main = inner.config, inner.main_input_name
    if main in ("pixel_values", "input_values", "input_features"):
        given = {main: torch.zeros(signal_shape(main, config), dtype=inner.dtype)}
        rows = 1
    else:
        given, rows = {main: some_tokens(inner)}, 2
    if config.is_encoder_decoder:
        given["decoder_input_ids"] = some_tokens(inner)[:rows]
    elif main == "input_ids" and hasattr(config, "vision_config") and not inner.can_generate():
        shape = signal_shape("pixel_values", config.vision_config)  # CLIP and its kin compare texts with images
        given["pixel_values"] = torch.zeros(shape, dtype=inner.dtype)
    given = {name: tensor.to(inner.device) for name, tensor in given.items()}
    if main != "input_ids":
        return [given]
    real = torch.ones_like(given[main])
    real[1, -2:] = 0
    return [given, {**given, "attention_mask": real}]


def some_tokens(model: PreTrainedModel) -> Tensor:
    """Two rows of six tokens of its vocabulary, none of which is padding."""
    size = getattr(model.config.get_text_config(decoder=True), "vocab_size", 10)
    padding = getattr(model.config, "pad_token_id", None)
    usual = [token for token in range(min(size, 10)) if token != padding]
    return torch.tensor([(usual * 6)[:6], (usual[::-1] * 6)[:6]])


def signal_shape(name: str, config: Any) -> tuple[int, ...]:
    """The shape of one image or sound, from what configurations of such models say."""
    if name == "pixel_values":
        config = getattr(config, "vision_config", config)
        size = getattr(config, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        return (1, getattr(config, "num_channels", 3), height, width)
    bins = getattr(config, "num_mel_bins", None)
    if bins is None:
        return (1, 16000)
    frames = getattr(config, "max_source_positions", None)
    return (1, getattr(config, "max_length", 64), bins) if frames is None else (1, bins, 2 * frames)


def config_of(module: nn.Module) -> PreTrainedConfig | None:
    config = getattr(module, "config", None)
    return config if isinstance(config, PreTrainedConfig) else None


def is_ours(module: nn.Module) -> bool:
    """Whether the configuration of a module names an attention of ours."""
    config = config_of(module)
    return config is not None and config._attn_implementation in NAMES


def our_models(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost models that are set to one of our names."""
    if isinstance(module, PreTrainedModel) and is_ours(module):
        yield module
        return
    for child in module.children():
        yield from our_models(child)


def attention_modules(module: nn.Module, own: PreTrainedConfig | None) -> Iterator[nn.Module]:
    """Every attention in a model of configuration `own` that is to be ours: the innermost modules named so.

    A part with a configuration of another class, such as the vision tower of a language model, may have been given
    another attention on purpose. A part with a copy of the model's own configuration, as T5's stacks have, may not.
    """
    config = config_of(module)
    if config is not None and type(config) is not type(own) and not is_ours(module):
        return
    found = [each for child in module.children() for each in attention_modules(child, own)]
    if not found and ATTENTION.search(type(module).__name__):
        found = [module]
    yield from found


def complain(model: nn.Module, missed: dict[nn.Module, str]) -> str:
    """In one line which attention modules of a model keep their own attention, and what to do."""
    name = next((config_of(each)._attn_implementation for each in our_models(model)), "")  # type: ignore[union-attr]
    if not missed:
        return (
            f"{type(model).__name__} is set to {name!r} but has called it nowhere, so its attention, if any, is its "
            "own; use a model built on transformers' AttentionInterface"
        )
    classes: dict[str, list[str]] = {}
    for module, path in missed.items():
        classes.setdefault(type(module).__name__, []).append(path or "the model itself")
    listed = "; ".join(
        f"{kind} ({paths[0]}{f' and {len(paths) - 1} more' if paths[1:] else ''})" for kind, paths in classes.items()
    )
    others = {
        config._attn_implementation
        for module in missed
        if (config := config_of(module)) is not None and config._attn_implementation not in NAMES
    }
    reason = (
        "these do not use transformers' AttentionInterface; load it with attn_implementation='eager', or use another "
        "model"
    )
    if others:
        reason = (
            f"their configuration says {', '.join(sorted(map(repr, others)))}, which set_attn_implementation does not "
            f"reach; pass attn_implementation={name!r} when loading the model"
        )
    return f"{type(model).__name__} is set to {name!r} but keeps its own attention in {listed}: {reason}"
