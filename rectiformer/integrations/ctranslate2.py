"""CTranslate2: a translator with softmax attention in the format of its C++ engine.

ReLU memories become feed-forward layers, and the learned bias of an embedding is added to its rows. CTranslate2's
layers are fixed, so only softmax attention can be exported.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rectiformer.integrations.export import Report, export_folder, fold_bias, name_tokens, require_packages
from rectiformer.model.attention import RectifiedAttention
from rectiformer.model.layers import EPSILON, DecoderLayer, EncoderLayer
from rectiformer.model.transformer import Transformer
from rectiformer.translate.options import Specials
from rectiformer.translate.translator import Translator


def export_ctranslate2(translator: Translator, out: Path, report: Report = lambda line: None) -> None:
    """Write folder `out` with model.bin, config.json, vocabularies, source.model, target.model and export.json.

    Tokens are sentencepiece's subwords; CTranslate2 adds the end of the source by itself. Sequences may have up to
    twice `translator.max_length` tokens.
    """
    require_packages("CTranslate2", "ctranslate2", "ctranslate2")
    source, target = translator.source, translator.target
    specials = Specials(pad=target.pad, unk=target.unk, bos=target.bos, eos=target.eos)
    positions = 2 * translator.max_length
    with export_folder(translator, out, "ctranslate2", positions=positions) as folder:
        report("translating the model into CTranslate2's layers")
        write_model(translator.model, name_tokens(source), name_tokens(target), specials, folder, positions)
        report("writing vocabularies and hashes")
        source.save(folder / "source.model")
        target.save(folder / "target.model")


def write_model(
    model: Transformer, source: Sequence[str], target: Sequence[str], specials: Specials, folder: Path, positions: int
) -> None:
    """Write the engine's own files; `source` and `target` are the tokens by id, special ones alike in both."""
    from ctranslate2.specs import TransformerSpec

    config = model.config
    spec = TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers), config.num_heads, pre_norm=False, no_final_norm=True
    )
    for part, embedding in ((spec.encoder, model.source_embedding), (spec.decoder, model.target_embedding)):
        embedding.reserve(positions)
        table = part.embeddings if part is spec.decoder else part.embeddings[0]
        table.weight = fold_bias(embedding)  # scaled by sqrt(hidden size) as ours, but without a bias
        part.position_encodings.encodings = embedding.positions[:positions].clone()
    spec.decoder.start_from_zero_embedding = True
    fill_linear(spec.decoder.projection, model.output)
    for part, layer in zip(spec.encoder.layer, model.encoder, strict=True):
        assert isinstance(layer, EncoderLayer)
        fill_layer(part, layer)
    for part, layer in zip(spec.decoder.layer, model.decoder, strict=True):
        assert isinstance(layer, DecoderLayer)
        fill_layer(part, layer)
        fill_attention(part.attention, layer.cross, layer.around_cross.norm)
    spec.config.layer_norm_epsilon, spec.config.add_source_eos = EPSILON, True
    spec.config.unk_token, spec.config.eos_token = target[specials.unk], target[specials.eos]
    spec.config.bos_token = spec.config.decoder_start_token = target[specials.bos]
    spec.register_source_vocabulary(list(source))
    spec.register_target_vocabulary(list(target))
    spec.validate()
    spec.optimize()
    spec.save(str(folder))


def fill_layer(part: Any, layer: EncoderLayer | DecoderLayer) -> None:
    """Self-attention and feed-forward part, which encoder and decoder layers share."""
    fill_attention(part.self_attention, layer.attention, layer.around_attention.norm)
    fill_linear(part.ffn.linear_0, layer.memory.lookup.keys, layer.memory.lookup.key_bias)
    fill_linear(part.ffn.linear_1, layer.memory.values.mT.contiguous(), layer.memory.value_bias)
    fill_norm(part.ffn.layer_norm, layer.around_memory.norm)


def fill_attention(part: Any, attention: RectifiedAttention, norm: nn.LayerNorm) -> None:
    """CTranslate2 fuses queries, keys and values in self-attention, but only keys and values in cross-attention."""
    parts = [*attention.qkv_sizes[:1], sum(attention.qkv_sizes[1:])] if attention.cross else [sum(attention.qkv_sizes)]
    *inputs, output = part.linear
    assert attention.input_bias is not None
    weights, biases = attention.input_weight.split(parts), attention.input_bias.split(parts)
    for linear, weight, bias in zip(inputs, weights, biases, strict=True):
        fill_linear(linear, weight, bias)
    fill_linear(output, attention.output.weight, attention.output.bias)
    fill_norm(part.layer_norm, norm)


def fill_linear(part: Any, weight: Tensor, bias: Tensor | None = None) -> None:
    part.weight = weight.detach()
    if bias is not None:
        part.bias = bias.detach()


def fill_norm(part: Any, norm: nn.LayerNorm) -> None:
    part.gamma, part.beta = norm.weight.detach(), norm.bias.detach()
