"""Sizes to measure at: our model, and its peer, Hugging Face MarianMT, of the same shape."""

from __future__ import annotations

from typing import Any

from rectiformer.config import ModelConfig

SIZES = {
    "tiny": {"hidden_size": 128, "num_heads": 4, "layers": 2, "ffn_size": 256, "vocabulary": 1000},
    "small": {"hidden_size": 512, "num_heads": 8, "layers": 4, "ffn_size": 1024, "vocabulary": 8000},
    "base": {"hidden_size": 512, "num_heads": 8, "layers": 6, "ffn_size": 2048, "vocabulary": 8000},
}


def our_config(size: dict[str, int], variant: str, **others: Any) -> ModelConfig:
    """Our model of this size."""
    return ModelConfig(
        hidden_size=size["hidden_size"],
        num_heads=size["num_heads"],
        encoder_layers=size["layers"],
        decoder_layers=size["layers"],
        ffn_size=size["ffn_size"],
        variant=variant,
        **others,
    )


def marian_config(size: dict[str, int], **others: Any) -> Any:
    """A MarianConfig of this size, with our special ids."""
    from transformers import MarianConfig

    return MarianConfig(
        vocab_size=size["vocabulary"],
        d_model=size["hidden_size"],
        encoder_layers=size["layers"],
        decoder_layers=size["layers"],
        encoder_attention_heads=size["num_heads"],
        decoder_attention_heads=size["num_heads"],
        encoder_ffn_dim=size["ffn_size"],
        decoder_ffn_dim=size["ffn_size"],
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=0,
        eos_token_id=3,
        decoder_start_token_id=2,
        max_position_embeddings=512,
        **others,
    )
