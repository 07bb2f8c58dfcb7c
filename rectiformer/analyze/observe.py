"""The attention of any model: `with rectiformer.observe(model) as seen: model(...)`, then arrays, records, a report."""

import html
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rectiformer.analyze.record import (
    AttentionRecord,
    Example,
    ModelCard,
    PieceSpan,
    Side,
    SiteRecord,
    check_example,
    write_record,
)
from rectiformer.analyze.recording import site_records
from rectiformer.analyze.survey import observing
from rectiformer.errors import ArgumentError, DataError
from rectiformer.model.attention import Observation, RectifiedAttention
from rectiformer.model.multihead import MultiheadAttention
from rectiformer.model.transformer import Transformer
from rectiformer.ops.call import shown_by
from rectiformer.ops.variants import find_variant

INTEGRATION = "rectiformer.integrations.transformers"
CROSS_NAMES = ("encoder_attn", "crossattention", "cross_attn", "EncDecAttention", "multihead_attn")
"""Names of cross-attention modules in transformers and, the last, in torch."""
OUTPUTS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
"""Fields of Hugging Face outputs that hold weights, one [B, H, M, N] per layer."""
Pass = dict[tuple[str, int], list[SiteRecord]]
"""The records of a call, one per sequence, by site and layer."""


@dataclass(frozen=True)
class Shown:
    """A page that a notebook shows in its own frame."""

    page: str

    def _repr_html_(self) -> str:
        # Without allow-same-origin, nothing in the frame can reach the notebook.
        frame = 'sandbox="allow-scripts allow-downloads" style="width:100%;height:760px;border:0"'
        return f'<iframe {frame} srcdoc="{html.escape(self.page)}"></iframe>'


class Seen:
    """What has been observed of a model so far. Only weights other than 0 are kept."""

    def __init__(self, model: nn.Module) -> None:
        self.passes: list[Pass] = []
        self.variants = {"encoder": "", "decoder": "", "cross": ""}
        self._name = type(model).__name__
        two_sided = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        self._kinds_by_name = {
            name: kind_by_name(name) if two_sided else "encoder" for name, _ in model.named_modules()
        }
        self._kinds = {id(module): self._kinds_by_name[name] for name, module in model.named_modules()}

    def __repr__(self) -> str:
        """What has been observed, one line per site."""
        calls = [each for each in self.passes if each]
        if not calls:
            return f"Seen of {self._name}: nothing yet; call it inside `with observe(model)`"
        sequences = sum(max(map(len, each.values())) for each in calls)
        lines = [f"Seen of {self._name}; calls: {len(calls)}, sequences: {sequences}"]
        for kind, variant in self.variants.items():
            sites = [site for each in calls for key in each if key[0] == kind for site in each[key]]
            if sites:
                lines.append(f"  {describe_sites(kind, variant, sites)}")
        return "\n".join([*lines, "  .weights(kind, layer), .record(tokens), .show(tokens), .save(path, tokens)"])

    def weights(self, kind: str, layer: int, call: int = -1) -> np.ndarray:
        """Weights [B, H, M, N] of an attention in its last call, or in another one; 0 for padding.

        Args:
            kind: "encoder", "decoder" or "cross"; printing this object shows which were seen.
            layer: counted from 0.
            call: counted from 0, or from the last one as -1.
        """
        calls = [each[kind, layer] for each in self.passes if (kind, layer) in each]
        if not -len(calls) <= call < len(calls):
            known = ", ".join(sorted({f"{kind} {layer}" for each in self.passes for kind, layer in each})) or "none"
            raise ArgumentError(
                f"{kind} layer {layer} was seen {len(calls)} times, so it has no call {call}; seen were {known}"
            )
        sites = calls[call]
        size = max(site.queries for site in sites), max(site.keys for site in sites)
        weights = np.zeros((len(sites), sites[0].heads, *size), np.float32)
        for index, site in enumerate(sites):
            weights[index, :, : site.queries, : site.keys] = site.dense()
        return weights

    def record(self, source: Sequence[Sequence[str]] = (), target: Sequence[Sequence[str]] = ()) -> AttentionRecord:
        """All calls as one record, with one example per sequence.

        Args:
            source, target: the tokens of each example, in place of their positions; those of padding may follow.
        """
        examples: list[Example] = []
        for each in self.passes:
            for index in range(max(map(len, each.values()), default=0)):
                sites = [sequences[index] for sequences in each.values()]
                number = len(examples)
                examples.append(build_example(sites, source[number:][:1], target[number:][:1]))
        if not examples:
            raise ArgumentError(f"nothing was seen of {self._name}; call it inside `with observe(model)`")
        sites = [site for example in examples for site in example.sites]
        layers = {"encoder": 0, "decoder": 0}
        for site in sites:
            side = "encoder" if site.kind == "encoder" else "decoder"
            layers[side] = max(layers[side], site.layer + 1)
        heads = max(site.heads for site in sites)
        return AttentionRecord(ModelCard(self._name, "", dict(self.variants), layers, heads), examples)

    def show(self, source: Sequence[Sequence[str]] = (), target: Sequence[Sequence[str]] = ()) -> Shown:
        """The report, for a notebook; the arguments are those of `record`."""
        from rectiformer.analyze.html_report import report_html

        return Shown(report_html([self.record(source, target)]))

    def save(
        self, path: str | Path, source: Sequence[Sequence[str]] = (), target: Sequence[Sequence[str]] = ()
    ) -> None:
        """Write the attention record, compressed where the name ends in .gz; `rectiformer.analyze.record.read_record`
        reads it. The other arguments are those of `record`."""
        write_record(self.record(source, target), path)

    def begin(self) -> None:
        """Start another call of the model."""
        if not self.passes or self.passes[-1]:
            self.passes.append({})

    def see(self, observation: Observation, kind: str, layer: int) -> None:
        """Keep the weights of a call."""
        self.variants[kind] = observation.variant
        if not find_variant(observation.variant).has_weights:
            return
        if not self.passes or (kind, layer) in self.passes[-1]:
            self.begin()
        queries, keys = real_lengths(observation, kind)
        self.passes[-1][kind, layer] = site_records(
            without_padded_queries(observation, kind), kind, layer, queries, keys
        )

    def see_module(self, module: nn.Module, observation: Observation) -> None:
        """Keep the weights of a call by a Hugging Face model; layers are numbered in the order of their calls."""
        if (kind := self._kinds.get(id(module))) is not None:
            self.see(observation, kind, self._next_layer(kind))

    def see_weights(self, name: str, output: str, weights: Tensor, real: Tensor | None) -> None:
        """Keep weights [B, H, M, N] returned by a stock model; layers are numbered in the order of their calls."""
        kind = self._kinds_by_name[name] if output == "attentions" else output.removesuffix("_attentions")
        self.variants[kind] = "softmax"
        (batch, _, M, N), layer = weights.shape, self._next_layer(kind)
        keys = None if kind == "decoder" or real is None else leading_lengths(real, (batch, N))
        keys = keys or [N] * batch
        queries = keys if kind == "encoder" and M == N else [M] * batch
        if kind == "encoder" and M == N and real is not None and real.shape == (batch, N):
            weights = weights.masked_fill(~real.bool().to(weights.device)[:, None, :, None], 0)
        cut = [
            each[:, :rows, :columns].float().cpu().numpy()
            for each, rows, columns in zip(weights, queries, keys, strict=True)
        ]
        # The mask of the call is not handed out. A softmax gives every key that it sees some weight.
        self.passes[-1][kind, layer] = [SiteRecord.from_dense(kind, layer, each, (each != 0).sum(-1)) for each in cut]

    def _next_layer(self, kind: str) -> int:
        return sum(known == kind for known, _ in self.passes[-1]) if self.passes else 0


@contextmanager
def observe(model: nn.Module) -> Iterator[Seen]:
    """Observe the attention of a model:

    - a Transformer, or any module that holds `RectifiedAttention` or the drop-in `MultiheadAttention`;
    - a Hugging Face model whose attention is one of `rectiformer.integrations.transformers`;
    - a stock Hugging Face model, which attends eagerly while it is observed and holds the weights of a whole call.

    Self-attention outside an encoder-decoder counts as "encoder". A model
    compiled by `torch.compile` runs uncompiled while it is observed; its outputs are the same up to rounding.
    """
    model = getattr(model, "_orig_mod", model)  # inside of what torch.compile gives
    seen = Seen(model)
    attentions, stock = list(find_attentions(model)), stock_models(model)
    if not attentions and not stock:
        raise ArgumentError(
            f"{type(model).__name__} holds no attention that can be observed: no RectifiedAttention or "
            "MultiheadAttention of rectiformer, and no Hugging Face model"
        )
    integration = sys.modules.get(INTEGRATION)  # without it no Hugging Face model can have our attention
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(model.register_forward_pre_hook(lambda *_: seen.begin()).remove)
        for kind, layer, attention in attentions:
            stack.enter_context(observing(attention, partial(seen.see, kind=kind, layer=layer)))
        if integration is not None and any(map(integration.is_ours, stock.values())):
            integration.OBSERVERS.append(seen.see_module)
            stack.callback(integration.OBSERVERS.remove, seen.see_module)
        elif stock:
            stack.enter_context(eager_weights(stock, seen))
        yield seen


def find_attentions(model: nn.Module) -> Iterator[tuple[str, int, RectifiedAttention | MultiheadAttention]]:
    """Site, layer and module of every attention of this package in a model."""
    whole = next((module for module in model.modules() if isinstance(module, Transformer)), None)
    if whole is not None:
        yield from ((site.kind, site.layer, site.attention) for site in whole.sites())
        return
    ours = (RectifiedAttention, MultiheadAttention)
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, ours)]
    crossing = {
        name
        for name, module in found
        if (module.cross if isinstance(module, RectifiedAttention) else kind_by_name(name) == "cross")
    }
    decoders = {name.rpartition(".")[0] for name in crossing}  # layers with cross-attention
    counts = {"encoder": 0, "decoder": 0, "cross": 0}
    for name, module in found:
        inside = "decoder" if name.rpartition(".")[0] in decoders else "encoder"
        kind = "cross" if name in crossing else inside
        yield kind, counts[kind], module
        counts[kind] += 1


def kind_by_name(name: str) -> str:
    """The attention site of a module of an encoder-decoder, by the names in torch and transformers."""
    if any(part in name for part in CROSS_NAMES):
        return "cross"
    return next((part for part in name.split(".") if part in ("encoder", "decoder")), "encoder")


def describe_sites(kind: str, variant: str, sites: Sequence[SiteRecord]) -> str:
    """One line about a site, over all its layers."""
    layers = sorted({site.layer for site in sites})
    where = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
    visible = sum(int(site.visible.sum(dtype=np.int64)) for site in sites)
    rows = sum(int((site.visible > 0).sum()) for site in sites)
    zeros = (visible - sum(len(site.weights) for site in sites)) / max(1, visible)
    null = sum(int(site.null.sum()) for site in sites) / max(1, rows)
    return f"{kind:<8}{where}, {sites[0].heads} heads, {variant}: {zeros:.1%} zeros, {null:.1%} null rows"


def real_lengths(observation: Observation, kind: str) -> tuple[list[int], list[int]]:
    """How many queries and keys of each sequence are not padding, as far as the call says.

    A decoder's are all taken: cross-attention is not told how many of its queries are real.
    """
    (batch, _, M, _), N = observation.q.shape, observation.k.shape[2]
    given, mask = observation.call.get("key_lengths"), real_keys(observation)
    keys = None
    if kind != "decoder" and given is not None:
        keys = [int(length) for length in given]
    elif kind != "decoder" and mask is not None:
        keys = leading_lengths(mask, (batch, N))
    keys = keys or [N] * batch
    return keys if kind == "encoder" and M == N else [M] * batch, keys


def real_keys(observation: Observation) -> Tensor | None:
    """Which keys of each sequence are not padding, [B, N], where the call has a mask that says so to all queries."""
    batch, N = observation.q.shape[0], observation.k.shape[2]
    mask, bias = (observation.call.get(name) for name in ("attn_mask", "attn_bias"))
    if mask is None and bias is not None:  # torch's encoders turn the mask of their padding into numbers
        mask = shown_by(bias)
    return mask[:, 0, 0] if mask is not None and mask.shape == (batch, 1, 1, N) else None


def without_padded_queries(observation: Observation, kind: str) -> Observation:
    """The observation where queries that are padding see nothing; where it comes last, they are cut off instead."""
    real, (M, N) = real_keys(observation), (observation.q.shape[2], observation.k.shape[2])
    if kind != "encoder" or M != N or real is None or leading_lengths(real, (len(real), N)) is not None:
        return observation
    seen = real[:, None, :, None] & real[:, None, None]
    return replace(observation, call={**observation.call, "attn_mask": seen})


def leading_lengths(real: Tensor, shape: tuple[int, int]) -> list[int] | None:
    """The lengths that a mask [B, N] stands for if all padding comes last; else None."""
    if real.shape != shape:
        return None
    lengths = real.bool().sum(1)
    leading = torch.arange(shape[1], device=real.device) < lengths[:, None]
    return lengths.tolist() if torch.equal(leading, real.bool()) else None


def build_example(sites: list[SiteRecord], source: Sequence[Sequence[str]], target: Sequence[Sequence[str]]) -> Example:
    """One observed sequence as an example; each token is a word."""
    sources = [site.queries if site.kind == "encoder" else site.keys for site in sites if site.kind != "decoder"]
    targets = [site.queries for site in sites if site.kind != "encoder"]
    example = Example(
        source=label_side(sources[0] if sources else 0, source),
        target=label_side(targets[0], target) if targets else None,
        forced=True,
        translation=None,
        gold=None,
        sites=sites,
    )
    try:
        check_example(example, "what was seen")
    except DataError as error:
        raise ArgumentError(f"{error}; a record needs whole sequences without a cache, weights() takes any") from error
    return example


def label_side(length: int, given: Sequence[Sequence[str]]) -> Side:
    """A sequence labeled with the given tokens, or with its positions."""
    labels = list(given[0][:length]) if given else [str(position) for position in range(length)]
    if len(labels) < length:
        raise ArgumentError(f"{len(labels)} tokens were given for a sequence of {length}; give each position one")
    pieces, start = [], 0
    for label in labels:
        pieces.append(PieceSpan(label, start, start + len(label)))
        start += len(label) + 1
    words = [(index, index + 1, piece.start, piece.stop) for index, piece in enumerate(pieces)]
    return Side(" ".join(labels), pieces, words)


def stock_models(model: nn.Module) -> dict[str, nn.Module]:
    """Every Hugging Face model inside a model, itself included, by name."""
    transformers = sys.modules.get("transformers.modeling_utils")  # without it there is none
    if transformers is None:
        return {}
    return {name: part for name, part in model.named_modules() if isinstance(part, transformers.PreTrainedModel)}


@contextmanager
def eager_weights(models: dict[str, nn.Module], seen: Seen) -> Iterator[None]:
    """While the models run inside, `seen` gets the weights of each attention."""
    calls = Calls(seen)
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
    """Inside, every configuration in the models says "eager"; parts may have their own copies, as T5's stacks do."""
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

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.depth = 0
        self.handed: list[Tensor] = []
        self.given: dict[str, Any] = {}

    def begin(self, model: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        self.depth += 1
        if self.depth > 1:
            return None
        self.seen.begin()
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
                    self.seen.see_weights(name, output, weights.detach(), self.given.get("attention_mask"))
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
            f"{type(model).__name__} returns {output} of shape {list(weights.shape)}, which are not weights of "
            "queries over keys, [B, H, M, N]; its attention cannot be shown here"
        )
