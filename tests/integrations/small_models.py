"""Small Hugging Face models of every kind, with our attention registered, and what tests give them."""

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    BertConfig,
    Gemma3TextConfig,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    MarianConfig,
    MistralConfig,
    ModernBertConfig,
    T5Config,
    ViTConfig,
)

from rectiformer.integrations.transformers import register

register()

WORDS, HEADS = 40, 4
BODY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS}
SPECIAL = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LM = {**BODY, **SPECIAL, "num_key_value_heads": 2, "head_dim": 8}
MARIAN = {"d_model": 32, "decoder_start_token_id": 3, "forced_eos_token_id": None, **SPECIAL}
for side in ("encoder", "decoder"):
    MARIAN |= {f"{side}_layers": 2, f"{side}_ffn_dim": 48, f"{side}_attention_heads": HEADS}
CONFIGS = {
    "llama": lambda: LlamaConfig(**LM),
    "mistral": lambda: MistralConfig(**LM, sliding_window=4),
    "gpt2": lambda: GPT2Config(**SPECIAL, n_embd=32, n_layer=2, n_head=HEADS),
    "bert": lambda: BertConfig(**BODY, vocab_size=WORDS),
    "vit": lambda: ViTConfig(**BODY, image_size=12, patch_size=4),
    "marian": lambda: MarianConfig(**MARIAN),
    "gemma3": lambda: Gemma3TextConfig(**LM, sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    "llama4": lambda: Llama4TextConfig(**LM, attention_chunk_size=4, num_local_experts=2, intermediate_size_mlp=48),
    "modernbert": lambda: ModernBertConfig(**BODY, **SPECIAL, local_attention=4, global_attn_every_n_layers=2),
    "t5": lambda: T5Config(**SPECIAL, d_model=32, d_kv=8, d_ff=48, num_heads=HEADS, num_layers=2),
}
KINDS = {"bert": AutoModel, "modernbert": AutoModel, "vit": AutoModelForImageClassification}
KINDS |= {"marian": AutoModelForSeq2SeqLM, "t5": AutoModelForSeq2SeqLM}
DECODERS = ["llama", "mistral", "gpt2"]


def build(kind, name="rectified", dtype=torch.float64):
    """A small model in evaluation mode whose attention matters: every weight is larger than by default."""
    model = KINDS.get(kind, AutoModelForCausalLM).from_config(CONFIGS[kind](), attn_implementation=name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(dtype).eval()


def draw_ids(*shape):
    return torch.randint(4, WORDS, shape)


def outputs(model, ids, real=None):
    """Logits of a decoder or encoder-decoder, hidden states of an encoder."""
    if model.config.is_encoder_decoder:
        return model(input_ids=ids, attention_mask=real, decoder_input_ids=ids[:1, :5].expand(len(ids), 5)).logits
    return model(ids, attention_mask=real, position_ids=None if real is None else positions_of(real))[0]


def positions_of(real):
    """Positions counted from the first real token on."""
    return (real.cumsum(1) - 1).clamp_min(0)


def pad(ids, length, side):
    """A row of ids padded with noise, so that any look at it shows; and which of them are real."""
    noise, real = draw_ids(length - len(ids)), torch.ones(len(ids), dtype=torch.long)
    parts = [(noise, torch.zeros_like(noise)), (ids, real)]
    return [torch.cat(pieces) for pieces in zip(*(parts if side == "left" else reversed(parts)), strict=True)]
