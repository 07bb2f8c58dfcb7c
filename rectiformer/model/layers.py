"""Encoder and decoder layers: attention and memory inside residual connections, normed after the sum or before."""

from collections.abc import Callable

from torch import Tensor, nn

from rectiformer.config import SITES, ModelConfig
from rectiformer.errors import ConfigError
from rectiformer.model.attention import RectifiedAttention
from rectiformer.model.cache import KeyValueCache, StaticLayer
from rectiformer.model.dropout import Dropout
from rectiformer.model.memory import KeyValueMemory
from rectiformer.model.projection import LearnedOption, build_learned
from rectiformer.model.rotary import Rotation, SentenceRotary
from rectiformer.ops.activations import dot_scores
from rectiformer.ops.norm import add_norm
from rectiformer.ops.variants import VARIANTS, find_variant

EPSILON = 1e-8
"""Of every LayerNorm, as in the ReLA code."""


class LayerNorm(nn.LayerNorm):
    """Computed in float32 and given back in the dtype it came in, so that the residual stream stays narrow."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(x.dtype)


class Residual(nn.Module):
    """x plus a sublayer's output, with its LayerNorm: norm(x + f(x)) in "post" order, x + f(norm(x)) in "pre"."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = LayerNorm(config.hidden_size)
        self.drop = Dropout(config.dropout)
        self.after = config.norm == "post"

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.after:
            return add_norm(x, self.drop(sublayer(x)), self.norm.weight, self.norm.bias, EPSILON)
        return x + self.drop(sublayer(self.norm(x))).to(x.dtype)  # autocast may end a sublayer in a float32 sum


def build_attention(config: ModelConfig, site: str, shared: dict[str, LearnedOption]) -> RectifiedAttention:
    """The attention at `site` "encoder", "decoder" or "cross"; `shared` holds the options that all layers share."""
    variant = config.variant_at(site)
    sharing, init = learned_settings(config, variant)
    return RectifiedAttention(
        config.hidden_size,
        config.num_heads,
        variant,
        cross=site == "cross",
        dropout=config.attention_dropout,
        option_sharing=shared[variant] if sharing == "model" else sharing,
        option_init=init,
        options=fixed_options(config, variant),
        output_norm=config.output_norm or None,
        norm_epsilon=config.norm_epsilon,
        center_keys=centers_keys(config, site),
        score_bias=find_score_bias(config, variant),
        qk_norm=config.qk_norm and find_variant(variant).score is dot_scores,
        output_gate=config.output_gate == "head",
    )


def centers_keys(config: ModelConfig, site: str) -> bool:
    """Whether the attention at this site subtracts the mean of a sentence from its keys."""
    if site == "decoder":
        return False
    if config.center_keys == "auto":
        return find_variant(config.variant_at(site)).center_keys
    return config.center_keys == "yes"


def find_score_bias(config: ModelConfig, variant: str) -> float | None:
    """What is added to the scores at first, where queries learn to add to it; None where they do not."""
    opening = find_variant(variant).opening
    if opening is None or config.score_bias == "none":
        return None
    return opening if config.score_bias == "open" else 0.0


def fixed_options(config: ModelConfig, variant: str) -> dict[str, int]:
    """The variant's numbers that the configuration fixes."""
    given = config.attention_power
    return {"power": given} if given and "power" in find_variant(variant).options else {}


def require_power(config: ModelConfig) -> None:
    """ConfigError where a power is given that no attention has."""
    variants = sorted({config.variant_at(site) for site in SITES})
    if config.attention_power and not any(fixed_options(config, variant) for variant in variants):
        having = ", ".join(name for name, row in VARIANTS.items() if "power" in row.options)
        raise ConfigError(
            f"model.attention_power = {config.attention_power}, but attention is {', '.join(variants)}, which has no "
            f"power; leave it out, or choose one of {having}"
        )


def learned_settings(config: ModelConfig, variant: str) -> tuple[str, float | None]:
    """How the variant's gamma, beta or alpha is shared, and its initial value; None for the option's own default.

    A second number that a variant learns is shared as the first is, and starts at its default.
    """
    row = find_variant(variant)
    name = next(iter(LearnedOption.names_in(row)), None)
    if name is None:
        return "fixed", None
    return getattr(config, f"{name}_sharing"), getattr(config, f"{name}_init") or row.learned_init or None


def build_memory(config: ModelConfig) -> KeyValueMemory:
    layers = config.encoder_layers + config.decoder_layers
    return KeyValueMemory(config.hidden_size, config.ffn_size, config.memory, dropout=config.ffn_dropout, layers=layers)


class EncoderLayer(nn.Module):
    """Self-attention, then a memory."""

    def __init__(self, config: ModelConfig, shared: dict[str, LearnedOption]) -> None:
        super().__init__()
        self.attention = build_attention(config, "encoder", shared)
        self.memory = build_memory(config)
        self.around_attention = Residual(config)
        self.around_memory = Residual(config)

    def forward(self, x: Tensor, lengths: Tensor | None, rotation: Rotation | None = None) -> Tensor:
        x = self.around_attention(
            x, lambda x: self.attention(x, key_lengths=lengths, rotary=SentenceRotary(rotation, rotation))
        )
        return self.around_memory(x, self.memory)


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention, then a memory."""

    def __init__(self, config: ModelConfig, shared: dict[str, LearnedOption]) -> None:
        super().__init__()
        self.attention = build_attention(config, "decoder", shared)
        self.cross = build_attention(config, "cross", shared)
        self.memory = build_memory(config)
        self.around_attention = Residual(config)
        self.around_cross = Residual(config)
        self.around_memory = Residual(config)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        context_lengths: Tensor | None,
        rotation: Rotation | None = None,
        context_rotation: Rotation | None = None,
    ) -> Tensor:
        """All positions [B, M, E] at once, each seeing itself and what precedes it."""
        own, across = SentenceRotary(rotation, rotation), SentenceRotary(rotation, context_rotation)
        x = self.around_attention(x, lambda x: self.attention(x, causal=True, rotary=own))
        x = self.around_cross(x, lambda x: self.cross(x, context, key_lengths=context_lengths, rotary=across))
        return self.around_memory(x, self.memory)

    def step(
        self,
        x: Tensor,
        context: Tensor,
        context_lengths: Tensor | None,
        self_cache: KeyValueCache | StaticLayer,
        cross_cache: KeyValueCache,
        self_lengths: Tensor | None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """One position [R, 1, E] of R = B * beam hypotheses; `cross_cache` holds the keys of the context already.

        `self_lengths` [R] counts the positions that a static `self_cache` then holds.
        The beam is the query axis of cross-attention, so a source's keys are held once, not once per hypothesis.
        """

        def attend(x: Tensor) -> Tensor:
            if isinstance(self_cache, StaticLayer):
                assert self_lengths is not None
                return self.attention.step(x, self_cache, self_lengths, SentenceRotary(rotation, rotation))
            return self.attention(x, cache=self_cache, rotary=SentenceRotary(rotation, rotation))

        def attend_context(x: Tensor) -> Tensor:
            rotary = SentenceRotary(None if rotation is None else rotation.per_source(len(context)))
            return self.cross(x, context, key_lengths=context_lengths, cache=cross_cache, rotary=rotary)

        x = self.around_attention(x, attend)
        attended = self.around_cross(x.view(len(context), -1, x.shape[-1]), attend_context)
        return self.around_memory(attended.view(x.shape), self.memory)


def build_shared(config: ModelConfig) -> dict[str, LearnedOption]:
    """The learned options of each variant that all layers share, where the configuration asks for that."""
    shared = {}
    for variant in dict.fromkeys(config.variant_at(site) for site in SITES):
        row, (sharing, init) = find_variant(variant), learned_settings(config, variant)
        if sharing == "model" and (learned := build_learned(row, "layer", 1, {}, init)) is not None:
            shared[variant] = learned
    return shared
