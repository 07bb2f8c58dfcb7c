"""Weights of stock Hugging Face models: while they are watched they attend eagerly and return their weights.

transformers' fast attentions never hold their weights. Its eager one does, and returns them with `output_attentions`;
so that is asked for here, at the outermost model of each call, and taken out of its outputs again.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from rectiformer.errors import ArgumentError

OUTPUTS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
"""Where the outputs of Hugging Face models have their weights, one [B, H, M, N] for each layer."""

See = Callable[[str, str, Tensor, Tensor | None], None]
"""Handed the name of a model inside the watched one, that of its output, weights, and the attention mask given."""


def stock_models(model: nn.Module) -> dict[str, nn.Module]:
    """Every Hugging Face model inside of a model, itself included, by name."""
    transformers = sys.modules.get("transformers.modeling_utils")  # without it there is none
    if transformers is None:
        return {}
    return {name: part for name, part in model.named_modules() if isinstance(part, transformers.PreTrainedModel)}


@contextmanager
def eager_weights(models: dict[str, nn.Module], see: See, begin: Callable[[], None]) -> Iterator[None]:
    """While the models run inside, `see` gets the weights of every attention of theirs; `begin` says that what follows
    is of another call."""
    calls = Calls(see, begin)
    with ExitStack() as stack:
        stack.enter_context(eager_attention(models))
        for name, model in models.items():
            before = model.register_forward_pre_hook(calls.begin, with_kwargs=True)
            after = model.register_forward_hook(partial(calls.end, name), always_call=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield


@contextmanager
def eager_attention(models: dict[str, nn.Module]) -> Iterator[None]:
    """Inside, every configuration in the models says "eager"; parts may have copies of it, as T5's stacks have."""
    found: list[Any] = [getattr(module, "config", None) for model in models.values() for module in model.modules()]
    configs = {id(config): config for config in found if hasattr(config, "_attn_implementation_internal")}
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    try:
        for config, _ in before:
            config._attn_implementation_internal = "eager"
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name


class Calls:
    """Asks for weights in the outermost of nested calls, and takes each from the innermost model that has it."""

    def __init__(self, see: See, begin_call: Callable[[], None]) -> None:
        self.see, self.begin_call = see, begin_call
        self.depth = 0
        self.handed: list[Tensor] = []
        self.given: dict[str, Any] = {}

    def begin(self, model: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        self.depth += 1
        if self.depth > 1:
            return None
        self.begin_call()
        signature = inspect.signature(model.forward)
        names = [name for name, each in signature.parameters.items() if each.kind is not each.VAR_KEYWORD]
        self.handed, self.given = [], {**dict(zip(names, arguments, strict=False)), **options}
        if "output_attentions" not in names and len(names) == len(signature.parameters):
            return None
        named = {} if self.setting(model, "return_dict") else {"return_dict": True}
        return arguments, {**options, **named, "output_attentions": True}

    def end(self, name: str, model: nn.Module, _: object, outputs: Any) -> Any:
        self.depth -= 1
        if outputs is None:  # the call failed
            return None
        for output in OUTPUTS:
            for weights in getattr(outputs, output, None) or ():
                if isinstance(weights, Tensor) and not any(weights is known for known in self.handed):
                    check_weights(model, output, weights)
                    self.handed.append(weights)
                    self.see(name, output, weights.detach(), self.given.get("attention_mask"))
        if self.depth:
            return None
        if not self.handed:
            raise ArgumentError(
                f"{type(model).__name__} returns no attention weights, even when asked with output_attentions=True; "
                "load it with attn_implementation='eager', or with one of rectiformer's"
            )
        self.handed = []
        return self.as_asked(model, outputs)

    def as_asked(self, model: nn.Module, outputs: Any) -> Any:
        """The outputs as the caller wanted them."""
        if not self.setting(model, "output_attentions"):
            outputs = type(outputs)(**{name: value for name, value in outputs.items() if name not in OUTPUTS})
        return outputs if self.setting(model, "return_dict") else outputs.to_tuple()

    def setting(self, model: nn.Module, name: str) -> bool:
        """What the call says, or else the configuration of the model."""
        given = self.given.get(name)
        return bool(getattr(model.config, name) if given is None else given)


def check_weights(model: nn.Module, output: str, weights: Tensor) -> None:
    """ArgumentError unless these are weights over all keys."""
    windowed = getattr(model.config, "attention_window", None) is not None and output != "cross_attentions"
    if weights.dim() != 4 or windowed or (output != "cross_attentions" and weights.shape[2] > weights.shape[3]):
        raise ArgumentError(
            f"{type(model).__name__} returns {output} of shape {list(weights.shape)}, which are no weights of "
            "queries over keys, [B, H, M, N]; its attention cannot be shown here"
        )
