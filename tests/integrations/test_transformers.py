"""Hugging Face models with rectified attention: masks that hold, caches that agree, formulas that are computed."""

from functools import partial

import pytest
import torch
from integrations.small_models import CONFIGS, DECODERS, WORDS, build, draw_ids, outputs, pad, positions_of
from torch.testing import assert_close
from transformers import AttentionInterface, DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from rectiformer.integrations.transformers import STANDARD, attend, register

register("our-softmax", "softmax")


def assert_padding_is_not_seen(model, side):
    long, short = draw_ids(11), draw_ids(6)
    padded, real = pad(short, 11, side)
    ids = torch.stack([long, padded])
    together = outputs(model, ids, torch.stack([torch.ones_like(real), real]))
    if model.config.is_encoder_decoder:
        alone = model(input_ids=short[None], decoder_input_ids=long[None, :5]).logits[0]
        assert_close(together[1], alone)
    else:
        assert_close(together[0], outputs(model, long[None])[0])
        assert_close(together[1][real.bool()], outputs(model, short[None])[0])


@pytest.mark.parametrize("name", STANDARD)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2", "bert", "t5"])
@torch.no_grad()
def test_padding_is_not_seen(kind, side, name):
    assert_padding_is_not_seen(build(kind, name), side)


@pytest.mark.parametrize("name", STANDARD)
@torch.no_grad()
def test_padding_of_the_source_is_not_seen(name):
    """On the right only: the encoder of Marian numbers its positions from the first slot on, whatever it holds."""
    assert_padding_is_not_seen(build("marian", name), "right")


@pytest.mark.parametrize("kind", ["llama", "bert", "marian"])
@torch.no_grad()
def test_without_our_mask_function_padding_would_be_seen(kind):
    AttentionInterface.register("maskless", partial(attend, variant="relu-seqlen", options={}))
    with pytest.raises(AssertionError, match="not close"):
        assert_padding_is_not_seen(build(kind, "maskless"), "right" if kind != "llama" else "left")


@pytest.mark.parametrize("kind", [*DECODERS, "marian"])
@torch.no_grad()
def test_later_tokens_change_nothing_before(kind):
    model, ids = build(kind), draw_ids(2, 9)
    changed = ids.clone()
    changed[:, 6:] = draw_ids(2, 3)
    keyword = "decoder_input_ids" if kind == "marian" else "input_ids"
    given = {"input_ids": draw_ids(2, 9)} if kind == "marian" else {}
    before, after = (model(**{**given, keyword: those}).logits for those in (ids, changed))
    assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


@torch.no_grad()
def test_a_window_hides_what_is_farther_back():
    """Two layers of window 4 reach back six positions, not seven."""
    model, ids = build("mistral"), draw_ids(1, 12)
    changed = ids.clone()
    changed[:, 2] = (ids[:, 2] + 1 - 4) % (WORDS - 4) + 4
    before, after = model(ids).logits, model(changed).logits
    differs = [not torch.allclose(a, b) for a, b in zip(before[0], after[0], strict=True)]
    assert differs == [2 <= position <= 8 for position in range(12)]


@torch.no_grad()
def test_packed_sequences_do_not_see_each_other():
    model, first, second = build("llama"), draw_ids(1, 5), draw_ids(1, 4)
    positions = torch.cat([torch.arange(5), torch.arange(4)])[None]
    packed = model(torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits
    assert_close(packed, torch.cat([model(first).logits, model(second).logits], 1))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", [*DECODERS, "gemma3"])
def test_caches_change_no_generated_token(kind, padded):
    model, ids, real = build(kind), draw_ids(2, 7), torch.ones(2, 7, dtype=torch.long)
    if padded:
        real[1, :3] = 0
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "return_dict_in_generate": True, "output_logits": True}
    caches = [{"use_cache": False}, {"use_cache": True}, {"cache_implementation": "static"}]
    plain, *cached = (
        model.generate(ids, attention_mask=real, do_sample=False, **settings, **cache) for cache in caches
    )
    for result in cached:
        assert torch.equal(result.sequences, plain.sequences)
        assert_close(torch.stack(result.logits), torch.stack(plain.logits))


@pytest.mark.parametrize("name", STANDARD)
@torch.no_grad()
def test_a_prompt_read_in_parts_gives_the_same_logits(name):
    for kind in ("llama", "mistral"):
        model, ids = build(kind, name), draw_ids(2, 12)
        cache = DynamicCache(config=model.config)
        parts = [model(part, past_key_values=cache).logits for part in ids.split([5, 6, 1], 1)]
        assert_close(torch.cat(parts, 1), model(ids).logits)


def test_beams_do_not_depend_on_cache_or_batch():
    model, long, short = build("marian"), draw_ids(9), draw_ids(5)
    padded, real = pad(short, 9, "right")
    settings = {"num_beams": 3, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    batch = {"input_ids": torch.stack([long, padded]), "attention_mask": torch.stack([torch.ones(9).long(), real])}
    cached = model.generate(**batch, **settings)
    assert torch.equal(cached, model.generate(**batch, **settings, use_cache=False))
    assert torch.equal(cached[1], model.generate(short[None], **settings)[0])


def record(model, kind, layer):
    """Hook the layer's projections: what they give as q, k, v and what the output projection is given."""
    if kind == "gpt2":
        block = model.transformer.h[layer].attn
        sources, output = {"qkv": block.c_attn}, block.c_proj
    elif kind in ("llama", "mistral"):
        block = model.model.layers[layer].self_attn
        sources, output = {"q": block.q_proj, "k": block.k_proj, "v": block.v_proj}, block.o_proj
    elif kind == "bert":
        block = model.encoder.layer[layer].attention
        inner = block.self
        sources, output = {"q": inner.query, "k": inner.key, "v": inner.value}, block.output.dense
    else:
        block = model.model.decoder.layers[layer].encoder_attn
        sources, output = {"q": block.q_proj, "k": block.k_proj, "v": block.v_proj}, block.out_proj
    seen = {}
    for name, source in sources.items():
        source.register_forward_hook(lambda module, given, out, name=name: seen.update({name: out}))
    output.register_forward_pre_hook(lambda module, given: seen.update(z=given[0]))
    return seen


def split_heads(tensor):
    return tensor.unflatten(-1, (-1, 8)).transpose(1, 2)


def plain_attention(q, k, v, visible, name):
    """The formulas of the three names, one line each."""
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    n = visible.sum(-1, keepdim=True).clamp_min(1)
    scale = {"rectified": 1 / n, "rectified-sqrt": (2 / n).sqrt(), "rela": 1}[name]
    z = ((q @ k.mT / 8**0.5).relu() * visible * scale @ v).transpose(1, 2).flatten(2)
    return z / (z.square().mean(-1, keepdim=True) + 1e-8).sqrt() if name == "rela" else z


@pytest.mark.parametrize("name", STANDARD)
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2", "bert", "marian"])
@torch.no_grad()
def test_a_layer_computes_the_plain_formula(kind, name):
    model, ids, real = build(kind, name), draw_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    real[1, 6:] = 0
    seen = record(model, kind, layer=1)
    outputs(model, ids, real)
    q, k, v = map(split_heads, seen["qkv"].chunk(3, -1) if kind == "gpt2" else (seen["q"], seen["k"], seen["v"]))
    if kind in ("llama", "mistral"):
        q, k = apply_rotary_pos_emb(q, k, *model.model.rotary_emb(q, positions_of(real)))
    visible = real[:, None, None].bool().expand(2, 1, q.shape[2], 9)
    if kind in DECODERS:
        visible = visible.tril()
    if kind == "mistral":
        visible = visible.triu(-3)
    assert_close(seen["z"], plain_attention(q, k, v, visible, name))


def outputs_by_name(kind, names, given, real=None):
    """Outputs of one model, with the same weights, for each attention."""
    found = {}
    for name in names:
        torch.manual_seed(1)
        model = build(kind, name)
        found[name] = model(given).logits if kind == "vit" else outputs(model, given, real)
    return found


@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_the_attention_is_really_another(kind):
    given = torch.randn(2, 3, 12, 12, dtype=torch.float64) if kind == "vit" else draw_ids(2, 9)
    found = outputs_by_name(kind, [*STANDARD, "sdpa"], given)
    for name in STANDARD:
        assert not torch.allclose(found[name], found["sdpa"], rtol=1e-2), name
    assert not torch.allclose(found["rectified"], found["rela"], rtol=1e-2)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("kind", sorted(CONFIGS.keys() - {"vit"}))
@torch.no_grad()
def test_softmax_through_our_functions_is_that_of_transformers(kind, side):
    """Masks, scales, biases and heads arrive as the model means them: only the weights are ours."""
    ids, real = draw_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    if side != "none":
        real[1] = torch.arange(9) >= 4 if side == "left" else torch.arange(9) < 5
    found = outputs_by_name(kind, ["our-softmax", "sdpa"], ids, real)
    kept = slice(None) if kind in ("marian", "t5") else real.bool()
    assert_close(found["our-softmax"][kept], found["sdpa"][kept])
