"""Observed models: what is seen is what they do, by their own account where they give one."""

import copy
import html
import sys

import pytest
import torch
from torch import nn
from transformers import (
    AlbertConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaConfig,
    MarianConfig,
    T5Config,
)

from rectiformer import MultiHeadAttention
from rectiformer.analyze.observe import observe
from rectiformer.analyze.record import to_json
from rectiformer.errors import ArgumentError
from rectiformer.integrations.transformers import OBSERVERS, register

register()
register("our-softmax", "softmax")


def test_an_observed_attention_shows_its_weights():
    attention = MultiHeadAttention(8, 2, "softmax")
    x = torch.randn(3, 5, 8, requires_grad=True)
    with observe(attention) as seen:
        attention(x, causal=True)
        attention(x[:, :4])
    q, k, _ = attention.project(x, None, None)
    scores = (q @ k.mT / 2).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    assert seen.weights("encoder", 0, call=0) == pytest.approx(scores.softmax(-1).detach().numpy(), abs=1e-6)
    assert seen.weights("encoder", 0).shape == (3, 2, 4, 4)
    record = seen.record(source=[list("abcde")] * 6)
    assert [example.source.text for example in record.examples] == ["a b c d e"] * 3 + ["a b c d"] * 3
    assert all(example.target is None for example in record.examples)
    assert seen.records[0].examples[0].source.text == "0 1 2 3 4"
    with pytest.raises(ArgumentError, match=r"2 tokens were given for a sequence of 5"):
        seen.record(source=["ab"])
    with pytest.raises(
        ArgumentError, match=r"cross layer 0 was seen 0 times, so it has no call -1; seen were encoder 0"
    ):
        seen.weights("cross", 0)


TINY = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BODY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIDES = {f"{side}_{size}": value for side in ("encoder", "decoder") for size, value in
         (("layers", 2), ("ffn_dim", 48), ("attention_heads", 4))}  # fmt: skip
MODELS = {
    "llama": (AutoModelForCausalLM, LlamaConfig(**TINY, **BODY, num_key_value_heads=2)),
    "albert": (AutoModel, AlbertConfig(**TINY, **BODY, embedding_size=16)),
    "marian": (AutoModelForSeq2SeqLM, MarianConfig(**TINY, **SIDES, d_model=32, decoder_start_token_id=3)),
    "t5": (
        AutoModelForSeq2SeqLM,
        T5Config(**TINY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=3),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_observed_hugging_face_model_shows_its_own_weights(name):
    kind, config = MODELS[name]
    torch.manual_seed(0)
    eager = kind.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    ours = kind.from_config(copy.deepcopy(config), attn_implementation="our-softmax").eval()
    ours.load_state_dict(eager.state_dict())
    given = {
        "input_ids": torch.randint(4, 40, (2, 6)),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]),
    }
    if config.is_encoder_decoder:
        given["decoder_input_ids"] = torch.randint(4, 40, (2, 5))
        given["decoder_attention_mask"] = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    expected = eager(**given, output_attentions=True)
    with torch.no_grad(), observe(ours) as seen:
        ours(**given)
    parts = {"encoder": "attentions"}
    if config.is_encoder_decoder:
        parts = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
    assert {kind for kind, _ in seen.passes[0]} == set(parts)
    for part, attribute in parts.items():
        layers = expected[attribute]
        assert len(layers) == 2
        for layer, weights in enumerate(layers):
            if part == "encoder":
                weights[1, :, 4:] = 0  # rows of padding, which are not kept
            assert seen.weights(part, layer) == pytest.approx(weights.detach().numpy(), abs=1e-5)
    to_json(seen.records[0])
    assert len(seen.records[0].examples) == 2
    assert not OBSERVERS


def test_generation_is_seen_step_by_step_and_is_no_record():
    kind, config = MODELS["llama"]
    model = kind.from_config(config, attn_implementation="rectified").eval()
    with observe(model) as seen:
        model.generate(torch.randint(4, 40, (1, 5)), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert [seen.weights("encoder", 1, call).shape for call in range(3)] == [(1, 4, 5, 5), (1, 4, 1, 6), (1, 4, 1, 7)]
    with pytest.raises(ArgumentError, match=r"has 1 queries and 6 keys, .*whole sequences without a cache") as error:
        seen.record()
    assert "\n" not in str(error.value)


def test_only_the_observed_model_is_seen():
    kind, config = MODELS["llama"]
    one, other = (kind.from_config(config, attn_implementation="rectified").eval() for _ in range(2))
    with observe(one) as seen:
        other(input_ids=torch.randint(4, 40, (1, 5)))
    with pytest.raises(ArgumentError, match=r"nothing was seen of LlamaForCausalLM; call it inside"):
        seen.record()


def test_observing_ends_whatever_happens():
    attention = MultiHeadAttention(8, 2)
    attention.observer = mine = [].append
    model = nn.Sequential(attention)
    with pytest.raises(KeyError), observe(model):
        raise KeyError
    assert attention.observer is mine
    assert not OBSERVERS
    assert not model._forward_pre_hooks


def test_a_model_without_our_attention_says_so(monkeypatch):
    monkeypatch.delitem(sys.modules, "rectiformer.integrations.transformers")
    with (
        pytest.raises(ArgumentError, match=r"Linear has no MultiHeadAttention, and .* register\(\)"),
        observe(nn.Linear(1, 1)),
    ):
        pass


def test_a_notebook_shows_the_report_in_a_frame_of_its_own():
    from rectiformer.analyze.report import report_html

    attention = MultiHeadAttention(8, 2)
    with observe(attention) as seen:
        attention(torch.randn(1, 3, 8))
    shown = seen.show(source=[["<b>", '"x"', "</iframe>"]])._repr_html_()
    assert shown.startswith('<iframe sandbox="allow-scripts allow-downloads"')
    assert shown.count("<") == 2
    page = html.unescape(shown[shown.index('srcdoc="') + 8 : shown.rindex('"')])
    assert page == report_html([seen.record(source=[["<b>", '"x"', "</iframe>"]])])
