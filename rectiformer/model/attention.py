"""Multi-head attention of any variant, with the papers' initializers, a key/value cache and an observer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rectiformer.errors import ArgumentError, ConfigError, ShapeError
from rectiformer.model.cache import Cache, StaticLayer
from rectiformer.model.heads import check_heads, split_heads
from rectiformer.model.learned import LearnedOption, build_learned
from rectiformer.model.norms import EPSILON, GatedRMSNorm, RMSNorm, build_output_norm, center_rows
from rectiformer.model.observation import Observation
from rectiformer.model.opening import Opening
from rectiformer.model.rotary import NO_ROTARY, SentenceRotary, apply_rotary
from rectiformer.ops.cached import decode_attention
from rectiformer.ops.decode import OutputNorm
from rectiformer.ops.dispatch import Window, check_call, run
from rectiformer.ops.parallel import attention_to_shards, context_parallel_attention
from rectiformer.ops.ranks import Ranks
from rectiformer.ops.row_statistics import RowStatistics, attention_with_rows
from rectiformer.ops.variants import find_variant
from rectiformer.ops.visibility import shown_by


class RectifiedAttention(nn.Module):
    """Project, attend as the variant says, norm over all heads, project back.

    One matrix holds the query, key and value projections, so self-attention is a single product. The ReLA authors
    initialize it as a whole (limit sqrt(3 / 1024) at width 512), but the separate projections of cross-attention each
    by themselves (limit sqrt(3 / 512)); `cross` says which of the two this is. Scores start smaller by that factor
    squared, which matters for a ReLU.

    Args:
        embed_dim: size of the residual stream; the heads share it equally.
        num_heads: number of query heads; must divide `embed_dim`.
        variant: a name from `rectiformer.VARIANTS`.
        num_kv_heads: number of key and value heads, a divisor of `num_heads`; default: as many.
        cross: whether keys come from another sequence; decides the initializer and nothing else.
        bias: whether the projections have biases, as in both papers.
        dropout: probability of dropping a weight in training.
        output_norm: a name from model/norms.py in place of the variant's own.
        option_sharing: how the variant's learnable number (gamma of reluformer, alpha of entmax) is held: one per
            "head", one per "layer", "fixed" at its default or at what `options` says, or a `LearnedOption` shared by a
            whole model.
        option_init: where that number starts, or stays if "fixed"; default: the variant's own.
        options: the variant's numbers, fixed.
        center_keys: whether the mean of a sequence's keys is subtracted from them. A softmax never sees what all scores
            of a row have in common; a ReLU lets it switch whole rows on and off. Not for causal attention, whose rows
            each see other keys.
        score_bias: added to all scores at first, in one dimension of each head, where queries learn to add to it; the
            power of a rectified variant lets it begin as a softmax does (`Opening`).
    """

    observer: Callable[[Observation], None] | None
    row_observer: Callable[[RowStatistics], None] | None
    """Handed statistics of each row of weights, with gradients, from the pass that mixes the values."""
    ranks: Ranks | None = None
    """Who shares the keys, each holding a part of them."""

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
        option_sharing: str | LearnedOption = "head",
        option_init: float | None = None,
        options: Mapping[str, float] | None = None,
        center_keys: bool = False,
        score_bias: float | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_heads(embed_dim, num_heads, num_kv_heads)
        if not 0 <= dropout < 1:
            raise ConfigError(f"dropout = {dropout}, but it is a probability below 1")
        row = find_variant(variant)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.cross, self.dropout, self.center_keys = cross, dropout, center_keys
        self.variant = variant
        self.options = dict(options or {})
        if option_sharing == "fixed" and option_init is not None and (name := LearnedOption.name_in(row)):
            self.options.setdefault(name, option_init)
        row.resolve_options(self.options)
        head_dim = embed_dim // num_heads
        self.sizes = [embed_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        self.opening = None if score_bias is None else Opening(self.sizes, head_dim, score_bias)
        self.input_weight = nn.Parameter(torch.empty(sum(self.sizes), embed_dim))
        self.input_bias = nn.Parameter(torch.empty(sum(self.sizes))) if bias else None
        self.norm = build_output_norm(output_norm or row.output_norm, embed_dim, num_heads)
        self.output = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.learned = build_learned(row, option_sharing, num_heads, self.options, option_init)
        self.learned_divides = self.learned is not None and row.row_scale is not None
        self.settled: tuple[Tensor, Tensor | None] | None = None
        self.observer = None
        self.row_observer = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for part in self.input_weight.split(self.sizes) if self.cross else [self.input_weight]:
                variance_scaling_(part)
            variance_scaling_(self.output.weight)
            if self.opening is not None:
                self.opening.reset(self.input_weight)
            for bias in (self.input_bias, self.output.bias):
                if bias is not None:
                    nn.init.zeros_(bias)

    def extra_repr(self) -> str:
        return (
            f"{self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, variant={self.variant!r}"
        )

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        causal: bool = False,
        key_lengths: Tensor | None = None,
        attn_mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
        window_size: Window | None = None,
        cache: Cache | None = None,
        rotary: SentenceRotary = NO_ROTARY,
    ) -> Tensor:
        """Attend from x [B, M, E] to memory [B, N, E] (x itself unless given): [B, M, E].

        With a `cache`, self-attention adds the tokens of x to it and attends to all it holds; cross-attention fills
        it at the first call and reads it afterwards, so `memory` is projected once. `rotary` tells sentences apart.
        """
        for name, given in (("x", x), ("memory", memory)):
            if given is not None and (given.dim() != 3 or given.shape[-1] != self.embed_dim):
                raise ShapeError(f"{name} is {list(given.shape)}, but it needs [B length E] with E = {self.embed_dim}")
        q, k, v = self.project(x, memory, cache, key_lengths, rotary)
        if self.ranks is not None:
            return self.attend_shards(q, k, v, memory is None, key_lengths)
        options = self.current_options()
        if attn_bias is not None and self.learned_divides:
            shown = shown_by(attn_bias)  # what hides a key hides it whatever it is scaled with
            scaled = torch.where(shown, attn_bias, 0) * self.head_scales()[:, None, None].to(attn_bias.dtype)
            attn_bias = torch.where(shown, scaled, -torch.inf)
        dropout = self.dropout if self.training else 0.0
        call = check_call(
            q,
            k,
            v,
            self.variant,
            causal=causal,
            key_lengths=key_lengths,
            attn_mask=attn_mask,
            attn_bias=attn_bias,
            window_size=window_size,
            dropout_p=dropout,
            options=options,
        )
        if self.row_observer is None:
            mixed = run(q, k, v, call, "auto")
        else:
            mixed, rows = attention_with_rows(q, k, v, call)
            self.row_observer(rows)
        if self.observer is not None:
            asked = {"causal": causal, "key_lengths": key_lengths, "attn_mask": attn_mask, "attn_bias": attn_bias}
            self.observer(Observation(self.variant, q, k, mixed, {**asked, "window_size": window_size, **options}))
        return self.output(self.norm(mixed.transpose(1, 2).flatten(2)))  # [B, M, E]

    def attend_shards(self, q: Tensor, k: Tensor, v: Tensor, own: bool, key_lengths: Tensor | None) -> Tensor:
        """Attend where `ranks` share the keys and, in self-attention, the queries; of the decoder's each has all."""
        assert self.ranks is not None
        if key_lengths is None or self.observer or self.row_observer or (self.training and self.dropout):
            raise ArgumentError(
                "a source shared by ranks needs its lengths, and its attention takes no observer and no dropout; give "
                "lengths, train with model.attention_dropout = 0, or leave the ranks out"
            )
        attend = context_parallel_attention if own else attention_to_shards
        options = self.current_options()
        mixed = attend(q, k, v, self.variant, group=self.ranks.group, key_lengths=key_lengths, **options)
        return self.output(self.norm(mixed.transpose(1, 2).flatten(2)))  # [B, M, E]

    def step(self, x: Tensor, cache: StaticLayer, written: Tensor, rotary: SentenceRotary = NO_ROTARY) -> Tensor:
        """One more position of every hypothesis: [R, 1, E] to [R, 1, E]. `written` [R] counts those then cached."""
        q, k, v = self.project(x, None, None, rotary=rotary)
        norm = None
        if isinstance(self.norm, RMSNorm | GatedRMSNorm):
            norm = OutputNorm(self.norm.gain, self.norm.gate, EPSILON)
        mixed = decode_attention(
            q,
            cache.keys,
            cache.values,
            self.variant,
            lengths=written,
            new=(k, v),
            ancestors=cache.ancestors,
            norm=norm,
            **self.current_options(),
        )
        mixed = mixed.transpose(1, 2).flatten(2)
        return self.output(self.norm(mixed) if norm is None else mixed)

    def current_options(self) -> dict[str, Any]:
        """The variant's numbers, fixed or learned, except what the queries are divided by already."""
        if self.learned is None or self.learned_divides:
            return dict(self.options)
        return {**self.options, self.learned.name: self.learned()}

    def project(
        self,
        x: Tensor,
        memory: Tensor | None,
        cache: Cache | None,
        key_lengths: Tensor | None = None,
        rotary: SentenceRotary = NO_ROTARY,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, M, D], keys and values [B, K, N, D]."""
        if memory is None:
            q, k, v = self._linear(x, 0, 3).split(self.sizes, -1)
            k, v = self._keys(k, key_lengths, rotary), split_heads(v, self.num_kv_heads)
            if cache is not None:
                k, v = cache.append(k, v)
        else:
            q = self._linear(x, 0, 1)
            if cache is not None and cache.length:
                k, v = cache.keys, cache.values
            else:
                k, v = self._linear(memory, 1, 3).chunk(2, -1)
                k, v = self._keys(k, key_lengths, rotary), split_heads(v, self.num_kv_heads)
                if cache is not None:
                    k, v = cache.append(k, v)
        return apply_rotary(split_heads(q, self.num_heads), rotary.queries), k, v

    def _linear(self, x: Tensor, first: int, last: int) -> Tensor:
        """Parts `first` to `last` of the query, key and value projections in one product."""
        rows = slice(sum(self.sizes[:first]), sum(self.sizes[:last]))
        if self.settled is None:
            return F.linear(x, *self._projection(rows))
        weight, bias = self.settled
        return F.linear(x, weight[rows], None if bias is None else bias[rows])

    def _projection(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of these rows of the projections, with what the opening and a learned number do to them."""
        weight, bias = self.input_weight[rows], None if self.input_bias is None else self.input_bias[rows]
        if self.opening is not None:
            weight, bias = self.opening(weight, bias, rows)
        if self.learned_divides and rows.start == 0:
            scale = self.head_scales().repeat_interleave(self.embed_dim // self.num_heads).to(weight.dtype)
            scale = F.pad(scale, (0, len(weight) - self.embed_dim), value=1.0)
            weight, bias = weight * scale[:, None], None if bias is None else bias * scale
        return weight, bias

    def settle(self) -> None:
        """Make the projections once and for all, for a model that learns no more: a step of decoding would otherwise
        make them again, with several launches for each attention."""
        if self.opening is not None or self.learned_divides:
            with torch.no_grad():
                self.settled = self._projection(slice(0, sum(self.sizes)))

    def head_scales(self) -> Tensor:
        """What multiplies the scores of each head, [H], where that stands for dividing its weights: [x / gamma]+ is
        [x]+ / gamma.

        So it can scale rows of the projection, once, and its gradient comes with the matrix's own, where attention
        kernels would have to add it up over all scores.
        """
        assert self.learned is not None
        return self.learned().reciprocal().expand(self.num_heads)

    def _keys(self, k: Tensor, lengths: Tensor | None, rotary: SentenceRotary) -> Tensor:
        if self.center_keys:
            k = center_rows(k, lengths, self.ranks)
        k = k if self.opening is None else self.opening.raise_keys(k)
        return apply_rotary(split_heads(k, self.num_kv_heads), rotary.keys)


def variance_scaling_(weight: Tensor) -> Tensor:
    """Uniform with limit sqrt(3 / mean of fan-in and fan-out): the ReLA authors' initializer of every matrix."""
    limit = math.sqrt(6 / sum(weight.shape))
    return nn.init.uniform_(weight, -limit, limit)
