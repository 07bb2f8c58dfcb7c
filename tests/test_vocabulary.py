"""The words of the project: names that were replaced stay replaced, in the configuration and in the public API."""

import dataclasses
import inspect

import pytest

import rectiformer
from rectiformer.config import Config
from rectiformer.errors import ConfigError
from rectiformer.toml import load_config

REPLACED_KEYS = {
    "model": "width heads slots slot_dropout order tie learn learned_start center open threshold",
    "training": "tokens accumulate rate clip smoothing smoothing_over start average",
    "data": "longest segment",
    "checkpoint": "wait",
}
REPLACED_ARGUMENTS = {"bias", "dropout", "window", "is_causal", "width", "heads", "key_heads"}
FUNCTIONS = ("attention", "attention_varlen", "decode_attention", "attention_weights", "attention_stats", "explain")


@pytest.mark.parametrize(
    ("section", "key"), [(section, key) for section in REPLACED_KEYS for key in REPLACED_KEYS[section].split()]
)
def test_replaced_keys_are_unknown(section, key):
    assert key not in {field.name for field in dataclasses.fields(getattr(Config(), section))}
    with pytest.raises(ConfigError, match=f"unknown key '{section}.{key}'"):
        load_config(None, [f"{section}.{key}=1"])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_the_argument_words_of_torch_and_flash_attention(name):
    parameters = set(inspect.signature(getattr(rectiformer, name)).parameters)
    assert not parameters & REPLACED_ARGUMENTS


def test_modules_have_the_argument_words_of_torch():
    parameters = list(inspect.signature(rectiformer.RectifiedAttention).parameters)
    assert parameters[:2] == ["embed_dim", "num_heads"]
    assert "num_kv_heads" in parameters
    assert {"causal", "attn_mask", "attn_bias", "window_size"} <= set(
        inspect.signature(rectiformer.RectifiedAttention.forward).parameters
    )


@pytest.mark.parametrize("name", ["MultiHeadAttention", "FixedCache", "Opening", "Team"])
def test_replaced_public_names_are_gone(name):
    assert not hasattr(rectiformer, name)
