"""Hugging Face models with rectified attention: masks that hold, caches that agree, gradients that flow."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from closeness import peak_allocation
from torch import nn
from torch.testing import assert_close
from transformers import (
    AttentionInterface,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BloomConfig,
    DynamicCache,
    Gemma2Config,
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
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from rectiformer import attention
from rectiformer.errors import ArgumentError
from rectiformer.integrations.transformers import STANDARD, Band, attend, mask, register

register()
register("our-softmax", "softmax")

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


def train(model, draw_batch, steps, lr):
    """The loss of each step, and the largest gradient of each query projection in the first one."""
    queries = [p for path, p in model.named_parameters() if path.endswith(("q_proj.weight", "query.weight"))]
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses, largest = [], []
    for _ in range(steps):
        loss = model(**draw_batch()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        largest = largest or [p.grad.abs().max().item() for p in queries]
    return losses, largest


def draw_recall():
    """Sequences whose last token repeats the first of eight words: guessing costs log 8, attending nothing."""
    ids = torch.randint(4, 12, (32, 6))
    ids[:, -1] = ids[:, 0]
    return {"input_ids": ids, "labels": torch.where(torch.arange(6) == 5, ids, -100)}


@pytest.mark.parametrize("name", STANDARD)
def test_a_decoder_learns_to_attend(name):
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"](), attn_implementation=name).train()
    losses, largest = train(model, draw_recall, steps=80, lr=1e-2)
    assert all(largest)
    assert losses[-1] < math.log(8) / 4


def test_a_swap_raises_the_loss_of_a_softmax_model_and_fine_tuning_lowers_it_again():
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"](), attn_implementation="sdpa").train()
    before = train(model, draw_recall, steps=60, lr=1e-2)[0][-1]
    model.set_attn_implementation("rectified")
    losses, _ = train(model, draw_recall, steps=60, lr=3e-3)
    assert losses[0] > 2 * before
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("name", ["rectified", "rela"])
@pytest.mark.parametrize("kind", ["vit", "marian"])
def test_encoders_and_encoder_decoders_fit_a_batch(kind, name):
    ids, images = draw_ids(4, 8), torch.randn(4, 3, 12, 12)
    batch = {"pixel_values": images, "labels": ids[:, 0] % 2} if kind == "vit" else {"input_ids": ids, "labels": ids}
    model = KINDS[kind].from_config(CONFIGS[kind](), attn_implementation=name).train()
    losses, largest = train(model, lambda: batch, steps=60, lr=5e-3)
    assert all(largest)
    assert losses[-1] < losses[0] / 2


def gradients(model, ids, real):
    model.zero_grad()
    model(input_ids=ids, attention_mask=real, labels=ids).loss.backward()
    return {path: p.grad.clone() for path, p in model.named_parameters() if p.grad is not None}


def test_gradient_checkpointing_gives_the_same_gradients():
    model, ids, real = build("mistral").train(), draw_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    real[1, 6:] = 0
    plain = gradients(model, ids, real)
    model.gradient_checkpointing_enable()
    checkpointed = gradients(model, ids, real)
    assert plain.keys() == checkpointed.keys()
    for path, gradient in plain.items():
        assert_close(checkpointed[path], gradient)


@torch.no_grad()
def test_a_saved_model_is_loaded_with_the_same_attention(tmp_path):
    model, ids = build("llama", "rela", torch.float32), draw_ids(2, 9)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="rela")
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_a_forward_compiles_to_one_graph(padded):
    torch._dynamo.reset()
    model, ids, real = build("mistral", "rela"), draw_ids(2, 9), torch.ones(2, 9, dtype=torch.long) if padded else None
    if padded:
        real[1, 6:] = 0
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    keep = slice(None) if real is None else real.bool()
    given = {"attention_mask": real, "use_cache": False}
    assert_close(compiled(ids, **given).logits[keep], model(ids, **given).logits[keep])


@torch.no_grad()
def test_autocast_computes_in_its_dtype():
    q, k, v = (torch.randn(2, 4, 5, 8) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        mixed, _ = attend(nn.Module(), q, k, v.bfloat16(), None, variant="rela", options={})
    half, _ = attend(nn.Module(), q.bfloat16(), k.bfloat16(), v.bfloat16(), None, variant="rela", options={})
    assert mixed.dtype == torch.bfloat16
    assert torch.equal(mixed, half)


def test_dropout_drops_weights():
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    torch.manual_seed(3)
    z, _ = attend(nn.Module(), q, k, v, Band(True), dropout=0.5, variant="relu-seqlen", options={})
    torch.manual_seed(3)
    assert_close(z, attention(q, k, v, "relu-seqlen", causal=True, dropout=0.5).transpose(1, 2))
    assert not torch.allclose(z, attention(q, k, v, "relu-seqlen", causal=True).transpose(1, 2))


@pytest.mark.parametrize(
    ("queries", "arguments", "seen"),
    [
        (1, {}, [[0, 1, 2, 3]]),
        (3, {}, [[0], [0, 1], [0, 1, 2]]),
        (3, {"is_causal": False}, [[0, 1, 2, 3]] * 3),
        (4, {"sliding_window": 2}, [[0], [0, 1], [1, 2], [2, 3]]),
    ],
    ids=["one query", "empty slots", "not causal", "window"],
)
def test_without_a_mask_keys_are_seen_as_sdpa_sees_them(queries, arguments, seen):
    keys = torch.ones(1, 1, 4, 1)
    z, _ = attend(
        nn.Module(), keys[:, :, :queries], keys, torch.eye(4)[None, None], None, variant="rela", options={}, **arguments
    )
    assert [row.nonzero().flatten().tolist() for row in z[0, :, 0]] == seen


PADDING = {
    "none": lambda real: None,
    "full": lambda real: real,
    "left": lambda real: real.index_put((torch.tensor([1, 1]), torch.tensor([0, 1])), torch.tensor(False)),
    "right": lambda real: real.index_put((torch.tensor([1, 1]), torch.tensor([-1, -2])), torch.tensor(False)),
    "within": lambda real: real.index_put((torch.tensor([0, 1]), torch.tensor([3, 2])), torch.tensor(False)),
}
PATTERNS = {
    "causal": (causal_mask_function, None, True),
    "window": (sliding_window_causal_mask_function(3), 3, True),
    "full": (bidirectional_mask_function, None, False),
    "window to both sides": (sliding_window_bidirectional_mask_function(3), 3, False),
}


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("queries", "first", "offset"), [(7, 0, 0), (3, 4, 0), (1, 6, 0), (3, 6, 2), (1, 6, 4)])
def test_each_row_sees_and_counts_what_the_matrix_of_transformers_says(pattern, padding, queries, first, offset):
    """Scores of 1 and values that name their key make weights of the output: 1 / n where seen, 0 elsewhere."""
    function, local_size, causal = PATTERNS[pattern]
    keys = queries + first - offset
    arguments = {
        "batch_size": 2,
        "q_length": queries,
        "kv_length": keys,
        "q_offset": first,
        "kv_offset": offset,
        "mask_function": function,
        "attention_mask": PADDING[padding](torch.ones(2, offset + keys, dtype=torch.bool)),
        "local_size": local_size,
    }
    matrix = sdpa_mask(**arguments, allow_is_causal_skip=False)[:, 0]
    ours = mask(**arguments, allow_is_causal_skip=causal, allow_is_bidirectional_skip=not causal)
    assert ours is None or isinstance(ours, Band), "a known pattern needs no matrix"
    module = nn.Module()
    module.is_causal = causal
    ones, names = torch.ones(2, 1, keys, 1), torch.eye(keys).expand(2, 1, keys, keys)
    z, _ = attend(module, ones[:, :, :queries], ones, names, ours, scaling=1.0, variant="relu-seqlen", options={})
    assert_close(z[:, :, 0], matrix / matrix.sum(-1, keepdim=True).clamp_min(1))


@pytest.mark.parametrize(
    "unusual",
    [
        {"local_size": 3, "config": SimpleNamespace(attention_chunk_size=3)},
        {"allow_is_causal_skip": False},
        {"kv_length": 9, "q_offset": torch.tensor(2)},
        {"kv_length": 9, "q_offset": 2},
        {"attention_mask": torch.ones(2, 3, dtype=torch.bool)},
    ],
    ids=["chunks", "overlays", "static cache", "empty slots", "short padding mask"],
)
def test_other_patterns_are_the_matrix_of_transformers(unusual):
    arguments = {"batch_size": 2, "q_length": 5, "kv_length": 5, **unusual}
    assert torch.equal(mask(**arguments), sdpa_mask(**{**arguments, "allow_is_causal_skip": False}))


@torch.no_grad()
def test_long_windows_and_padding_cost_no_matrix():
    model = AutoModelForCausalLM.from_config(MistralConfig(**LM, sliding_window=64), attn_implementation="rectified")
    ids, real = draw_ids(1, 4096), torch.ones(1, 4096, dtype=torch.long)
    real[0, 3000:] = 0
    body = {"attention_mask": real, "use_cache": False}
    ours = peak_allocation(lambda: model.model(ids, **body))
    model.set_attn_implementation("sdpa")
    assert ours < 4096 * 4096 < peak_allocation(lambda: model.model(ids, **body))


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min, -1e9, -9984])  # -1e4 in bfloat16
def test_an_additive_mask_hides_by_its_lowest_numbers_and_adds_the_others(hidden):
    q, k, v, bias = (torch.randn(2, 4, 5, 8, dtype=torch.float64) for _ in range(4))
    visible, added = torch.rand(2, 1, 5, 5) > 0.3, torch.randn(2, 1, 5, 5, dtype=torch.float64)
    position_bias = bias[..., :5].clone().requires_grad_()
    given = torch.where(visible, added, hidden)
    z, _ = attend(
        nn.Module(), q, k, v, given, position_bias=position_bias, scaling=0.5, variant="relu-seqlen", options={}
    )
    n = visible.sum(-1, keepdim=True).clamp_min(1)
    weights = torch.where(visible, (q @ k.mT * 0.5 + added + position_bias).relu() / n, 0)
    assert_close(z, (weights @ v).transpose(1, 2))
    (gradient,) = torch.autograd.grad(z.sum(), position_bias)
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0


def test_softcaps_sinks_and_the_like_are_refused():
    model = AutoModelForCausalLM.from_config(Gemma2Config(**LM), attn_implementation="rectified")
    with pytest.raises(ArgumentError, match="Gemma2Attention passes softcap, which attention 'relu-seqlen' cannot"):
        model(draw_ids(1, 4))
    q = torch.randn(1, 1, 2, 4)
    for name in ("s_aux", "head_mask", "indices", "block_indices", "cu_seq_lens_q"):
        with pytest.raises(ArgumentError, match=f"Module passes {name}"):
            attend(nn.Module(), q, q, q, None, variant="rela", options={}, **{name: torch.ones(1)})
    with pytest.raises(ArgumentError, match="output_attentions"):
        build("llama")(draw_ids(1, 4), output_attentions=True)
    with pytest.raises(ArgumentError, match=r"attention_mask \[1, 1, 2, 2\] holds torch.int64; make it boolean"):
        attend(nn.Module(), q, q, q, torch.ones(1, 1, 2, 2, dtype=torch.long), variant="rela", options={})


def test_a_model_that_would_stay_with_its_softmax_fails_at_its_mask():
    model = AutoModelForCausalLM.from_config(BloomConfig(**SPECIAL, hidden_size=32), attn_implementation="rectified")
    with pytest.raises(TypeError, match="'Tensor' and 'Band'"):
        model(draw_ids(1, 4))


def test_registering_twice_changes_nothing_and_options_reach_the_weights():
    before = AttentionInterface()["rela"]
    register()
    register("halved", "reluformer", gamma=2.0)
    register("halved", "reluformer", gamma=2.0)
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    z, twice = (AttentionInterface()[name](nn.Module(), q, k, v, None)[0] for name in ("rectified-sqrt", "halved"))
    assert_close(z, 2 * twice)
    assert_close(AttentionInterface()["rela"](nn.Module(), q, k, v, None), before(nn.Module(), q, k, v, None))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "sdpa", "variant": "rela"}, "name 'sdpa' is taken"),
        ({"name": "eager", "variant": "rela"}, "name 'eager' is taken"),
        ({"name": "rectified", "exponent": 0.5}, "name 'rectified' is taken"),
        ({"name": "mine"}, "name 'mine' is none of rectified, rectified-sqrt, rela"),
        ({"name": "mine", "variant": "reluforme"}, "did you mean 'reluformer'"),
        ({"name": "mine", "variant": "rela-g"}, "variant 'rela-g' learns its output norm"),
        ({"name": "mine", "variant": "relu2", "gamma": 1.0}, "gamma"),
        ({"variant": "relu2"}, "needs a name"),
    ],
)
def test_senseless_registrations_are_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        register(**arguments)
    assert "mine" not in AttentionInterface()
