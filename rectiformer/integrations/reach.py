"""Which attention modules of a Hugging Face model call our attention: `verify`, and a warning at the first forward.

transformers accepts a registered name for any model, even one whose layers never ask the registry and compute their own
softmax. Only the calls themselves are a sure sign. So one forward pass is traced: every attention module that runs is
noted, and which of them call us.

Models are set to a name in their constructor or by `set_attn_implementation`. `watch_models` wraps both, once, so that
they leave one hook on the model, which traces its first call as `verify` does, warns, and removes itself. Models that
are not set to our names, and later calls, are not affected. A compiled first call is not traced.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from rectiformer.errors import ArgumentError, RectiformerError
from rectiformer.model.attention import Observation

NAMES: set[str] = set()
"""Every name that `register` has registered."""

OBSERVERS: list[Callable[[nn.Module, Observation], None]] = []
"""Told of every call of our attention and of the calling module; usually empty."""

TRACES: list[Trace] = []
"""Forward passes being traced; the inner models of a traced model need no trace of their own."""

ATTENTION = re.compile(r"(Attention|MLA)\d*$")
"""Names of the classes that attend in transformers; those in Output, Layer, Block and the like contain one of them."""


class MisusedMaskError(ArgumentError, AttributeError):
    """A model uses our mask like a tensor, so it computes attention by itself."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model} applies its attention mask itself instead of calling transformers' AttentionInterface, so it "
            "would keep its softmax; load it with attn_implementation='eager', or use another model"
        )


@dataclass(frozen=True)
class Reach:
    """Which attention modules of a model called ours in a forward pass, by their names in the model."""

    model: str
    reached: tuple[str, ...]
    """Called our attention."""
    missed: tuple[str, ...]
    """Ran without calling it: they compute their own attention."""
    idle: tuple[str, ...]
    """Did not run with these inputs, so nothing is known about them."""
    complaint: str = ""
    """Why this is not the attention that was requested, in one line; empty if it is."""


class Trace(ExitStack):
    """Traces what a model does until closed: which attention modules run, and which of them call us."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        attending = {module for root in our_models(model) for module in attention_modules(root, config_of(root))}
        self.names = {module: name for name, module in model.named_modules() if module in attending}
        self.running: list[nn.Module] = []
        self.ran: set[nn.Module] = set()
        self.reached: set[nn.Module] = set()
        for module in self.names:
            self.callback(module.register_forward_pre_hook(self.begin).remove)
            self.callback(module.register_forward_hook(self.end).remove)
        OBSERVERS.append(self.see)
        self.callback(OBSERVERS.remove, self.see)
        TRACES.append(self)
        self.callback(TRACES.remove, self)

    def begin(self, module: nn.Module, _: object) -> None:
        self.running.append(module)
        self.ran.add(module)

    def end(self, module: nn.Module, *_: object) -> None:
        if module in self.running:
            self.running.remove(module)

    def see(self, module: nn.Module, _: Observation) -> None:
        """Our attention was called by `module`, as transformers says: mostly the attention module itself."""
        self.reached.update((*self.running, module))

    def result(self) -> Reach:
        """What was traced so far."""
        names = {module: name for name, module in self.model.named_modules()}
        reached = [name for module, name in names.items() if module in self.reached]
        missed = {module: name for module, name in self.names.items() if module in self.ran - self.reached}
        idle = {module: name for module, name in self.names.items() if module not in self.ran | self.reached}
        complaint = complain(self.model, missed or idle) if missed or not reached else ""
        return Reach(type(self.model).__name__, tuple(reached), tuple(missed.values()), tuple(idle.values()), complaint)


def verify(model: nn.Module, **inputs: Any) -> Reach:
    """Run a model once and report which attention modules call the attention it was set to.

    ArgumentError, with their names in one line, if any module computes its own attention.

    Args:
        model: a Hugging Face model loaded with one of our names, or a module that holds one (compiled, PEFT, DDP).
        inputs: what to call it with. By default a few tokens, an empty image or silence, once without padding and once
            with it, since some models attend differently then. The model runs in eval mode without gradients and is
            left unchanged.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps; compiled calls cannot be traced
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
            reach = trace_call(model, given, known=bool(inputs))  # anew: a call may replace modules, as BigBird's does
    finally:
        for module in training:
            module.training = True
    return reach


def trace_call(model: nn.Module, given: dict[str, Any], known: bool) -> Reach:
    """The reach of one call of the model; ArgumentError if any attention is missed."""
    try:
        with Trace(model) as trace, torch.no_grad(), torch.compiler.set_stance("force_eager"):
            model(**given)
    except MisusedMaskError:
        pass  # the trace knows which module it was, and the complaint names it
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
    reach = trace.result()
    if reach.complaint:
        raise ArgumentError(reach.complaint)
    return reach


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
    """Two rows of six tokens of its vocabulary, none of them padding."""
    size = getattr(model.config.get_text_config(decoder=True), "vocab_size", 10)
    padding = getattr(model.config, "pad_token_id", None)
    usual = [token for token in range(min(size, 10)) if token != padding]
    return torch.tensor([(usual * 6)[:6], (usual[::-1] * 6)[:6]])


def signal_shape(name: str, config: Any) -> tuple[int, ...]:
    """The shape of one image or sound, according to the configuration."""
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
    """Whether the configuration of a module names one of our attentions."""
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
    """The attention modules that should call ours in a model of configuration `own`: the innermost ones of such names.

    A part with a configuration of another class, such as the vision tower of a language model, may have been given
    another attention on purpose. A part with a copy of the model's own configuration, as in T5's stacks, was not.
    """
    config = config_of(module)
    if config is not None and type(config) is not type(own) and not is_ours(module):
        return
    found = [each for child in module.children() for each in attention_modules(child, own)]
    if not found and ATTENTION.search(type(module).__name__):
        found = [module]
    yield from found


def complain(model: nn.Module, missed: dict[nn.Module, str]) -> str:
    """Which attention modules of a model keep their own attention, and what to do, in one line."""
    name = next((config_of(each)._attn_implementation for each in our_models(model)), "")  # type: ignore[union-attr]
    if not missed:
        return (
            f"{type(model).__name__} is set to {name!r} but never called it, so its attention, if any, is its own; "
            "use a model built on transformers' AttentionInterface"
        )
    classes: dict[str, list[str]] = {}
    for module, path in missed.items():
        classes.setdefault(type(module).__name__, []).append(path or "the model itself")
    listed = "; ".join(
        f"{name} ({paths[0]}{f' and {len(paths) - 1} more' if paths[1:] else ''})" for name, paths in classes.items()
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


@cache
def watch_models() -> None:
    """Trace every model that is set to one of our names at its first forward; only the first call does anything."""
    initialize, set_implementation = PreTrainedModel.__init__, PreTrainedModel.set_attn_implementation

    @wraps(initialize)
    def initialize_watched(self: PreTrainedModel, *arguments: Any, **options: Any) -> None:
        try:
            initialize(self, *arguments, **options)
        except ValueError as error:
            if "attn_implementation" in str(error):
                error.add_note(
                    f"rectiformer has registered {', '.join(map(repr, sorted(NAMES)))}; register() takes more"
                )
            raise
        if is_ours(self):
            refuse_own_classes(self)
            watch(self)

    @wraps(set_implementation)
    def set_watched(self: PreTrainedModel, *arguments: Any, **options: Any) -> None:
        set_implementation(self, *arguments, **options)
        ours = [module for module in self.modules() if isinstance(module, PreTrainedModel) and is_ours(module)]
        for module in ours:
            watch(module)
        asked = arguments[0] if arguments else options["attn_implementation"]
        if not ours and isinstance(asked, str) and asked in NAMES:
            warnings.warn(
                f"{type(self).__name__} does not use transformers' AttentionInterface, so "
                f"set_attn_implementation({asked!r}) changed nothing: it keeps its own attention",
                stacklevel=2,
            )

    PreTrainedModel.__init__ = initialize_watched  # type: ignore[method-assign]
    PreTrainedModel.set_attn_implementation = set_watched  # type: ignore[method-assign]


def refuse_own_classes(model: PreTrainedModel) -> None:
    """Make a model that picks its attention class by name refuse our names in one line."""
    for base in type(model).__mro__:
        for variable, classes in list(vars(sys.modules.get(base.__module__, object)).items()):
            if variable.endswith("ATTENTION_CLASSES") and isinstance(classes, dict):
                for name in NAMES - classes.keys():
                    classes[name] = partial(refuse_class, type(model).__name__, name, sorted(classes.keys() - NAMES))


def refuse_class(model: str, name: str, known: list[str], *_: Any, **__: Any) -> NoReturn:
    raise ArgumentError(
        f"{model} has attention classes of its own ({', '.join(known)}) and does not use transformers' "
        f"AttentionInterface, so it cannot be loaded with attn_implementation={name!r}; use one of those, or another "
        "model"
    )


def watch(model: PreTrainedModel) -> None:
    """Trace the model at its next call."""
    if first_forward not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(first_forward)


class FirstTrace(Trace):
    """Traces the first forward of a model."""


def first_forward(model: nn.Module, _: object) -> None:
    """Trace this forward, unless it is part of a traced one, and warn if any attention misses ours."""
    if torch.compiler.is_compiling() or not is_ours(model):
        return
    for other in list(TRACES):
        if isinstance(other, FirstTrace) and other.model is model:  # an interrupt kept it from ending
            other.close()
        elif any(part is model for part in other.model.modules()):
            return
    trace = FirstTrace(model)

    def finish(model: nn.Module, _: object, output: object) -> None:
        handle.remove()
        trace.close()
        if output is None:  # it failed, so little was called; the next call is traced instead
            return
        unwatch(model)
        if complaint := trace.result().complaint:
            warnings.warn(complaint, stacklevel=2)

    handle = model.register_forward_hook(finish, always_call=True)


def unwatch(model: nn.Module) -> None:
    """Stop tracing the model and its parts."""
    for module in model.modules():
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is first_forward]:
            del module._forward_pre_hooks[key]
