"""Our weights as Marian's.

What our layers have beside Marian's goes into matrices: the bias of an embedding into its rows, gamma into the queries,
the gain of a norm into the output projection. Marian's position signals are others than ours, so ours come with them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rectiformer.integrations.folder import fold_bias
from rectiformer.model.attention import RectifiedAttention
from rectiformer.model.embedding import Embedding
from rectiformer.model.layers import DecoderLayer, EncoderLayer
from rectiformer.model.norms import RMSNorm
from rectiformer.model.transformer import Transformer

STREAM = 32.0
"""Factor of the residual stream. Marian's LayerNorm adds 1e-5 to a variance where ours adds 1e-8, and what is added is
worth STREAM^2 less in a stream that is larger by STREAM. It is a power of two, so nothing is rounded."""

Tensors = dict[str, Tensor]


@torch.no_grad()
def translate_weights(model: Transformer, positions: int) -> Tensors:
    """Our parameters under Marian's names."""
    tensors: Tensors = {"lm_head.weight": model.output, "final_logits_bias": torch.zeros(1, len(model.output))}
    tensors |= embed("model.encoder", model.source_embedding, positions)
    tensors |= embed("model.decoder", model.target_embedding, positions)
    for index, layer in enumerate(model.encoder):
        assert isinstance(layer, EncoderLayer)
        last = index == len(model.encoder) - 1
        tensors |= translate_layer(f"model.encoder.layers.{index}", layer, last)
    for index, layer in enumerate(model.decoder):
        assert isinstance(layer, DecoderLayer)
        name, last = f"model.decoder.layers.{index}", index == len(model.decoder) - 1
        tensors |= translate_layer(name, layer, last) | project(f"{name}.encoder_attn", layer.cross)
        tensors |= norm(f"{name}.encoder_attn_layer_norm", layer.around_cross.norm)
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def embed(name: str, embedding: Embedding, positions: int) -> Tensors:
    embedding.reserve(positions)
    table = fold_bias(embedding)
    if embedding.start is not None:
        table[embedding.start] = 0
    signals = embedding.positions[:positions]
    return {f"{name}.embed_tokens.weight": table * STREAM, f"{name}.embed_positions.weight": signals * STREAM}


def translate_layer(name: str, layer: EncoderLayer | DecoderLayer, last: bool) -> Tensors:
    """Self-attention and memory, which both kinds of layers have; the norm of the `last` ends the stream."""
    memory = layer.memory
    assert memory.lookup.key_bias is not None
    assert memory.value_bias is not None
    return {
        **project(f"{name}.self_attn", layer.attention),
        **norm(f"{name}.self_attn_layer_norm", layer.around_attention.norm),
        f"{name}.fc1.weight": memory.lookup.keys / STREAM,
        f"{name}.fc1.bias": memory.lookup.key_bias,
        f"{name}.fc2.weight": memory.values.mT * STREAM,
        f"{name}.fc2.bias": memory.value_bias * STREAM,
        **norm(f"{name}.final_layer_norm", layer.around_memory.norm, 1.0 if last else STREAM),
    }


def project(name: str, attention: RectifiedAttention) -> Tensors:
    """The four projections; what the queries are divided by and what the outputs are multiplied by goes into them."""
    assert attention.input_bias is not None
    weights, biases = (list(part.split(attention.qkv_sizes)) for part in (attention.input_weight, attention.input_bias))
    scale = query_scale(attention)
    weights[0], biases[0] = weights[0] * scale[:, None], biases[0] * scale
    gain = attention.norm.gain if isinstance(attention.norm, RMSNorm) else torch.ones(attention.embed_dim)
    tensors = {
        f"{name}.out_proj.weight": attention.output.weight * gain * STREAM,
        f"{name}.out_proj.bias": attention.output.bias * STREAM,
    }
    for part, weight, bias in zip(("q_proj", "k_proj", "v_proj"), weights, biases, strict=True):
        reads_source = attention.cross and part != "q_proj"  # which has left its stream
        tensors |= {f"{name}.{part}.weight": weight / (1 if reads_source else STREAM), f"{name}.{part}.bias": bias}
    return tensors


def query_scale(attention: RectifiedAttention) -> Tensor:
    """What each row of the query projection is multiplied by, [E]: 1 / gamma of its head, learned or fixed."""
    if attention.scales_scores:
        return attention.score_scales().repeat_interleave(attention.embed_dim // attention.num_heads)
    return torch.full((attention.embed_dim,), 1 / float(attention.options.get("gamma", 1.0)))


def norm(name: str, layer: nn.LayerNorm, factor: float = STREAM) -> Tensors:
    return {f"{name}.weight": layer.weight * factor, f"{name}.bias": layer.bias * factor}
