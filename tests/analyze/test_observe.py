"""Observed models: what is seen is what they do, by their own account where they give one."""

import copy
import html

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import (
    AlbertConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    FNetConfig,
    LEDConfig,
    LlamaConfig,
    MarianConfig,
    T5Config,
)

from rectiformer import RectifiedAttention
from rectiformer.analyze.observe import observe
from rectiformer.analyze.record import read_record, to_json
from rectiformer.errors import ArgumentError
from rectiformer.integrations.transformers import OBSERVERS, register
from rectiformer.model.multihead import MultiheadAttention

register()
register("our-softmax", "softmax")


def test_an_observed_attention_shows_its_weights():
    attention = RectifiedAttention(8, 2, "softmax")
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
    assert seen.record().examples[0].source.text == "0 1 2 3 4"
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


@pytest.mark.parametrize("attention", ["our-softmax", "sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_an_observed_hugging_face_model_shows_its_own_weights(name, attention):
    """Ours, or a stock one that was never swapped."""
    kind, config = MODELS[name]
    torch.manual_seed(0)
    eager = kind.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    ours = kind.from_config(copy.deepcopy(config), attn_implementation=attention).eval()
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
        outputs = ours(**given)
    assert_close(outputs[0], expected[0])
    assert not any("attentions" in key for key in outputs)
    assert {module.config._attn_implementation for module in ours.modules() if hasattr(module, "config")} == {attention}
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
    to_json(seen.record())
    assert len(seen.record().examples) == 2
    assert not OBSERVERS


@pytest.mark.parametrize("attention", ["our-softmax", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "albert"])
def test_queries_of_padding_on_the_left_attend_to_nothing(name, attention):
    kind, config = MODELS[name]
    model = kind.from_config(copy.deepcopy(config), attn_implementation=attention).eval()
    real = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    with torch.no_grad(), observe(model) as seen:
        model(input_ids=torch.randint(4, 40, (2, 5)), attention_mask=real)
    assert seen.weights("encoder", 1).sum(-1) == pytest.approx(real[:, None].expand(2, 4, 5).numpy(), abs=1e-5)
    visible = seen.passes[0]["encoder", 1][1].visible.reshape(4, 5)
    assert (visible > 0).tolist() == [real[1].bool().tolist()] * 4


def test_generation_is_seen_step_by_step_and_is_no_record():
    kind, config = MODELS["llama"]
    model = kind.from_config(config, attn_implementation="rectified").eval()
    with observe(model) as seen:
        model.generate(torch.randint(4, 40, (1, 5)), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert [seen.weights("encoder", 1, call).shape for call in range(3)] == [(1, 4, 5, 5), (1, 4, 1, 6), (1, 4, 1, 7)]
    with pytest.raises(ArgumentError, match=r"has 1 queries and 6 keys, .*whole sequences without a cache") as error:
        seen.record()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["llama", "marian"])
def test_generation_of_a_stock_model_is_seen_step_by_step(name):
    kind, config = MODELS[name]
    model = kind.from_config(copy.deepcopy(config), attn_implementation="sdpa").eval()
    settings = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    ids = torch.randint(4, 40, (1, 5))
    expected = model.generate(ids, **settings)
    with observe(model) as seen:
        assert torch.equal(model.generate(ids, **settings), expected)
    part, first = ("decoder", 1) if name == "marian" else ("encoder", 5)
    sizes = [seen.weights(part, 1, call).shape[2:] for call in range(3)]
    assert sizes == [(first, first), (1, first + 1), (1, first + 2)]
    if name == "marian":
        assert set(seen.passes[0]) == {("encoder", 0), ("encoder", 1)}  # generate calls the encoder by itself
        assert seen.weights("encoder", 1).shape == (1, 4, 5, 5)
        assert seen.weights("cross", 0).shape == (1, 4, 1, 5)


def test_the_outputs_of_a_stock_model_are_what_was_asked_for():
    kind, config = MODELS["llama"]
    model, ids = (
        kind.from_config(copy.deepcopy(config), attn_implementation="sdpa").eval(),
        torch.randint(4, 40, (1, 5)),
    )
    with observe(model), torch.no_grad():
        assert len(model(ids, output_attentions=True).attentions) == 2
        with_cache = model(ids, return_dict=False)
        assert [type(each).__name__ for each in with_cache] == ["Tensor", "DynamicCache"]
        with pytest.raises(IndexError):
            model(torch.tensor([[99]]))
        assert model(ids, output_attentions=None, return_dict=None).attentions is None
        model.config.output_attentions = True
        assert len(model(ids).attentions) == 2
    assert not any(module._forward_hooks_with_kwargs for module in model.modules())


def test_a_stock_model_is_compared_before_and_after_the_swap():
    kind, config = MODELS["llama"]
    model, ids = (
        kind.from_config(copy.deepcopy(config), attn_implementation="sdpa").eval(),
        torch.randint(4, 40, (1, 5)),
    )
    with observe(model) as before, torch.no_grad():
        model(ids)
    model.set_attn_implementation("rectified")
    with observe(model) as after, torch.no_grad():
        model(ids)
    assert before.weights("encoder", 0).sum(-1) == pytest.approx(1, abs=1e-5)
    assert "softmax: 0.0% zeros, 0.0% null rows" in repr(before)
    assert "relu-seqlen: " in repr(after)
    assert after.record().model.variants["encoder"] == "relu-seqlen"


def test_weights_of_windows_are_no_weights_over_keys():
    config = LEDConfig(**TINY, **SIDES, d_model=32, attention_window=4, decoder_start_token_id=3)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    ids = torch.randint(4, 40, (1, 8))
    with observe(model), pytest.raises(ArgumentError, match=r"returns .* which are not weights of queries over keys"):
        model(ids, decoder_input_ids=ids)


def test_a_stock_model_without_weights_says_so():
    config = FNetConfig(**TINY, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    model = AutoModel.from_config(config).eval()
    with observe(model), pytest.raises(ArgumentError, match="FNetModel returns no attention weights"):
        model(torch.randint(4, 40, (1, 5)))


def test_only_the_observed_model_is_seen():
    kind, config = MODELS["llama"]
    one, other = (kind.from_config(config, attn_implementation="rectified").eval() for _ in range(2))
    with observe(one) as seen:
        other(input_ids=torch.randint(4, 40, (1, 5)))
    with pytest.raises(ArgumentError, match=r"nothing was seen of LlamaForCausalLM; call it inside"):
        seen.record()


def test_observing_ends_whatever_happens():
    attention = RectifiedAttention(8, 2)
    attention.observer = mine = [].append
    model = nn.Sequential(attention)
    with pytest.raises(KeyError), observe(model):
        raise KeyError
    assert attention.observer is mine
    assert not OBSERVERS
    assert not model._forward_pre_hooks


def test_a_model_without_attention_says_so():
    with (
        pytest.raises(ArgumentError, match=r"Linear holds no attention that can be observed: no RectifiedAttention or"),
        observe(nn.Linear(1, 1)),
    ):
        pass


def test_a_compiled_model_is_observed_uncompiled():
    attention, x = RectifiedAttention(8, 2, "rela"), torch.randn(2, 5, 8)
    with observe(torch.compile(attention, fullgraph=True)) as seen, torch.no_grad():
        found = torch.compile(attention, fullgraph=True)(x)
    assert_close(found, attention(x))
    with observe(attention) as plain:
        attention(x)
    assert (seen.weights("encoder", 0) == plain.weights("encoder", 0)).all()
    assert attention.observer is None


def test_the_drop_in_shows_the_weights_that_it_returns():
    attention, x = MultiheadAttention(8, 2, batch_first=True, variant="rela"), torch.randn(3, 5, 8)
    padding = torch.arange(5) >= torch.tensor([5, 4, 2])[:, None]
    with observe(attention) as seen:
        _, weights = attention(x, x, x, key_padding_mask=padding, average_attn_weights=False)
    weights = weights.detach().masked_fill(padding[:, None, :, None], 0)  # rows of padding are not kept
    assert seen.weights("encoder", 0) == pytest.approx(weights.numpy(), abs=1e-6)
    assert [len(example.source.pieces) for example in seen.record().examples] == [5, 4, 2]
    assert attention.observer is None


def test_the_drop_in_is_observed_inside_of_torchs_layers():
    def swap(module):
        for name, child in module.named_children():
            if isinstance(child, nn.MultiheadAttention):
                setattr(module, name, MultiheadAttention(8, 2, batch_first=True, variant="relu-seqlen"))
            else:
                swap(child)
        return module

    model = swap(nn.Transformer(8, 2, 2, 2, 16, batch_first=True)).eval()
    with observe(model) as seen, torch.no_grad():
        model(torch.randn(2, 6, 8), torch.randn(2, 4, 8))
    shapes = {(kind, layer): seen.weights(kind, layer).shape[2:] for kind, layer in seen.passes[0]}
    sizes = {"encoder": (6, 6), "decoder": (4, 4), "cross": (4, 6)}
    assert shapes == {(kind, layer): size for kind, size in sizes.items() for layer in range(2)}
    assert len(seen.record().examples[0].sites) == 6
    lengths = torch.tensor([6, 3])
    padding = torch.arange(6) >= lengths[:, None]
    with observe(model) as seen:  # without gradients the encoder would make nested tensors of its padding
        masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
        model(torch.randn(2, 6, 8), torch.randn(2, 4, 8), **masks)
    assert [len(example.source.pieces) for example in seen.record().examples] == lengths.tolist()
    alone = swap(nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 1))
    with observe(alone) as seen:
        alone(torch.randn(2, 4, 8), torch.randn(2, 6, 8))
    assert set(seen.passes[0]) == {("decoder", 0), ("cross", 0)}
    to_json(seen.record())


def test_what_was_seen_says_so_and_is_saved(tmp_path):
    attention = RectifiedAttention(8, 2, "rela")
    with observe(attention) as seen:
        assert "nothing yet; call it inside" in repr(seen)
        attention(torch.randn(3, 5, 8), causal=True)
        attention(torch.randn(1, 4, 8))
    first, line, _ = repr(seen).splitlines()
    assert first == "Seen of RectifiedAttention; calls: 2, sequences: 4"
    zeros = 1 - sum((seen.weights("encoder", 0, call) > 0).sum() for call in range(2)) / (3 * 2 * 15 + 2 * 16)
    assert line.startswith(f"  encoder layer 0, 2 heads, rela: {zeros:.1%} zeros, ")
    tokens = [list("abcde")] * 3 + [list("abcd")]
    seen.save(tmp_path / "seen.json.gz", tokens)
    assert to_json(read_record(tmp_path / "seen.json.gz")) == to_json(seen.record(tokens))


def test_a_notebook_shows_the_report_in_a_frame_of_its_own():
    from rectiformer.analyze.html_report import report_html

    attention = RectifiedAttention(8, 2)
    with observe(attention) as seen:
        attention(torch.randn(1, 3, 8))
    shown = seen.show(source=[["<b>", '"x"', "</iframe>"]])._repr_html_()
    assert shown.startswith('<iframe sandbox="allow-scripts allow-downloads"')
    assert shown.count("<") == 2
    page = html.unescape(shown[shown.index('srcdoc="') + 8 : shown.rindex('"')])
    assert page == report_html([seen.record(source=[["<b>", '"x"', "</iframe>"]])])
