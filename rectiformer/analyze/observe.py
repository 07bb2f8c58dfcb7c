"""Watching any model attend: `with rectiformer.observe(model) as seen: model(...)`, then arrays, records, a report."""

from __future__ import annotations

import html
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import nn

from rectiformer.analyze.consistency import check_example
from rectiformer.analyze.record import AttentionRecord, Example, ModelCard, PieceSpan, Side, SiteRecord
from rectiformer.analyze.sites import site_records
from rectiformer.analyze.survey import observing
from rectiformer.errors import ArgumentError, DataError
from rectiformer.model.attention import MultiHeadAttention
from rectiformer.model.observation import Observation
from rectiformer.model.transformer import Site, Transformer
from rectiformer.ops.variants import find_variant

INTEGRATION = "rectiformer.integrations.transformers"
CROSS_NAMES = ("encoder_attn", "crossattention", "cross_attn", "EncDecAttention")
"""What modules that attend from a decoder to a source are called in transformers."""

Pass = dict[tuple[str, int], list[SiteRecord]]
"""By kind and layer what an attention did with each sequence of a batch."""


@dataclass(frozen=True)
class Shown:
    """A page that a notebook shows in a frame of its own."""

    page: str

    def _repr_html_(self) -> str:
        # Without allow-same-origin, nothing in the frame can reach the notebook.
        frame = 'sandbox="allow-scripts allow-downloads" style="width:100%;height:760px;border:0"'
        return f'<iframe {frame} srcdoc="{html.escape(self.page)}"></iframe>'


class Seen:
    """What was seen of a model so far. Only weights other than 0 are kept, whatever the length."""

    def __init__(self, model: nn.Module) -> None:
        self.passes: list[Pass] = []
        self.variants = {"encoder": "", "decoder": "", "cross": ""}
        self._name = type(model).__name__
        self._kinds = {id(module): kind_of(name, model) for name, module in model.named_modules()}

    def weights(self, kind: str, layer: int, call: int = -1) -> np.ndarray:
        """Weights [B, H, M, N] of an attention in its last call, or in another; those of padding are 0."""
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

    @property
    def records(self) -> list[AttentionRecord]:
        """One record, with an example for each sequence of each pass."""
        return [self.record()]

    def record(self, source: Sequence[Sequence[str]] = (), target: Sequence[Sequence[str]] = ()) -> AttentionRecord:
        """All passes as a record, an example for each sequence.

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
            raise ArgumentError(f"nothing was seen of {self._name}; call it inside of `with observe(model)`")
        sites = [site for example in examples for site in example.sites]
        layers = {
            side: max((site.layer + 1 for site in sites if site.kind in kinds), default=0)
            for side, kinds in (("encoder", ("encoder",)), ("decoder", ("decoder", "cross")))
        }
        return AttentionRecord(
            ModelCard(self._name, "", dict(self.variants), layers, max(site.heads for site in sites)), examples
        )

    def show(self, source: Sequence[Sequence[str]] = (), target: Sequence[Sequence[str]] = ()) -> Shown:
        """The report, for a notebook; the arguments are those of `record`."""
        from rectiformer.analyze.report import report_html

        return Shown(report_html([self.record(source, target)]))

    def begin(self) -> None:
        """What is seen from here on belongs to another call of the model."""
        self.passes.append({})

    def see(self, observation: Observation, kind: str, layer: int) -> None:
        """Keep the weights of a call."""
        self.variants[kind] = observation.variant
        if not find_variant(observation.variant).has_weights:
            return
        if not self.passes or (kind, layer) in self.passes[-1]:
            self.begin()
        queries, keys = real_lengths(observation, kind)
        self.passes[-1][kind, layer] = site_records(observation, kind, layer, queries, keys)

    def see_module(self, module: nn.Module, observation: Observation) -> None:
        """Keep the weights of a call by a Hugging Face model; its layers are numbered as they are called."""
        if (kind := self._kinds.get(id(module))) is not None:
            layer = sum(known == kind for known, _ in self.passes[-1]) if self.passes else 0
            self.see(observation, kind, layer)


@contextmanager
def observe(model: nn.Module) -> Iterator[Seen]:
    """See what attention does inside: in a Transformer or any module that holds `MultiHeadAttention`, and in a Hugging
    Face model whose attention is one of `rectiformer.integrations.transformers`.

    Each call of the model is a pass. Self-attention outside of an encoder-decoder has the kind "encoder".
    """
    seen = Seen(model)
    integration = sys.modules.get(INTEGRATION)  # without it no Hugging Face model can have our attention
    sites = list(find_sites(model))
    if not sites and integration is None:
        raise ArgumentError(
            f"{type(model).__name__} has no MultiHeadAttention, and {INTEGRATION} was not imported; register() with it "
            "and load the model with attn_implementation='rectified'"
        )
    with ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(lambda *_: seen.begin()).remove)
        for site in sites:
            stack.enter_context(observing(site, partial(seen.see, kind=site.kind, layer=site.layer)))
        if integration is not None:
            see = seen.see_module
            integration.OBSERVERS.append(see)
            stack.callback(integration.OBSERVERS.remove, see)
        yield seen


def find_sites(model: nn.Module) -> Iterator[Site]:
    """Every `MultiHeadAttention` of a model and where it stands."""
    whole = next((module for module in model.modules() if isinstance(module, Transformer)), None)
    if whole is not None:
        yield from whole.sites()
        return
    counts = {"encoder": 0, "cross": 0}
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            kind = "cross" if module.cross else "encoder"
            yield Site(kind, counts[kind], module)
            counts[kind] += 1


def kind_of(name: str, model: nn.Module) -> str:
    """The kind of attention that a module of a Hugging Face model has, by its name."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return "encoder"
    if any(part in name for part in CROSS_NAMES):
        return "cross"
    return next((part for part in name.split(".") if part in ("encoder", "decoder")), "encoder")


def real_lengths(observation: Observation, kind: str) -> tuple[list[int], list[int]]:
    """How many queries and keys of each sequence are no padding, as far as the call says.

    A decoder's are all taken: what attends from it to the source is not told their number.
    """
    (batch, _, M, _), N = observation.q.shape, observation.k.shape[2]
    given = observation.call.get("key_lengths")
    keys = [N] * batch if given is None or kind == "decoder" else [int(length) for length in given]
    return keys if kind == "encoder" and M == N else [M] * batch, keys


def build_example(sites: list[SiteRecord], source: Sequence[Sequence[str]], target: Sequence[Sequence[str]]) -> Example:
    """What one sequence was seen to do; each token is a word."""
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
    """A sequence of the tokens given for it, or of its positions."""
    labels = list(given[0][:length]) if given else [str(position) for position in range(length)]
    if len(labels) < length:
        raise ArgumentError(f"{len(labels)} tokens were given for a sequence of {length}; give each position one")
    pieces, start = [], 0
    for label in labels:
        pieces.append(PieceSpan(label, start, start + len(label)))
        start += len(label) + 1
    words = [(index, index + 1, piece.start, piece.stop) for index, piece in enumerate(pieces)]
    return Side(" ".join(labels), pieces, words)
