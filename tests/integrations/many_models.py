"""Sixty Hugging Face configurations: architectures and options, small and with random weights."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from integrations.small_models import BODY, HEADS, LM, MARIAN, SPECIAL, WORDS

from rectiformer.integrations.transformers import register

register()
register("relu-squared", "relu2")

GPT = {**SPECIAL, "n_embd": 32, "n_layer": 2, "n_head": HEADS}
TEXT = {**BODY, **SPECIAL, "max_position_embeddings": 32}
IMAGE = {**BODY, "image_size": 12, "patch_size": 4}
T5 = {**SPECIAL, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": HEADS, "num_layers": 2, "decoder_start_token_id": 3}
OPT = {**SPECIAL, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS}
MOE = {**LM, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
SOUND = {**BODY, "vocab_size": WORDS, "conv_dim": (8,) * 7, "num_conv_pos_embeddings": 4,
         "num_conv_pos_embedding_groups": 2}  # fmt: skip
DUAL = {
    "text_config": {**TEXT, "projection_dim": 16},
    "vision_config": {**IMAGE, "projection_dim": 16},
    "projection_dim": 16,
}
SLIDING = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Case:
    """A model to build: its configuration class without the last word, and what is set in it."""

    config: str
    task: str
    """One of TASKS."""
    settings: dict[str, Any]
    name: str = "rectified"

    def __str__(self) -> str:
        return f"{self.config}-{self.name}"


TASKS = {
    "decoder": "AutoModelForCausalLM",
    "encoder": "AutoModel",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "image": "AutoModel",
    "sound": "AutoModel",
    "dual": "AutoModel",
}
"""What a model is for, and the class that builds it."""


def cases(task: str, *rows: tuple[Any, ...]) -> list[Case]:
    return [Case(row[0], task, row[1], *row[2:]) for row in rows]


CASES = [
    *cases(
        "decoder",
        ("Llama", LM),
        ("Llama", LM, "rela"),
        ("Llama", {**LM, "num_key_value_heads": 1, "attention_bias": True}, "rectified-sqrt"),
        ("Llama", {**LM, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "linear", "factor": 2.0,
                                                                         "rope_theta": 1e4}}, "relu-squared"),
        ("Mistral", {**LM, "sliding_window": 4}),
        ("Mistral", {**LM, "sliding_window": None}, "rela"),
        ("Mixtral", {**LM, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}),
        ("Qwen2", LM),
        ("Qwen2", {**LM, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, "rela"),
        ("Qwen3", LM),
        ("Qwen3Moe", MOE),
        ("Gemma", LM),
        ("Gemma2", {**LM, "attn_logit_softcapping": None, "sliding_window": 4, "layer_types": SLIDING}),
        ("Gemma3Text", {**LM, "sliding_window": 4, "layer_types": SLIDING}, "rectified-sqrt"),
        ("Phi", {**TEXT, "num_key_value_heads": 2}),
        ("Phi3", {**LM, "sliding_window": None}, "rela"),
        ("StableLm", {**TEXT, "num_key_value_heads": 2}),
        ("Starcoder2", {**TEXT, "num_key_value_heads": 2, "sliding_window": 4}),
        ("Olmo2", LM),
        ("Cohere", LM),
        ("Cohere2", {**LM, "sliding_window": 4, "layer_types": SLIDING}),
        ("Granite", LM, "rectified-sqrt"),
        ("Glm", LM),
        ("Nemotron", LM),
        ("SmolLM3", LM),
        ("Persimmon", {**TEXT}),
        ("Helium", LM),
        ("Llama4Text", {**LM, "attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 48}),
        ("GPT2", GPT),
        ("GPT2", {**GPT, "scale_attn_by_inverse_layer_idx": True}, "rela"),
        ("GPTNeoX", TEXT),
        ("GPTBigCode", GPT),
        ("OPT", OPT),
        ("BioGpt", {**TEXT}),
    ),
    *cases(
        "encoder",
        ("Bert", TEXT),
        ("Bert", TEXT, "rela"),
        ("Roberta", TEXT),
        ("XLMRoberta", TEXT, "rectified-sqrt"),
        ("Albert", {**TEXT, "embedding_size": 16}),
        ("Electra", {**TEXT, "embedding_size": 16}),
        ("DistilBert", {**SPECIAL, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": HEADS}),
        ("Ernie", TEXT),
        ("ModernBert", {**TEXT, "local_attention": 4, "global_attn_every_n_layers": 2}),
        ("EuroBert", LM),
    ),
    *cases(
        "seq2seq",
        ("Marian", MARIAN),
        ("Marian", MARIAN, "rela"),
        ("Bart", MARIAN, "rectified-sqrt"),
        ("MBart", MARIAN),
        ("Pegasus", MARIAN),
        ("M2M100", MARIAN),
        ("Blenderbot", MARIAN),
        ("T5", T5),
        ("MT5", T5, "rela"),
        ("UMT5", T5),
    ),
    *cases(
        "image",
        ("ViT", IMAGE),
        ("DeiT", IMAGE, "rela"),
        ("Dinov2", {**IMAGE, "mlp_ratio": 2}),
    ),
    *cases(
        "sound",
        ("Wav2Vec2", SOUND),
        ("Hubert", SOUND, "rectified-sqrt"),
    ),
    *cases("dual", ("CLIP", DUAL)),
]  # fmt: skip


def build_case(case: Case) -> Any:
    """The model of a case in evaluation mode, with weights large enough for attention to matter."""
    config = getattr(transformers, f"{case.config}Config")(**case.settings)
    # the grouped product of experts knows no float64
    experts = {"experts_implementation": "eager"} if "num_experts_per_tok" in case.settings else {}
    model = getattr(transformers, TASKS[case.task]).from_config(config, attn_implementation=case.name, **experts)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.double().eval()
