"""A drop-in for `torch.nn.MultiheadAttention`: its constructor, shapes, masks and state dict, with any variant."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rectiformer.errors import ArgumentError
from rectiformer.model.attention import Observation
from rectiformer.model.norms import build_output_norm
from rectiformer.model.projection import build_learned, split_heads
from rectiformer.ops.attention import attention
from rectiformer.ops.variants import find_variant
from rectiformer.ops.weights import attention_weights


class DropInAssertionError(ArgumentError, AssertionError):
    """Refused where `torch.nn.MultiheadAttention` raises an AssertionError, so that code which expects one gets it."""


class DropInRuntimeError(ArgumentError, RuntimeError):
    """Refused where `torch.nn.MultiheadAttention` raises a RuntimeError."""


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` whose weights come from `variant` instead of a softmax.

    Parameters keep torch's names, so a torch module's state dict loads as it is; what the variant adds (an output norm,
    learned numbers such as gamma) then stays as it is. Refusals have torch's exception types too. What differs from
    torch on purpose: a query whose keys are all masked yields zero weights instead of NaN, weights are returned before
    dropout, and `is_causal` is no more than the hint torch documents: the mask decides. Numbers in a mask are added to
    the scores, and -5,000 or less hides a key, as in `rectiformer.attention`. Torch's fused softmax path is never
    taken, so nested tensors, which only that path can read, are refused, and so is TorchScript.
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
        option_sharing: str = "head",
    ) -> None:
        row = find_variant(variant)
        if embed_dim < 1 or num_heads < 1:
            raise ArgumentError(f"embed_dim = {embed_dim}, num_heads = {num_heads}; each must be at least 1")
        if embed_dim % num_heads:
            raise DropInAssertionError(f"num_heads = {num_heads} does not divide embed_dim = {embed_dim}")
        row.check_head_size(embed_dim // num_heads)
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.variant = variant
        self.observer = None
        self.norm = build_output_norm(row.output_norm, embed_dim, num_heads).to(device=device, dtype=dtype)
        learned = build_learned(row, option_sharing, num_heads, {})
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
        self._check_inputs(query, key, value)
        if is_causal and attn_mask is None:
            raise DropInRuntimeError("is_causal is a hint about attn_mask; give the mask as well, as torch requires")
        batched = query.dim() == 3
        self._check_mask_axes(attn_mask, key_padding_mask, (query.shape[0], key.shape[0]), batched)
        x = self._batch_first(query, batched)
        # What is one tensor for the caller stays one, so that it is projected once.
        keys = x if key is query else self._batch_first(key, batched)
        values = keys if value is key else self._batch_first(value, batched)
        q, k, v = self._project(x, keys, values)
        seen, bias = self._masks(attn_mask, key_padding_mask, (q.shape[0], q.shape[2], keys.shape[1]), k.shape[2])
        options: dict[str, Any] = {} if self.learned is None else self.learned.values()
        dropout = self.dropout if self.training else 0.0
        mixed = attention(q, k, v, self.variant, attn_mask=seen, attn_bias=bias, dropout_p=dropout, **options)
        if self.observer is not None:
            self.observer(Observation(self.variant, q, k, mixed, {"attn_mask": seen, "attn_bias": bias, **options}))
        out = self.out_proj(self.norm(mixed.transpose(1, 2).flatten(2)))  # [B, M, E]
        if not self.batch_first and batched:
            out = out.transpose(0, 1)
        weights = None
        if need_weights:
            weights = attention_weights(q, k, self.variant, attn_mask=seen, attn_bias=bias, **options)
            weights = weights.mean(1) if average_attn_weights else weights
        return (out, weights) if batched else (out[0], None if weights is None else weights[0])

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, variant={self.variant!r}"

    def _reset_parameters(self) -> None:
        """Draw all parameters anew: torch's as torch does (its constructor calls this), then what the variant adds."""
        self._qkv_same_embed_dim = self.in_proj_weight is not None  # says which projections torch draws
        super()._reset_parameters()
        # Torch's encoder layer, when evaluating, would skip forward and compute a softmax from the projections by
        # itself; it leaves modules alone that say their projections differ in width.
        self._qkv_same_embed_dim = False
        for name in ("norm", "learned"):  # not there yet when torch's constructor calls
            part: Any = getattr(self, name, None)
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()

    def __prepare_scriptable__(self) -> NoReturn:
        raise DropInRuntimeError("MultiheadAttention cannot be scripted; use torch.compile or torch.export")

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.is_nested or key.is_nested or value.is_nested:
            raise DropInAssertionError(
                "nested tensors are not supported: pad them (torch.nested.to_padded_tensor) and give key_padding_mask; "
                "build TransformerEncoder with enable_nested_tensor=False"
            )
        axes = query.dim()
        if axes not in (2, 3):
            raise DropInAssertionError(f"query is {list(query.shape)}; it needs 2 axes or, with a batch, 3")
        if key.dim() != axes or value.dim() != axes:
            found = f"found {key.dim()}-D and {value.dim()}-D tensors respectively"
            raise DropInAssertionError(f"query is {axes}-D: expected `key` and `value` to be {axes}-D but {found}")
        apart = self.in_proj_weight is None
        keys, values = (key.shape[:-1], value.shape[:-1]) if apart else (key.shape, value.shape)
        if keys != values:
            raise DropInAssertionError(f"key is {list(key.shape)}, but value is {list(value.shape)}")
        widths = {"query": (query, self.embed_dim)}
        if apart:
            widths |= {"key": (key, self.kdim), "value": (value, self.vdim)}
        for name, (tensor, width) in widths.items():
            if tensor.shape[-1] != width:
                raise DropInAssertionError(f"{name} is {list(tensor.shape)}, but its last axis needs {width} entries")
        batch = 0 if self.batch_first else 1
        if axes == 3 and query.shape[batch] != key.shape[batch]:
            raise DropInRuntimeError(f"query has a batch of {query.shape[batch]}, but key one of {key.shape[batch]}")

    def _check_mask_axes(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, lengths: tuple[int, int], batched: bool
    ) -> None:
        """Refuse masks with too many or too few axes; `lengths` are those of an unbatched query and its keys."""
        if key_padding_mask is not None and key_padding_mask.dim() != (wanted := 2 if batched else 1):
            found = f"found {key_padding_mask.dim()}-D tensor instead"
            raise DropInAssertionError(f"expected `key_padding_mask` to be `None` or {wanted}-D but {found}")
        if attn_mask is None:
            return
        if attn_mask.dim() not in (2, 3):
            found = f"found {attn_mask.dim()}-D tensor instead"
            raise DropInAssertionError(f"expected `attn_mask` to be `None`, 2-D or 3-D but {found}")
        if not batched and attn_mask.dim() == 3 and attn_mask.shape != (wanted_shape := (self.num_heads, *lengths)):
            raise DropInAssertionError(
                f"Expected `attn_mask` shape to be {wanted_shape} but got {tuple(attn_mask.shape)}"
            )

    def _batch_first(self, x: Tensor, batched: bool) -> Tensor:
        if not batched:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _project(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as [B, H, length, D], with torch's extra bias and zero rows at the end."""
        E = self.embed_dim
        sizes = [E, E, E]
        if self.in_proj_weight is not None and keys is values:
            sizes = [3 * E] if x is keys else [E, 2 * E]  # one product for each tensor

        def cut(packed: Tensor) -> Sequence[Tensor]:
            return [packed] if len(sizes) == 1 else packed.split(sizes)

        apart = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        weights: Any = apart if self.in_proj_weight is None else cut(self.in_proj_weight)
        biases: Any = [None] * len(sizes) if self.in_proj_bias is None else cut(self.in_proj_bias)
        # A bias of another dtype than its weights takes theirs: torch adds it so, addmm would refuse it.
        biases = [None if b is None else b.to(w.dtype) for b, w in zip(biases, weights, strict=True)]
        products = [F.linear(t, w, b) for t, w, b in zip((x, keys, values), weights, biases, strict=False)]
        q, k, v = (part for product in products for part in product.split(E, -1))
        if self.bias_k is not None and self.bias_v is not None:
            # Under autocast the products are of 16 bits, and joined to float32 they would not stay so.
            k = torch.cat([k, self.bias_k.expand(k.shape[0], 1, -1).to(k.dtype)], 1)
            v = torch.cat([v, self.bias_v.expand(v.shape[0], 1, -1).to(v.dtype)], 1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return split_heads(q, self.num_heads), split_heads(k, self.num_heads), split_heads(v, self.num_heads)

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
                needs = "booleans, True to hide, or numbers to add"
                raise DropInAssertionError(f"{name} holds {mask.dtype}; it needs {needs}")
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
                raise DropInAssertionError(f"key_padding_mask is {list(mask.shape)}, but keys are [B N] = [{B}, {N}]")
            return mask.reshape(-1, 1, 1, N)
        if mask.shape == (M, N):
            return mask[None, None]
        if mask.shape == (B * self.num_heads, M, N):
            return mask.reshape(B, self.num_heads, M, N)
        per_head = [B * self.num_heads, M, N]
        needs = f"[M N] = [{M}, {N}] or [B*H M N] = {per_head}"
        raise DropInRuntimeError(f"attn_mask is {list(mask.shape)}, but needs {needs}")


def _keep_what_torch_lacks(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Let a state dict of torch's own module load: it knows nothing of norms and learned numbers."""
    own = {
        f"{prefix}{name}": parameter.detach()
        for name, parameter in module.named_parameters()
        if name.startswith(("norm.", "learned."))
    }
    if not own.keys() & state_dict.keys():
        state_dict.update(own)
