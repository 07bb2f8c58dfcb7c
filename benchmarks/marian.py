"""Sizes to measure at: our model, and its peer, Hugging Face MarianMT, of the same shape."""

from __future__ import annotations

from typing import Any

from rectiformer.config import ModelConfig

SIZES = {
    "tiny": {"width": 128, "heads": 4, "layers": 2, "slots": 256, "vocabulary": 1000},
    "small": {"width": 512, "heads": 8, "layers": 4, "slots": 1024, "vocabulary": 8000},
    "base": {"width": 512, "heads": 8, "layers": 6, "slots": 2048, "vocabulary": 8000},
}


def our_config(size: dict[str, int], variant: str, **others: Any) -> ModelConfig:
    """Our model of this size."""
    return ModelConfig(
        hidden_size=size["width"],
        num_heads=size["heads"],
        encoder_layers=size["layers"],
        decoder_layers=size["layers"],
        ffn_size=size["slots"],
        variant=variant,
        **others,
    )


def marian_config(size: dict[str, int], **others: Any) -> Any:
    """A MarianConfig of this size, with our special ids."""
    from transformers import MarianConfig

    return MarianConfig(
        vocab_size=size["vocabulary"],
        d_model=size["width"],
        encoder_layers=size["layers"],
        decoder_layers=size["layers"],
        encoder_attention_heads=size["heads"],
        decoder_attention_heads=size["heads"],
        encoder_ffn_dim=size["slots"],
        decoder_ffn_dim=size["slots"],
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=0,
        eos_token_id=3,
        decoder_start_token_id=2,
        max_position_embeddings=512,
        **others,
    )
