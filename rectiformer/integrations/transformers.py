"""Rectified attention for Hugging Face models: `register()`, then `attn_implementation="rectified"`.

transformers looks a name up in two registries: one for the attention function, one for the function that builds its
mask. Without the second it passes no mask at all, and padding and future tokens leak; so both are registered together.
Masks of a known pattern are passed as a `Band`, without an [M, N] matrix; any other mask is the boolean one of "sdpa".
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.utils import is_tracing, output_capturing

from rectiformer.errors import ArgumentError
from rectiformer.integrations.reach import NAMES, OBSERVERS, MisusedMaskError, Reach, is_ours, verify, watch_models
from rectiformer.model.attention import Observation
from rectiformer.model.norms import EPSILON
from rectiformer.ops.attention import attention
from rectiformer.ops.reference import autocast_dtype
from rectiformer.ops.variants import find_variant

__all__ = ["NAMES", "OBSERVERS", "STANDARD", "Band", "Reach", "attend", "is_ours", "mask", "register", "verify"]

STANDARD = {"rectified": "relu-seqlen", "rectified-sqrt": "reluformer", "rela": "rela"}
"""What `register()` registers: the name for `attn_implementation`, and the variant behind it."""

REFUSED = frozenset(("softcap", "s_aux", "head_mask", "indices", "block_indices", "cu_seq_lens_q"))
"""Arguments of some models that change the result and have no counterpart here."""

COLLECTOR = getattr(output_capturing, "_active_collector", None)
"""Where transformers keeps the outputs it is collecting from the layers of a model, if any."""


def register(name: str | None = None, variant: str | None = None, **options: float) -> None:
    """Let models be loaded with `attn_implementation=name`. Calling it again with the same arguments changes nothing.

    Without arguments, registers
        "rectified": `relu-seqlen`, weights [x]+ / n with n the keys that row sees: a mean, as softmax is;
        "rectified-sqrt": `reluformer`, weights [x]+ / sqrt(n/2): the variance does not depend on n;
        "rela": `rela`, weights [x]+, then z / sqrt(mean(z^2) + 1e-8) over all heads together. ReLA's gain is left out
            because it only scales the columns of the output projection that follows.

    Args:
        name: a name not in use, or one of the above.
        variant: a name from `rectiformer.VARIANTS`; by default that of the standard name.
        options: the variant's own options, such as `gamma` or `exponent`.
    """
    if name is None:
        if variant or options:
            raise ArgumentError(f"variant {variant!r} with options {options} needs a name to be registered under")
        for standard in STANDARD:
            register(standard)
        return
    variant = variant or STANDARD.get(name)
    if variant is None:
        raise ArgumentError(f"name {name!r} is none of {', '.join(STANDARD)}, so it needs a variant")
    row = find_variant(variant)
    row.resolve_options(options)
    if row.output_norm not in ("none", "rms"):
        raise ArgumentError(f"variant {variant!r} learns its output norm, which no attention function can; use 'rela'")
    function = partial(attend, variant=variant, options=options)
    present = AttentionInterface().get(name)
    if name == "eager" or (present is not None and not same(present, function)):
        raise ArgumentError(f"name {name!r} is taken, and not by {variant!r} with {options}; choose another name")
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, mask)
    NAMES.add(name)
    watch_models()


def same(one: object, other: partial[Any]) -> bool:
    """Whether `one` is the same registration as `other`."""
    return isinstance(one, partial) and one.func is other.func and one.keywords == other.keywords


@dataclass(frozen=True)
class Band:
    """A [B, 1, M, N] mask as arguments of `rectiformer.attention`, the last query aligned with the last key."""

    causal: bool = False
    window_size: int | None = None
    key_lengths: Tensor | None = None  # [B]
    attn_mask: Tensor | None = None  # bool, broadcasts to [B, H, M, N]
    ndim: ClassVar[int] = 4
    """`generate` prepares masks ahead for a static cache; this marks the mask as a prepared one."""
    model: str = field(default="the model", compare=False)
    """Whose mask it is, for the message that refuses any other use."""

    def __getattr__(self, name: str) -> NoReturn:
        raise MisusedMaskError(self.model)

    def __add__(self, other: object) -> NoReturn:
        raise MisusedMaskError(self.model)

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __getitem__ = __add__

    @classmethod
    def __torch_function__(cls, function: object, types: object, given: Any, keywords: Any = None) -> NoReturn:
        bands = [each for each in (*given, *(keywords or {}).values()) if isinstance(each, cls)]
        raise MisusedMaskError(bands[0].model if bands else "the model")


FULL, CAUSAL = Band(), Band(causal=True)


def mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | Band | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **others: Any,
) -> Tensor | Band | None:
    """Which keys the queries see, for `attend`; the arguments are those transformers calls mask functions with.

    None where every key is seen, a `Band` for causal, windowed and padded patterns, and for the rest what "sdpa" gets:
    a boolean [B, 1, M, N] for packed sequences, chunks, overlays and the empty slots of a static cache. A plain causal
    pattern is a `Band` too, so that a model that applies masks by itself, and would keep its softmax, fails at once.
    """
    if isinstance(attention_mask, Band):
        return attention_mask
    real = attention_mask  # [B, N]
    if real is not None and (kv_offset or real.shape[1] != kv_length):
        real = real[:, kv_offset : kv_offset + kv_length]
    aligned = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    chunked = local_size is not None and getattr(config, "attention_chunk_size", None) is not None
    # either permission to skip also means that nothing was added to the pattern
    banded = (allow_is_causal_skip or allow_is_bidirectional_skip) and aligned and not chunked
    full = allow_is_bidirectional_skip and local_size is None
    if not (banded or full) or (real is not None and real.shape[1] != kv_length):
        return sdpa_mask(
            q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            attention_mask=attention_mask, local_size=local_size, allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip, config=config, **others,
        )  # fmt: skip
    # a causal window counts the query itself, a two-sided window does not
    window = None if local_size is None or kv_length <= local_size else local_size - allow_is_causal_skip
    # one causal query is itself the last key, so padding is never last there
    lengths, seen = describe_padding(real, may_be_last=not (allow_is_causal_skip and q_length == 1))
    if full and lengths is None and seen is None:
        return None
    owner = "the model" if config is None else type(config).__name__.removesuffix("Config")
    return Band(allow_is_causal_skip, window, lengths, seen, owner)


def describe_padding(real: Tensor | None, may_be_last: bool) -> tuple[Tensor | None, Tensor | None]:
    """The real keys [B, N] as lengths [B] where padding comes last, else as a mask [B, 1, 1, N]; neither if all are.

    Kernels are faster by far where they read no mask. So this waits for the device, as the masks of "sdpa" do: once per
    forward of a model where all keys are real, otherwise twice. Nothing in the layers does.
    """
    if real is None:
        return None, None
    if not is_tracing(real):
        if real.all():
            return None, None
        if may_be_last and (real[:, 1:] <= real[:, :-1]).all():
            return real.sum(1), None
    return None, real[:, None, None]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Band | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    *,
    variant: str,
    options: dict[str, Any],
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Mixed values [B, M, H, Dv] of query [B, H, M, D] over key and value [B, K, N, D], and the weights [B, H, M, N]
    before dropout where the model was called with `output_attentions=True`, else None.

    Scaling, dropout, windows, boolean and additive masks and `position_bias` are honored; what cannot be is refused.
    """
    if not REFUSED.isdisjoint(others):
        refuse(module, variant, others)
    row = find_variant(variant)
    band, bias = attention_mask, position_bias
    if attention_mask is None:
        band, keys = without_mask(module, query.shape[2], key.shape[2], is_causal, sliding_window)
        if keys < key.shape[2]:
            key, value, bias = key[:, :, :keys], value[:, :, :keys], None if bias is None else bias[..., :keys]
    elif isinstance(attention_mask, Tensor):
        band, bias = read_mask(attention_mask, bias)
    assert isinstance(band, Band)
    device = query.device
    if (dtype := autocast_dtype(device)) is not None:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    lengths, seen = band.key_lengths, band.attn_mask
    arguments: dict[str, Any] = {
        "causal": band.causal,
        "key_lengths": None if lengths is None else lengths.to(device),  # layers may be on several devices
        "attn_mask": None if seen is None else seen.to(device),
        "attn_bias": None if bias is None else bias.to(query.dtype),
        "window_size": band.window_size,
        "scale": None if scaling is None else scaling * row.views**0.5,  # the model's is that of a whole head
        **options,
    }
    z = attention(query, key, value, variant, dropout_p=dropout, **arguments)
    weights = None
    if OBSERVERS or wants_weights(others):
        observation = Observation(variant, query, key, z, arguments)
        for observer in OBSERVERS:
            observer(module, observation)
        weights = observation.weights() if wants_weights(others) else None
    z = z.transpose(1, 2).contiguous()  # kernels leave it in this order, so nothing is copied
    if row.output_norm == "rms":
        z = F.rms_norm(z, z.shape[-2:], eps=EPSILON).to(z.dtype)
    return z, weights


def without_mask(
    module: nn.Module, queries: int, keys: int, is_causal: bool | None, sliding_window: int | None
) -> tuple[Band, int]:
    """What queries see without a mask, and of how many keys. As in "sdpa": causal ones see keys from the first on, so
    that keys beyond them are empty slots of a cache."""
    causal = queries > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    band = CAUSAL if causal else FULL
    if sliding_window is not None:
        band = Band(causal, sliding_window - 1)
    return band, queries if causal else keys


def wants_weights(others: dict[str, Any]) -> bool:
    """Whether the caller wants attention weights: some models pass this on, for others transformers uses hooks."""
    if others.get("output_attentions"):
        return True
    collected = None if COLLECTOR is None else COLLECTOR.get()
    return any(key.endswith("attentions") for key in collected) if collected else False


def read_mask(given: Tensor, bias: Tensor | None) -> tuple[Band, Tensor | None]:
    """A complete mask: booleans say which keys are seen; floats are a bias, whose lowest values hide a key."""
    if given.dtype == torch.bool:
        return Band(attn_mask=given), bias
    if not given.is_floating_point():
        raise ArgumentError(f"attention_mask {list(given.shape)} holds {given.dtype}; make it boolean, True where seen")
    return Band(), given if bias is None else given + bias


def refuse(module: nn.Module, variant: str, others: dict[str, Any]) -> None:
    """Raise an ArgumentError for an argument that changes the result and that rectified attention cannot honor."""
    for name in REFUSED & others.keys():
        if others[name] is not None and others[name] is not False:
            raise ArgumentError(
                f"{type(module).__name__} passes {name}, which attention {variant!r} cannot honor;"
                " leave it out or load the model with attn_implementation='eager'"
            )
