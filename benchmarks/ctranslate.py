"""Our softmax model in CTranslate2's format, so that both engines decode with the same weights.

ReLU memories become feed-forward layers, and the learned bias of an embedding joins its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from rectiformer.model.attention import MultiHeadAttention
from rectiformer.model.layers import EPSILON, DecoderLayer, EncoderLayer
from rectiformer.model.memory import KeyValueMemory
from rectiformer.model.transformer import Embedding, Transformer
from rectiformer.translate.options import Specials


def export(model: Transformer, specials: Specials, folder: Path) -> None:
    """Write a model with softmax attention, ReLU memories and post order; a token's name is its id in digits."""
    from ctranslate2.specs import TransformerSpec

    config = model.config
    places = {config.variant_of(kind) for kind in ("encoder", "decoder", "cross")}
    assert (places, config.memory, config.order) == ({"softmax"}, "relu", "post"), "CTranslate2 has no such model"
    spec = TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers), config.heads, pre_norm=False, no_final_norm=True
    )
    fill_embedding(spec.encoder.embeddings[0], spec.encoder.position_encodings, model.source_embedding)
    fill_embedding(spec.decoder.embeddings, spec.decoder.position_encodings, model.target_embedding)
    spec.decoder.start_from_zero_embedding = True
    fill_linear(spec.decoder.projection, model.output)
    for part, layer in zip(spec.encoder.layer, model.encoder, strict=True):
        fill_layer(part, layer)
    for part, layer in zip(spec.decoder.layer, model.decoder, strict=True):
        fill_layer(part, layer)
        fill_attention(part.attention, layer.cross, layer.around_cross.norm)
    spec.config.layer_norm_epsilon = EPSILON
    spec.config.unk_token, spec.config.eos_token = str(specials.unk), str(specials.eos)
    spec.config.bos_token = spec.config.decoder_start_token = str(specials.bos)
    spec.register_source_vocabulary(names(range(len(model.source_embedding.table))))
    spec.register_target_vocabulary(names(range(len(model.output))))
    spec.validate()
    spec.optimize()
    spec.save(str(folder))


def fill_layer(part: Any, layer: EncoderLayer | DecoderLayer) -> None:
    """Self-attention and feed-forward part, which both kinds of layers have."""
    fill_attention(part.self_attention, layer.attention, layer.around_attention.norm)
    fill_memory(part.ffn, layer.memory, layer.around_memory.norm)


def fill_embedding(table: Any, positions: Any, embedding: Embedding) -> None:
    """CTranslate2 scales its table by sqrt(width) as we do, and has no bias: it joins the rows, before the scale."""
    width = embedding.table.shape[1]
    table.weight = (embedding.table + embedding.bias / width**0.5).detach()
    positions.encodings = embedding.positions


def fill_attention(part: Any, attention: MultiHeadAttention, norm: nn.LayerNorm) -> None:
    """CTranslate2 fuses queries, keys and values to oneself, but only keys and values to another sequence."""
    parts = [*attention.sizes[:1], sum(attention.sizes[1:])] if attention.cross else [sum(attention.sizes)]
    *inputs, output = part.linear
    weights, biases = attention.input_weight.split(parts), attention.input_bias.split(parts)
    for linear, weight, bias in zip(inputs, weights, biases, strict=True):
        fill_linear(linear, weight, bias)
    fill_linear(output, attention.output.weight, attention.output.bias)
    fill_norm(part.layer_norm, norm)


def fill_memory(part: Any, memory: KeyValueMemory, norm: nn.LayerNorm) -> None:
    fill_linear(part.linear_0, memory.lookup.keys, memory.lookup.key_bias)
    fill_linear(part.linear_1, memory.values.mT.contiguous(), memory.value_bias)
    fill_norm(part.layer_norm, norm)


def fill_linear(part: Any, weight: Tensor, bias: Tensor | None = None) -> None:
    part.weight = weight.detach()
    if bias is not None:
        part.bias = bias.detach()


def fill_norm(part: Any, norm: nn.LayerNorm) -> None:
    part.gamma, part.beta = norm.weight.detach(), norm.bias.detach()


def names(ids: range | list[int]) -> list[str]:
    """Tokens as CTranslate2 is given them."""
    return [str(token) for token in ids]


@contextmanager
def exported(model: Transformer, specials: Specials) -> Iterator[Any]:
    """A float32 `ctranslate2.Translator` of the model on the CPU, with as many threads as torch has."""
    import ctranslate2

    with TemporaryDirectory() as folder:
        export(model, specials, Path(folder))
        yield ctranslate2.Translator(
            folder, device="cpu", compute_type="float32", inter_threads=1, intra_threads=torch.get_num_threads()
        )


def translate(
    translator: Any, sources: list[list[int]], beam: int, length: int, length_penalty: float = 1.0
) -> list[tuple[list[int], float]]:
    """Exactly `length` tokens for each source, and their score."""
    found = translator.translate_batch(
        [names(source) for source in sources],
        beam_size=beam,
        max_batch_size=len(sources),
        min_decoding_length=length,
        max_decoding_length=length,
        length_penalty=length_penalty,
        return_scores=True,
    )
    return [([int(name) for name in each.hypotheses[0]], each.scores[0]) for each in found]
