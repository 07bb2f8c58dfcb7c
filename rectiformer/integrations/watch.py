"""A warning at the first forward of a Hugging Face model that is set to one of our names and never calls us.

Models are set to a name in their constructor or by `set_attn_implementation`. Both are wrapped, once, and leave one
hook on the model, which follows its first call as `verify` does and removes itself. Models that are not set to our
names, and later calls, have nothing to do with it. A compiled first call is not followed.
"""

from __future__ import annotations

import sys
import warnings
from functools import partial, wraps
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel

from rectiformer.errors import ArgumentError
from rectiformer.integrations.reach import NAMES, TRACES, Trace, is_ours

WRAPPED: list[str] = []
"""The methods of transformers' models that are wrapped already."""


def watch_models() -> None:
    """Have every model that is set to one of our names followed at its first forward; calling it again is harmless."""
    if WRAPPED:
        return
    WRAPPED.extend(("__init__", "set_attn_implementation"))
    initialize, set_implementation = PreTrainedModel.__init__, PreTrainedModel.set_attn_implementation

    @wraps(initialize)
    def initialize_watched(self: PreTrainedModel, *arguments: Any, **options: Any) -> None:
        initialize(self, *arguments, **options)
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
                f"{type(self).__name__} does not use transformers' AttentionInterface, so that "
                f"set_attn_implementation({asked!r}) changed nothing: its attention stays its own",
                stacklevel=2,
            )

    PreTrainedModel.__init__ = initialize_watched  # type: ignore[method-assign]
    PreTrainedModel.set_attn_implementation = set_watched  # type: ignore[method-assign]


def refuse_own_classes(model: PreTrainedModel) -> None:
    """Where a model picks a class of its own by the name of its attention, have ours refused in one line there."""
    for kind in type(model).__mro__:
        for variable, classes in list(vars(sys.modules.get(kind.__module__, object)).items()):
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
    """Follow the model at its next call."""
    if first_forward not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(first_forward)


class FirstTrace(Trace):
    """Follows the first forward of a model."""


def first_forward(model: nn.Module, _: object) -> None:
    """Follow this forward, unless it is part of one that is followed, and warn if attention does not reach us."""
    if torch.compiler.is_compiling() or not is_ours(model):
        return
    for other in list(TRACES):
        if isinstance(other, FirstTrace) and other.model is model:  # an interrupt has kept it from ending
            other.stop()
        elif any(part is model for part in other.model.modules()):
            return
    trace = FirstTrace(model)
    trace.start()

    def finish(model: nn.Module, _: object, output: object) -> None:
        handle.remove()
        trace.stop()
        if output is None:  # it failed, so that little was called; the next call is followed instead
            return
        unwatch(model)
        if complaint := trace.result().complaint:
            warnings.warn(complaint, stacklevel=2)

    handle = model.register_forward_hook(finish, always_call=True)


def unwatch(model: nn.Module) -> None:
    """Follow neither the model nor its parts any more."""
    for module in model.modules():
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is first_forward]:
            del module._forward_pre_hooks[key]
