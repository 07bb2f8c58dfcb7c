"""A drop-in for `torch.nn.MultiheadAttention`: its constructor, shapes, masks and state dict, with any variant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rectiformer.errors import ArgumentError, ShapeError
from rectiformer.model.heads import check_heads
from rectiformer.model.learned import build_learned
from rectiformer.model.norms import build_output_norm
from rectiformer.model.observation import Observation
from rectiformer.ops.dispatch import attention
from rectiformer.ops.variants import find_variant
from rectiformer.ops.weights import attention_weights


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` whose weights come from `variant` instead of a softmax.

    Parameters keep torch's names, so a torch module's state dict loads as it is; what the variant adds (an output norm,
    a learned gamma or alpha) then stays as it is. Three things differ from torch on purpose: a query whose
    keys are all masked yields zero weights instead of NaN, weights are returned before dropout, and `is_causal` is no
    more than the hint torch documents: the mask decides. Numbers in a mask are added to the scores, and -5,000 or less
    hides a key, as in `rectiformer.attention`.
    """

    observer: Callable[[Observation], None] | None
    """Handed an `Observation` of each call; None unless someone watches."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        variant: str = "rela-g",
        learn: str = "head",
    ) -> None:
        check_heads(embed_dim, num_heads, num_heads)
        row = find_variant(variant)
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        # torch's encoder layer, when evaluating, would skip forward and compute a softmax from the projections by
        # itself; it leaves modules alone that say their projections differ in width.
        self._qkv_same_embed_dim = False
        self.variant = variant
        self.observer = None
        self.norm = build_output_norm(row.output_norm, embed_dim, num_heads).to(device=device, dtype=dtype)
        learned = build_learned(row, learn, num_heads, {})
        self.learned = None if learned is None else learned.to(device=device, dtype=dtype)
        self.register_load_state_dict_pre_hook(_keep_what_torch_lacks)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As in torch: returns the output and, with `need_weights`, the weights, averaged over heads unless told."""
        if is_causal and attn_mask is None:
            raise ArgumentError("is_causal is a hint about attn_mask; give the mask as well, as torch requires")
        batched = query.dim() == 3
        x, keys, values = (self._batch_first(t, batched) for t in (query, key, value))
        q, k, v = self._project(x, keys, values)
        seen, bias = self._masks(attn_mask, key_padding_mask, (q.shape[0], q.shape[2], keys.shape[1]), k.shape[2])
        options = {} if self.learned is None else {self.learned.name: self.learned()}
        dropout = self.dropout if self.training else 0.0
        mixed = attention(q, k, v, self.variant, attn_mask=seen, bias=bias, dropout=dropout, **options)
        if self.observer is not None:
            self.observer(Observation(self.variant, q, k, mixed, {"attn_mask": seen, "bias": bias, **options}))
        out = self.out_proj(self.norm(mixed.transpose(1, 2).flatten(2)))  # [B, M, E]
        if not self.batch_first and batched:
            out = out.transpose(0, 1)
        weights = None
        if need_weights:
            weights = attention_weights(q, k, self.variant, attn_mask=seen, bias=bias, **options)
            weights = weights.mean(1) if average_attn_weights else weights
        return (out, weights) if batched else (out[0], None if weights is None else weights[0])

    def _batch_first(self, x: Tensor, batched: bool) -> Tensor:
        if x.is_nested:
            raise ShapeError(
                "nested tensors are not supported; build TransformerEncoder with enable_nested_tensor=False"
            )
        if x.dim() != (3 if batched else 2):
            raise ShapeError(
                f"query, key and value need the same number of axes, 2 or 3; one of them is {list(x.shape)}"
            )
        if not batched:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _project(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as [B, H, length, D], with torch's extra bias and zero rows at the end."""
        if self.in_proj_weight is not None:
            weights: Any = self.in_proj_weight.chunk(3)
        else:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        biases: Any = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (F.linear(t, w, b) for t, w, b in zip((x, keys, values), weights, biases, strict=True))
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(k.shape[0], 1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(v.shape[0], 1, -1)], 1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        return q, k, v

    def _masks(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, sizes: tuple[int, int, int], keys: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Torch's masks (True hides, or a number to add) as ours: True shows, and a bias apart."""
        B, M, N = sizes
        seen, bias = None, None
        for name, mask in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
            if mask is None:
                continue
            if mask.dtype != torch.bool and not mask.is_floating_point():
                raise ArgumentError(f"{name} holds {mask.dtype}; it needs booleans, True to hide, or numbers to add")
            mask = self._shape_mask(name, mask, B, M, N)
            mask = F.pad(mask, (0, keys - N))  # what is appended to the keys is always seen
            if mask.dtype == torch.bool:
                seen = ~mask if seen is None else seen & ~mask
            else:
                bias = mask if bias is None else bias + mask
        return seen, bias

    def _shape_mask(self, name: str, mask: Tensor, B: int, M: int, N: int) -> Tensor:
        if name == "key_padding_mask":
            if mask.shape not in ((B, N), (N,)):
                raise ShapeError(f"key_padding_mask is {list(mask.shape)}, but keys are [B N] = [{B}, {N}]")
            return mask.reshape(-1, 1, 1, N)
        if mask.shape == (M, N):
            return mask[None, None]
        if mask.shape == (B * self.num_heads, M, N):
            return mask.reshape(B, self.num_heads, M, N)
        per_head = [B * self.num_heads, M, N]
        raise ShapeError(f"attn_mask is {list(mask.shape)}, but needs [M N] = [{M}, {N}] or [B*H M N] = {per_head}")


def _keep_what_torch_lacks(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Let a state dict of torch's own module load: it knows nothing of norms and learned numbers."""
    own = {
        f"{prefix}{name}": parameter.detach()
        for name, parameter in module.named_parameters()
        if name.startswith(("norm.", "learned."))
    }
    if not own.keys() & state_dict.keys():
        state_dict.update(own)
