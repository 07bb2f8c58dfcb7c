"""A Hugging Face folder: a translator as MarianMT, which transformers loads with `MarianMTModel` and `AutoTokenizer`.

Marian's layers are those of the first Transformer, with softmax attention. Of the rectified variants those export whose
attention `rectiformer.integrations.transformers.register()` gives to transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from rectiformer.config import ModelConfig
from rectiformer.errors import ArgumentError
from rectiformer.files import write_file
from rectiformer.integrations.exportable import require_exportable
from rectiformer.integrations.folder import (
    Report,
    export_folder,
    name_tokens,
    require_new,
    require_packages,
    write_record,
)
from rectiformer.integrations.marian_weights import translate_weights
from rectiformer.model.transformer import Transformer
from rectiformer.ops.variants import Variant, find_variant
from rectiformer.translate.translator import Translator

CLOSE = 1e-3
"""Of the largest logit: far more than rounding, far less than a wrong layer."""


def export_transformers(translator: Translator, out: Path, report: Report = lambda line: None) -> None:
    """Write folder `out` with config.json, model.safetensors, generation_config.json, the tokenizer and export.json.

    It is loaded and compared with the model before the folder is there. A model that Marian is not, is an
    ArgumentError that names the key of its configuration.
    """
    require_packages("a Hugging Face folder", "hf", "transformers")
    require_new(out)
    model = translator.model.eval()
    require_exportable(model.config, "transformers")
    attention = find_registered(find_variant(model.config.variant_of("cross")))
    require_same_symbols(translator)
    positions = 2 * translator.longest
    files = {
        "config.json": to_json(configure(translator, attention, positions)),
        "generation_config.json": to_json(configure_generation(translator)),
        "tokenizer_config.json": to_json(configure_tokenizer(translator)),
        "vocab.json": to_json(number_tokens(name_tokens(translator.source))),
        "target_vocab.json": to_json(number_tokens(name_tokens(translator.target))),
        "source.spm": translator.source.to_bytes(),
        "target.spm": translator.target.to_bytes(),
    }
    with export_folder(out) as folder:
        report("writing weights and tokenizer")
        write_file(folder / "model.safetensors", save(translate_weights(model, positions), {"format": "pt"}))
        for name, data in files.items():
            write_file(folder / name, data)
        report("loading them and comparing with the model")
        check_folder(folder, model)
        write_record(folder, "transformers", translator, positions=positions, attn_implementation=attention)


def find_registered(variant: Variant) -> str:
    """The name under which transformers computes the weights of a variant that can be exported."""
    from rectiformer.integrations.transformers import STANDARD

    if variant.name == "softmax":
        return "sdpa"
    return next(name for name, standard in STANDARD.items() if alike(find_variant(standard), variant))


def alike(one: Variant, other: Variant) -> bool:
    """Whether two rectified variants differ at most in the gain of their norm, which the output projection takes."""
    plain = {"none": "none", "rms": "rms", "rms-small": "rms"}
    rows = [(each.power, each.row_scale, plain.get(each.output_norm)) for each in (one, other)]
    return other.rectified and rows[0] == rows[1]


def require_same_symbols(translator: Translator) -> None:
    """ArgumentError where source and target number their special tokens differently: Marian has one id for each."""
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
    sizes: dict[str, Any] = {}
    for part, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        sizes |= {
            f"{part}_layers": layers,
            f"{part}_attention_heads": config.num_heads,
            f"{part}_ffn_dim": config.ffn_size,
        }
    return {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "attn_implementation": attention,
        "dtype": "float32",
        "d_model": config.hidden_size,
        **sizes,
        **dropouts(config),
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


def dropouts(config: ModelConfig) -> dict[str, float]:
    return {
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.ffn_dropout,
    }


def configure_generation(translator: Translator) -> dict[str, Any]:
    """generation_config.json: what our search never produces is barred; its length penalty is another formula."""
    target = translator.target
    return {
        "bad_words_ids": [[target.pad], [target.unk], [target.bos]],
        "bos_token_id": target.bos,
        "decoder_start_token_id": target.bos,
        "eos_token_id": target.eos,
        "pad_token_id": target.pad,
        "min_new_tokens": 1,
        "max_length": translator.longest,
        "num_beams": 4,
        "length_penalty": 0.6,
    }


def configure_tokenizer(translator: Translator) -> dict[str, Any]:
    """tokenizer_config.json."""
    return {
        "tokenizer_class": "MarianTokenizer",
        "model_max_length": translator.longest,
        "separate_vocabs": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }


def number_tokens(names: list[str]) -> dict[str, int]:
    return {name: id for id, name in enumerate(names)}


def to_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1, ensure_ascii=False).encode()


def check_folder(folder: Path, model: Transformer) -> None:
    """ArgumentError where transformers reads another model than this one."""
    from rectiformer.integrations.transformers import register

    register()
    marian = load_quietly(folder)
    with torch.inference_mode():
        generator = torch.Generator().manual_seed(1)
        source = torch.randint(len(model.source_embedding.table), (3, 12), generator=generator)
        target = torch.randint(len(model.output), (3, 9), generator=generator)
        assert model.target_embedding.start is not None
        target[:, 0] = model.target_embedding.start
        lengths = torch.tensor([12, 7, 1])
        real = torch.arange(12) < lengths[:, None]
        right = model(source, lengths, target)
        found = marian(input_ids=source, attention_mask=real.long(), decoder_input_ids=target).logits
    error = (found - right).abs().max() / right.abs().max()
    if not error <= CLOSE:
        raise ArgumentError(f"transformers reads another model: logits are off by {error:.1e}; nothing was written")


def load_quietly(folder: Path) -> Any:
    """The model of a folder, without a bar for what takes a moment."""
    from transformers import MarianMTModel
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return MarianMTModel.from_pretrained(folder).eval()
    finally:
        if shown:
            logging.enable_progress_bar()
