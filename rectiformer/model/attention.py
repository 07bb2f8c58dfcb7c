"""RectifiedAttention: multi-head attention of any variant, with a key/value cache and observers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rectiformer.errors import ArgumentError, ConfigError, ShapeError
from rectiformer.model.cache import KeyValueCache, StaticLayer
from rectiformer.model.norms import EPSILON, RMSNorm, build_output_norm
from rectiformer.model.projection import (
    LearnedOption,
    QueryKeyNorm,
    ScoreBias,
    build_learned,
    center_keys,
    check_heads,
    split_heads,
    variance_scaling_,
)
from rectiformer.model.rotary import NO_ROTARY, SentenceRotary, apply_rotary
from rectiformer.ops.activations import dot_scores
from rectiformer.ops.attention import Window, attention, check_call
from rectiformer.ops.call import HIDING, shown_by
from rectiformer.ops.decode import decode_attention
from rectiformer.ops.distributed import ContextGroup, attention_to_shards, context_parallel_attention
from rectiformer.ops.norm import OutputNorm
from rectiformer.ops.variants import find_variant
from rectiformer.ops.weights import (
    AttentionStats,
    RowStatistics,
    attention_stats,
    attention_weights,
    attention_with_rows,
    visible_keys,
)


@dataclass(frozen=True, repr=False)
class Observation:
    """One attention call, seen from outside. Nothing is computed until it is asked for."""

    variant: str
    q: Tensor  # [B, H, M, D]
    k: Tensor  # [B, K, N, D]
    output: Tensor  # [B, H, M, Dv], before norm and output projection
    call: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"Observation({self.variant!r}, q {list(self.q.shape)}, k {list(self.k.shape)})"

    def weights(self, sparse: bool = False) -> Tensor:
        """Weights before dropout: [B, H, M, N], or CSR of the non-zero ones."""
        return attention_weights(self.q, self.k, self.variant, sparse=sparse, **self.call)

    def stats(self) -> AttentionStats:
        """Row statistics, without M x N of anything."""
        return attention_stats(self.q, self.k, self.variant, **self.call)

    def visible(self) -> Tensor:
        """How many keys each query sees; broadcasts to [B, H, M]."""
        return visible_keys(self.q, self.k, self.variant, **self.call)


class RectifiedAttention(nn.Module):
    """Project, attend as the variant says, norm over all heads, project back.

    One matrix projects queries, keys and values, so self-attention is a single product. The ReLA authors initialize it
    as a whole (limit sqrt(3 / 1024) at width 512), but the separate projections of cross-attention each by themselves
    (limit sqrt(3 / 512)). Scores start smaller by that factor squared, which matters for a ReLU.

    Args:
        embed_dim: size of the residual stream; the heads share it equally.
        num_heads: number of query heads; must divide `embed_dim`.
        variant: a name from `rectiformer.VARIANTS`.
        num_kv_heads: number of key and value heads, a divisor of `num_heads`; default: as many.
        cross: whether keys come from another sequence; decides the initializer and nothing else.
        bias: whether the projections have biases, as in both papers.
        dropout: probability of dropping a weight in training.
        output_norm: a name from model/norms.py in place of the variant's own.
        norm_epsilon: what that norm adds to the mean square, inside the root.
        option_sharing: how the variant's learnable numbers (gamma of reluformer, beta of threshold, beta and lam of
            threshold-diff, alpha of entmax) are held: one per "head", one per "layer", "fixed" at the default or at
            what `options` says, or a `LearnedOption` shared by a whole model.
        option_init: where that number, of several the first, starts, or stays if "fixed"; default: the variant's own.
        options: the variant's numbers, fixed.
        center_keys: whether the mean of a sequence's keys is subtracted from them. A softmax never sees what all scores
            of a row have in common; a ReLU lets it switch whole rows on and off. Not for causal attention, whose rows
            each see other keys.
        score_bias: initial value of a learned bias of the scores (`ScoreBias`); with the power of a rectified variant
            it begins as a softmax does. Default: no bias.
        qk_norm: whether queries and keys are divided by their length, and scores multiplied with a learned number per
            head (`QueryKeyNorm`).
        output_gate: whether each head's output is multiplied with a sigmoid of x, after the norm.
    """

    observer: Callable[[Observation], None] | None
    """Handed an `Observation` of each call."""
    row_observer: Callable[[RowStatistics], None] | None
    """Handed statistics of each row of weights, with gradients, from the pass that mixes the values."""
    context_group: ContextGroup | None = None
    """The ranks that share the keys, each holding a part of them."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        variant: str = "rela-g",
        *,
        num_kv_heads: int | None = None,
        cross: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        output_norm: str | None = None,
        norm_epsilon: float = EPSILON,
        option_sharing: str | LearnedOption = "head",
        option_init: float | None = None,
        options: Mapping[str, float] | None = None,
        center_keys: bool = False,
        score_bias: float | None = None,
        qk_norm: bool = False,
        output_gate: bool = False,
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        super().__init__()
        check_heads(embed_dim, num_heads, num_kv_heads)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.cross, self.center_keys = cross, center_keys
        head_dim = embed_dim // num_heads
        self.qkv_sizes = [embed_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        self.score_bias = None if score_bias is None else ScoreBias(self.qkv_sizes, head_dim, score_bias)
        self.input_weight = nn.Parameter(torch.empty(sum(self.qkv_sizes), embed_dim))
        self.input_bias = nn.Parameter(torch.empty(sum(self.qkv_sizes))) if bias else None
        self.folded: tuple[Tensor, Tensor | None] | None = None
        if not 0 <= dropout < 1:
            raise ConfigError(f"dropout = {dropout}, but it is a probability below 1")
        if not norm_epsilon > 0:
            raise ConfigError(
                f"norm_epsilon = {norm_epsilon}, but it keeps null rows from a division by 0; make it above 0"
            )
        row = find_variant(variant)
        self.variant, self.views, self.dropout = variant, row.views, dropout
        self.options = dict(options or {})
        self.annealed: dict[str, int] = {}
        row.check_head_size(head_dim)
        if option_sharing == "fixed" and option_init is not None and (names := LearnedOption.names_in(row)):
            self.options.setdefault(names[0], option_init)
        row.resolve_options(self.options)
        self.norm = build_output_norm(output_norm or row.output_norm, embed_dim, num_heads, norm_epsilon)
        self.output = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.gate = nn.Linear(embed_dim, num_heads) if output_gate else None
        if qk_norm and row.score is not dot_scores:
            raise ConfigError(f"qk_norm = True, but scores of variant {variant!r} are no products; leave it out")
        self.qk_norm = QueryKeyNorm(num_heads, held=0 if score_bias is None else 1) if qk_norm else None
        self.learned = build_learned(row, option_sharing, num_heads, self.options, option_init)
        # Whether `learned` is folded into the query projection instead of being handed to the attention operator.
        self.scales_scores = self.learned is not None and row.row_scale is not None and self.qk_norm is None
        self.observer = None
        self.row_observer = None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for part in self.input_weight.split(self.qkv_sizes) if self.cross else [self.input_weight]:
            variance_scaling_(part)
        if self.score_bias is not None:
            self.score_bias.reset(self.input_weight)
        variance_scaling_(self.output.weight)
        if self.gate is not None:
            variance_scaling_(self.gate.weight)
        for bias in (self.input_bias, self.output.bias, None if self.gate is None else self.gate.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def extra_repr(self) -> str:
        return (
            f"{self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, variant={self.variant!r}"
        )

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        causal: bool = False,
        key_lengths: Tensor | None = None,
        attn_mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
        window_size: Window | None = None,
        cache: KeyValueCache | None = None,
        rotary: SentenceRotary = NO_ROTARY,
    ) -> Tensor:
        """Attend from x [B, M, E] to context [B, N, E] (default: x itself): [B, M, E].

        With a `cache`, self-attention adds the tokens of x to it and attends to all it holds; cross-attention fills
        it at the first call and reads it afterwards, so `context` is projected once. `rotary` tells sentences apart.
        """
        for name, given in (("x", x), ("context", context)):
            if given is not None and (given.dim() != 3 or given.shape[-1] != self.embed_dim):
                raise ShapeError(f"{name} is {list(given.shape)}, but it needs [B length E] with E = {self.embed_dim}")
        q, k, v = self.project(x, context, cache, key_lengths, rotary)
        if self.context_group is not None:
            return self.combine_heads(self.attend_shards(q, k, v, context is None, key_lengths), x)
        options = self.current_options()
        arguments: dict[str, Any] = {
            "causal": causal,
            "key_lengths": key_lengths,
            "attn_mask": attn_mask,
            "attn_bias": self.scale_bias(attn_bias),
            "window_size": window_size,
        }
        dropout_p = self.dropout if self.training else 0.0
        if self.row_observer is None:
            mixed = attention(q, k, v, self.variant, **arguments, dropout_p=dropout_p, **options)
        else:
            call = check_call(q, k, v, self.variant, **arguments, dropout_p=dropout_p, options=options)
            mixed, rows = attention_with_rows(q, k, v, call)
            self.row_observer(rows)
        if self.observer is not None:
            self.observer(Observation(self.variant, q, k, mixed, {**arguments, **options}))
        return self.combine_heads(mixed, x)

    def step(self, x: Tensor, cache: StaticLayer, key_lengths: Tensor, rotary: SentenceRotary = NO_ROTARY) -> Tensor:
        """One more position of every hypothesis: [R, 1, E] to [R, 1, E]. `key_lengths` [R] counts those then cached."""
        q, k, v = self.project(x, None, None, rotary=rotary)
        norm = None
        if isinstance(self.norm, RMSNorm):
            norm = OutputNorm(self.norm.gain, self.norm.gate, self.norm.epsilon)
        mixed = decode_attention(
            q, cache.keys, cache.values, self.variant, key_lengths=key_lengths, new_kv=(k, v),
            ancestors=cache.ancestors, norm=norm, **self.current_options(),
        )  # fmt: skip
        return self.combine_heads(mixed, x, normed=norm is not None)

    def project(
        self,
        x: Tensor,
        context: Tensor | None,
        cache: KeyValueCache | None,
        key_lengths: Tensor | None = None,
        rotary: SentenceRotary = NO_ROTARY,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, M, D] of x, and keys and values [B, K, N, D] of `context`, or of x where that is None."""
        if context is None:
            q, k, v = torch.split_with_sizes(self._linear(x, 0, 3), self.qkv_sizes, -1)
        else:
            q = self._linear(x, 0, 1)
            if cache is not None and cache.length:
                return self._queries(q, rotary), cache.keys, cache.values
            k, v = self._linear(context, 1, 3).chunk(2, -1)
        k, v = self._keys(k, key_lengths, rotary), split_heads(v, self.num_kv_heads)
        if cache is not None:
            k, v = cache.append(k, v)
        return self._queries(q, rotary), k, v

    def _queries(self, q: Tensor, rotary: SentenceRotary) -> Tensor:
        q = split_heads(q, self.num_heads)
        q = q if self.qk_norm is None else self.qk_norm.queries(q)
        return apply_rotary(q, rotary.queries, self.views)

    def _keys(self, k: Tensor, lengths: Tensor | None, rotary: SentenceRotary) -> Tensor:
        if self.center_keys:
            k = center_keys(k, lengths, self.context_group)
        if self.score_bias is not None:
            k = self.score_bias.add_to_keys(k)
        k = split_heads(k, self.num_kv_heads)
        k = k if self.qk_norm is None else self.qk_norm.keys(k)
        return apply_rotary(k, rotary.keys, self.views)

    def _linear(self, x: Tensor, first: int, last: int) -> Tensor:
        """Parts `first` to `last` of the query, key and value projections in one product."""
        rows = slice(sum(self.qkv_sizes[:first]), sum(self.qkv_sizes[:last]))
        if self.folded is None:
            return F.linear(x, *self._fold(rows))
        weight, bias = self.folded
        return F.linear(x, weight[rows], None if bias is None else bias[rows])

    def _fold(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """These rows of weight and bias, with the score bias and the learned scale folded in."""
        whole = rows == slice(0, sum(self.qkv_sizes))  # slicing has a gradient of its own, as large as the whole
        weight: Tensor = self.input_weight if whole else self.input_weight[rows]
        bias: Tensor | None = self.input_bias
        bias = bias if bias is None or whole else bias[rows]
        if self.score_bias is not None:
            weight, bias = self.score_bias(weight, bias, rows)
        if self.scales_scores and rows.start == 0:
            scale = self.score_scales().repeat_interleave(self.embed_dim // self.num_heads).to(weight.dtype)
            scale = F.pad(scale, (0, len(weight) - self.embed_dim), value=1.0)
            weight, bias = weight * scale[:, None], None if bias is None else bias * scale
        return weight, bias

    def fold_projections(self) -> None:
        """Fold score bias and learned scale into the projections for good, for a model that learns no more.

        A decoding step would otherwise do it again, with several launches per attention.
        """
        if self.score_bias is not None or self.scales_scores:
            with torch.no_grad():
                self.folded = self._fold(slice(0, sum(self.qkv_sizes)))

    def score_scales(self) -> Tensor:
        """The factor [H] of each head's scores that stands for dividing its weights: [x / gamma]+ is [x]+ / gamma.

        It scales rows of the projection, once, and its gradient comes with the matrix's own, where attention kernels
        would have to sum it over all scores.
        """
        assert self.learned is not None
        return self.learned().reciprocal().expand(self.num_heads)

    def combine_heads(self, mixed: Tensor, x: Tensor, normed: bool = False) -> Tensor:
        """Mixed values [B, H, M, D] normed over all heads, gated by the input x and projected back: [B, M, E]."""
        joined = mixed.transpose(1, 2).flatten(2)
        z: Tensor = joined if normed else self.norm(joined)
        if self.gate is not None:
            open_heads = self.gate(x).sigmoid().to(z.dtype)[..., None]
            z = (z.unflatten(-1, (self.num_heads, -1)) * open_heads).flatten(-2)
        return self.output(z)

    def attend_shards(self, q: Tensor, k: Tensor, v: Tensor, is_self: bool, key_lengths: Tensor | None) -> Tensor:
        """Attend where ranks share the keys and, in self-attention, the queries; of the decoder's each has all."""
        assert self.context_group is not None
        if key_lengths is None or self.observer or self.row_observer or (self.training and self.dropout):
            raise ArgumentError(
                "a source shared by ranks needs its lengths, and its attention takes no observer and no dropout; give "
                "lengths, train with model.attention_dropout = 0, or leave the ranks out"
            )
        attend = context_parallel_attention if is_self else attention_to_shards
        options = self.current_options()
        return attend(q, k, v, self.variant, group=self.context_group.group, key_lengths=key_lengths, **options)

    def anneal(self, value: int | None) -> None:
        """Weigh with another power, nearer to a softmax, if the variant has one; None: with its own again."""
        if name := find_variant(self.variant).anneals:
            self.annealed = {} if value is None else {name: value}

    def current_options(self) -> dict[str, Any]:
        """The variant's numbers, fixed or learned, except a gamma that is folded into the projections."""
        if self.learned is None or self.scales_scores:
            return {**self.options, **self.annealed}
        return {**self.options, **self.annealed, **self.learned.values()}

    def scale_bias(self, attn_bias: Tensor | None) -> Tensor | None:
        """The bias times the learned scale of the scores, where they have one."""
        if attn_bias is None or not self.scales_scores:
            return attn_bias
        shown = shown_by(attn_bias)  # what hides a key hides it whatever it is scaled with
        scaled = torch.where(shown, attn_bias, 0) * self.score_scales()[:, None, None].to(attn_bias.dtype)
        scaled = scaled.clamp_min(0.99 * HIDING)  # and what hides none must not begin to
        return torch.where(shown, scaled, -torch.inf)
