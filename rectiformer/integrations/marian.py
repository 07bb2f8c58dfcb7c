"""A Hugging Face folder: a translator as MarianMT, which transformers loads with `MarianMTModel` and `AutoTokenizer`.

Marian's layers are those of the first Transformer, with softmax attention. Rectified variants can be exported if
`rectiformer.integrations.transformers.register()` has their attention.

What our layers have and Marian's lack is folded into matrices: the bias of an embedding into its rows, gamma into the
queries, the gain of a norm into the output projection. Our positional encodings differ, so they are exported too.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from rectiformer.errors import ArgumentError
from rectiformer.files import write_file
from rectiformer.integrations.export import Report, export_folder, fold_bias, name_tokens, require_packages
from rectiformer.model.attention import RectifiedAttention
from rectiformer.model.embedding import Embedding
from rectiformer.model.layers import DecoderLayer, EncoderLayer
from rectiformer.model.norms import RMSNorm
from rectiformer.model.transformer import Transformer
from rectiformer.ops.variants import Variant, find_variant
from rectiformer.text.vocabulary import Vocabulary
from rectiformer.translate.translator import Translator

CLOSE = 1e-3
"""Of the largest logit: far more than rounding, far less than a wrong layer."""
STREAM = 32.0
"""Scale of the residual stream. Marian's LayerNorm adds 1e-5 to a variance where ours adds 1e-8; in a stream that is
STREAM times larger, that epsilon weighs STREAM^2 less. A power of two, so nothing is rounded."""

Tensors = dict[str, Tensor]


def export_transformers(translator: Translator, out: Path, report: Report = lambda line: None) -> None:
    """Write folder `out` with config.json, model.safetensors, generation_config.json, the tokenizer and export.json.

    It is loaded and compared with the model before the folder appears. For a model that Marian cannot represent, an
    ArgumentError names the configuration key.
    """
    require_packages("a Hugging Face folder", "hf", "transformers")
    model, positions = translator.model.eval(), 2 * translator.max_length
    attention = find_registered(find_variant(model.config.variant_at("cross")))
    record = {"positions": positions, "attn_implementation": attention}
    with export_folder(translator, out, "transformers", **record) as folder:
        require_same_symbols(translator)
        report("writing weights and tokenizer")
        write_file(folder / "model.safetensors", save(translate_weights(model, positions), {"format": "pt"}))
        for name, content in {
            "config.json": configure(translator, attention, positions),
            "generation_config.json": configure_generation(translator),
            "tokenizer_config.json": configure_tokenizer(translator),
            "vocab.json": number_tokens(translator.source),
            "target_vocab.json": number_tokens(translator.target),
        }.items():
            write_file(folder / name, json.dumps(content, indent=1, ensure_ascii=False).encode())
        translator.source.save(folder / "source.spm")
        translator.target.save(folder / "target.spm")
        report("loading them and comparing with the model")
        check_folder(folder, model)


def find_registered(variant: Variant) -> str:
    """The `attn_implementation` by which transformers computes the weights of a variant; empty if none does."""
    from rectiformer.integrations.transformers import STANDARD

    if variant.name == "softmax":
        return "sdpa"
    return next((name for name, row in STANDARD.items() if have_same_weights(find_variant(row), variant)), "")


def have_same_weights(one: Variant, other: Variant) -> bool:
    """Whether two rectified variants differ at most in the gain of their norm, which is folded into the projection."""
    plain = {"none": "none", "rms": "rms", "rms-small": "rms"}
    rows = [(each.power, each.row_scale, plain.get(each.output_norm)) for each in (one, other)]
    return other.rectified and rows[0] == rows[1]


def require_same_symbols(translator: Translator) -> None:
    """Raise an ArgumentError if source and target number special tokens differently: Marian has one id for each."""
    for name in ("pad", "unk", "eos"):
        source, target = (getattr(each, name) for each in (translator.source, translator.target))
        if source != target:
            raise ArgumentError(
                f"MarianMT has one id for {name}, but it is {source} in the source vocabulary and {target} in the "
                "target's; export with --to onnx"
            )


def configure(translator: Translator, attention: str, positions: int) -> dict[str, Any]:
    """config.json."""
    config, target = translator.model.config, translator.target
    return {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "attn_implementation": attention,
        "dtype": "float32",
        "d_model": config.hidden_size,
        "encoder_layers": config.encoder_layers,
        "encoder_attention_heads": config.num_heads,
        "encoder_ffn_dim": config.ffn_size,
        "decoder_layers": config.decoder_layers,
        "decoder_attention_heads": config.num_heads,
        "decoder_ffn_dim": config.ffn_size,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.ffn_dropout,
        "vocab_size": translator.source.size,
        "decoder_vocab_size": target.size,
        "max_position_embeddings": positions,
        "activation_function": "relu",
        "scale_embedding": True,
        "share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": False,
        "is_encoder_decoder": True,
        "pad_token_id": target.pad,
        "bos_token_id": target.bos,
        "eos_token_id": target.eos,
        "decoder_start_token_id": target.bos,
        "forced_eos_token_id": None,
    }


def configure_generation(translator: Translator) -> dict[str, Any]:
    """generation_config.json: bars what our beam search never produces; the length penalty is a different formula."""
    target = translator.target
    return {
        "bad_words_ids": [[target.pad], [target.unk], [target.bos]],
        "bos_token_id": target.bos,
        "decoder_start_token_id": target.bos,
        "eos_token_id": target.eos,
        "pad_token_id": target.pad,
        "min_new_tokens": 1,
        "max_length": translator.max_length,
        "num_beams": 4,
        "length_penalty": 0.6,
    }


def configure_tokenizer(translator: Translator) -> dict[str, Any]:
    """tokenizer_config.json."""
    return {
        "tokenizer_class": "MarianTokenizer",
        "model_max_length": translator.max_length,
        "separate_vocabs": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }


def number_tokens(vocabulary: Vocabulary) -> dict[str, int]:
    return {name: id for id, name in enumerate(name_tokens(vocabulary))}


def check_folder(folder: Path, model: Transformer) -> None:
    """Raise an ArgumentError if the model that transformers loads is not this one."""
    from rectiformer.integrations.transformers import register

    register()
    marian = load_quietly(folder)
    with torch.inference_mode():
        generator = torch.Generator().manual_seed(1)
        source = torch.randint(len(model.source_embedding.table), (3, 12), generator=generator)
        target = torch.randint(len(model.output), (3, 9), generator=generator)
        assert model.target_embedding.bos is not None
        target[:, 0] = model.target_embedding.bos
        lengths = torch.tensor([12, 7, 1])
        real = torch.arange(12) < lengths[:, None]
        right = model(source, lengths, target)
        found = marian(input_ids=source, attention_mask=real.long(), decoder_input_ids=target).logits
    error = (found - right).abs().max() / right.abs().max()
    if not error <= CLOSE:
        raise ArgumentError(f"transformers loads a different model: logits are off by {error:.1e}; nothing was written")


def load_quietly(folder: Path) -> Any:
    """The model of a folder, loaded without a progress bar."""
    from transformers import MarianMTModel
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return MarianMTModel.from_pretrained(folder).eval()
    finally:
        if shown:
            logging.enable_progress_bar()


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
    if embedding.bos is not None:
        table[embedding.bos] = 0
    encodings = embedding.positions[:positions]
    return {f"{name}.embed_tokens.weight": table * STREAM, f"{name}.embed_positions.weight": encodings * STREAM}


def translate_layer(name: str, layer: EncoderLayer | DecoderLayer, last: bool) -> Tensors:
    """Self-attention and memory, which all layers have; the norm of the `last` one ends the stream."""
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
    """The four projections, with the scale of the queries and the gain of the output norm folded in."""
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
        reads_source = attention.cross and part != "q_proj"  # the encoder output is no longer scaled
        tensors |= {f"{name}.{part}.weight": weight / (1 if reads_source else STREAM), f"{name}.{part}.bias": bias}
    return tensors


def query_scale(attention: RectifiedAttention) -> Tensor:
    """The factor of each row of the query projection, [E]: 1 / gamma of its head, learned or fixed."""
    if attention.scales_scores:
        return attention.score_scales().repeat_interleave(attention.embed_dim // attention.num_heads)
    return torch.full((attention.embed_dim,), 1 / float(attention.options.get("gamma", 1.0)))


def norm(name: str, layer: nn.LayerNorm, factor: float = STREAM) -> Tensors:
    return {f"{name}.weight": layer.weight * factor, f"{name}.bias": layer.bias * factor}
