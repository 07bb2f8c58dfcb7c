"""RectifiedAttention: the papers' formulas written out, and what must hold for every row of VARIANTS alike."""

import math

import pytest
import torch
from model.built_attention import HEAD, HEADS, WIDTH, assert_same, build, fix_scores, tokens, watch

import rectiformer
from rectiformer import VARIANTS, KeyValueCache, RectifiedAttention, attention_weights
from rectiformer.errors import RectiformerError
from rectiformer.model import attention as attention_module

RECTIFIED = [name for name, row in VARIANTS.items() if row.rectified]
NORMED = [name for name, row in VARIANTS.items() if row.rectified and row.output_norm != "none"]
WEIGHED = [name for name, row in VARIANTS.items() if row.has_weights]
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def plain_forward(module, x):
    """Causal self-attention as the papers write it: softmax, rela-g or reluformer."""
    fused = x @ module.input_weight.T + module.input_bias
    q, k, v = fused.unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
    scores = (q / math.sqrt(HEAD)) @ k.mT
    hidden = torch.full_like(scores, -math.inf).triu(1)
    weights = (scores + hidden).softmax(-1) if module.variant == "softmax" else scores.relu().tril()
    if module.variant == "reluformer":
        visible = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        weights = weights / (module.learned.raw.exp()[:, None, None] * (visible / 2).sqrt())
    z = (weights @ v).transpose(1, 2).flatten(2)
    if module.variant == "rela-g":
        normed = module.norm.gain * z / (z.square().mean(-1, keepdim=True) + 1e-8).sqrt()
        z = torch.sigmoid(module.norm.gate * z) * normed
    return z @ module.output.weight.T + module.output.bias


@pytest.mark.parametrize("variant", ["softmax", "rela-g", "reluformer"])
def test_output_and_gradients_follow_the_papers(variant):
    module, x = build(variant), tokens(2, 9).requires_grad_()
    out, expected = module(x, causal=True), plain_forward(module, x)
    assert_same(out, expected)
    probe, parts = torch.randn_like(out), [x, *module.parameters()]
    grads, exact = (torch.autograd.grad(result, parts, probe) for result in (out, expected))
    for grad, expected_grad in zip(grads, exact, strict=True):
        assert_same(grad, expected_grad)


@pytest.mark.parametrize("score", [-1.0, 0.0], ids=["negative", "zero"])
@pytest.mark.parametrize("variant", RECTIFIED)
def test_without_a_positive_score_the_output_is_the_output_bias(variant, score):
    module, x = build(variant, dtype=torch.float32), tokens(2, 5, dtype=torch.float32)
    fix_scores(module, [score] * HEADS)
    assert torch.equal(module(x), module.output.bias.expand(2, 5, WIDTH))


@pytest.mark.parametrize("variant", RECTIFIED)
def test_a_null_head_leaves_its_slice_at_zero(variant):
    module, x = build(variant), tokens(2, 5)
    fix_scores(module, [1.0, -1.0, 1.0, 1.0])
    _, seen, normed = watch(module, x)
    for slices in (seen.output, normed):
        assert (slices[:, 1] == 0).all()
        assert (slices[:, [0, 2, 3]] != 0).all()
    if variant == "rela":  # the others share the mean square of the whole width
        mean_square = (normed / module.norm.gain.view(HEADS, 1, HEAD)).square().mean((1, 3))
        assert_same(mean_square, 1 - 1e-8 / (seen.output.square().mean((1, 3)) + 1e-8))


@pytest.mark.parametrize("variant", NORMED)
def test_the_norm_spans_all_heads(variant):
    module, x = build(variant), tokens(2, 5)
    fix_scores(module, [1.0] * HEADS)  # so that head 0 is never null
    _, before, normed_before = watch(module, x)
    with torch.no_grad():
        for part in (module.input_weight, module.input_bias):
            part[2 * WIDTH : 2 * WIDTH + HEAD] *= 3  # the values of head 0
    _, after, normed_after = watch(module, x)
    assert torch.equal(after.output[:, 1:], before.output[:, 1:])
    ratio = (before.output.square().mean((1, 3)) + 1e-8) / (after.output.square().mean((1, 3)) + 1e-8)
    assert ratio.max() < 1
    assert_same(normed_after[:, 1:], normed_before[:, 1:] * ratio.sqrt()[:, None, :, None])


@pytest.mark.parametrize("variant", NORMED)
def test_only_the_gate_sees_the_scale_of_the_weights(variant):
    module, x = build(variant), tokens(2, 5)
    out, before, _ = watch(module, x)
    with torch.no_grad():
        module.input_weight[:WIDTH] *= 3  # scores, and so weights, are linear in the queries
        module.input_bias[:WIDTH] *= 3
    scaled, after, _ = watch(module, x)
    assert_same(after.weights(), 3 * before.weights())
    # 1 / sqrt(s + epsilon) is 1 / sqrt(s) up to epsilon / (2 s), for all that the output projection then adds up.
    lengths = module.output.weight.norm(dim=-1) * module.norm.gain.abs().max() * math.sqrt(WIDTH)
    bound = lengths.max().item() * 1e-8 / before.output.square().mean((1, 3)).min().item()
    difference = (scaled - out).abs().max().item()
    assert difference > 1000 * bound if variant == "rela-g" else difference <= bound


@every_variant
@pytest.mark.parametrize("filler", [1e3, math.nan], ids=["large", "nan"])
def test_padding_never_leaks(variant, filler):
    module, context, x = build(variant, cross=True), tokens(2, 7), tokens(2, 4)
    padded = torch.cat([context, torch.full((2, 3, WIDTH), filler, dtype=context.dtype)], 1)
    padded[1, 5:] = filler
    lengths = torch.tensor([7, 5])
    expected = torch.stack([module(x[b : b + 1], context[b : b + 1, :n])[0] for b, n in enumerate(lengths)])
    assert_same(module(x, padded, key_lengths=lengths), expected)


@every_variant
@pytest.mark.parametrize("chunks", [[1] * 20, [3, 1, 7, 9], [17, 3]], ids=["one-by-one", "uneven", "grown-at-once"])
def test_decoding_with_a_cache_equals_the_full_pass(variant, chunks):
    module, x, cache = build(variant, num_kv_heads=2), tokens(2, 20), KeyValueCache()
    with torch.no_grad():
        steps = [module(chunk, causal=True, cache=cache) for chunk in x.split(chunks, 1)]
        assert_same(torch.cat(steps, 1), module(x, causal=True))
    assert cache.length == 20


@every_variant
def test_cross_attention_reads_a_cache_filled_once(variant):
    module, context, x, cache = build(variant, cross=True), tokens(2, 6), tokens(2, 5), KeyValueCache()
    call = {"key_lengths": torch.tensor([6, 4])}
    contexts = [context, *[torch.full_like(context, math.nan)] * 4]  # after the first nobody looks at it
    with torch.no_grad():
        steps = [module(*step, **call, cache=cache) for step in zip(x.split(1, 1), contexts, strict=True)]
        assert_same(torch.cat(steps, 1), module(x, context, **call))
    assert cache.length == 6


def test_a_cache_doubles_its_room():
    k, v, cache, capacities = torch.randn(2, 3, 100, 4), torch.randn(2, 3, 100, 5), KeyValueCache(), []
    for n in range(100):
        keys, values = cache.append(k[:, :, n : n + 1], v[:, :, n : n + 1])
        assert torch.equal(keys, k[:, :, : n + 1])
        assert torch.equal(values, v[:, :, : n + 1])
        capacities.append(keys.untyped_storage().nbytes() // (2 * 3 * 4 * 4))
    assert sorted(set(capacities)) == [16, 32, 64, 128]


@every_variant
def test_beams_can_be_reordered(variant):
    module, start, rest, cache = build(variant), tokens(2, 3), tokens(3, 2), KeyValueCache()
    parents = torch.tensor([1, 1, 0])
    with torch.no_grad():
        cache.reorder(parents)  # nothing is held yet
        module(start, causal=True, cache=cache)
        cache.reorder(parents)
        out = module(rest, causal=True, cache=cache)
        assert_same(out, module(torch.cat([start[parents], rest], 1), causal=True)[:, 3:])


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_initial_matrices_are_those_of_the_authors(cross):
    module = RectifiedAttention(512, 8, cross=cross)
    limit = math.sqrt(3 / (512 if cross else 1024))
    parts = [(part, limit) for part in module.input_weight.chunk(3)]
    for matrix, limit in [*parts, (module.output.weight, math.sqrt(3 / 512))]:
        size, deviation = matrix.numel(), limit / math.sqrt(3)
        assert 0.999 * limit < matrix.abs().max() <= limit  # 0.999 to the power of 262,144 is 0
        assert abs(matrix.mean().item()) < 5 * deviation / math.sqrt(size)  # five standard errors
        spread = math.sqrt((1.8 - 1) / (4 * size))  # of a sample deviation; 1.8 is the kurtosis of a uniform
        assert matrix.std().item() == pytest.approx(deviation, rel=5 * spread)
    assert module.input_bias.count_nonzero() == module.output.bias.count_nonzero() == 0


def test_bias_false_leaves_no_bias():
    names = dict(RectifiedAttention(WIDTH, HEADS, "softmax", bias=False).named_parameters()).keys()
    assert names == {"input_weight", "output.weight"}


@every_variant
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_grouped_heads_equal_repeated_ones(variant, num_kv_heads):
    grouped, full, x = build(variant, num_kv_heads=num_kv_heads), build(variant), tokens(2, 5)
    assert grouped.input_weight.shape == (WIDTH + 2 * num_kv_heads * HEAD, WIDTH)
    with torch.no_grad():
        for few, many in ((grouped.input_weight, full.input_weight), (grouped.input_bias, full.input_bias)):
            q, k, v = few.split(grouped.qkv_sizes)
            k, v = (part.unflatten(0, (num_kv_heads, HEAD)) for part in (k, v))
            k, v = (part.repeat_interleave(HEADS // num_kv_heads, 0).flatten(0, 1) for part in (k, v))
            many.copy_(torch.cat([q, k, v]))
    shared = {name: part for name, part in grouped.state_dict().items() if not name.startswith("input")}
    full.load_state_dict(shared, strict=False)
    assert_same(grouped(x, causal=True), full(x, causal=True))


@pytest.mark.parametrize("variant", WEIGHED)
def test_observed_weights_mix_the_values(variant):
    module, x = build(variant, dropout=0.5).eval(), tokens(2, 6)
    call = {
        "causal": True,
        "key_lengths": torch.tensor([6, 4]),
        "attn_bias": torch.randn(6, 6).double(),
        "window_size": 3,
    }
    call["attn_mask"] = torch.rand(2, 1, 6, 6) > 0.2
    _, seen, _ = watch(module, x, **call)
    q, k, v = module.project(x, None, None)
    options = module.options if module.learned is None else module.learned.values()
    q = q * module.learned()[:, None, None] if module.scales_scores else q  # they were divided by it in advance
    weights = attention_weights(q, k, variant, **call, **options)
    assert_same(seen.weights(), weights)
    assert torch.equal(seen.weights() != 0, weights != 0)
    assert torch.equal(seen.weights(sparse=True).to_dense().view_as(weights), seen.weights())
    assert_same(seen.output, weights @ v)
    assert torch.equal(seen.stats().nonzero, (weights != 0).sum(-1))
    assert_same(seen.stats().mass, weights.float().sum(-1))
    assert torch.equal(watch(module.train(), x)[1].weights(), watch(module.eval(), x)[1].weights())  # before dropout


@every_variant
def test_observation_is_lazy_and_harmless(variant, monkeypatch):
    module, x, asked = build(variant, dropout=0.3).train(), tokens(2, 5), []
    for name in ("attention_weights", "attention_stats"):
        monkeypatch.setattr(attention_module, name, lambda *_, name=name, **__: asked.append(name))
    outputs = []
    for observer in (None, lambda _: None, lambda seen: (seen.weights(), seen.stats(), repr(seen))):
        assert asked == []
        module.observer = observer
        torch.manual_seed(1)
        outputs.append(module(x, causal=True))
    assert asked == ["attention_weights", "attention_stats"]
    assert torch.equal(outputs[1], outputs[0])
    assert torch.equal(outputs[2], outputs[0])


@every_variant
def test_dropout_is_for_training_and_follows_the_seed(variant):
    module, x = build(variant, dropout=0.5), tokens(2, 8)
    without = build(variant)
    without.load_state_dict(module.state_dict())
    assert torch.equal(module.eval()(x), without.train()(x))

    def train(seed):
        torch.manual_seed(seed)
        out = module.train()(x)
        return out, *torch.autograd.grad(out.square().sum(), tuple(module.parameters()))

    first, again, other = train(1), train(1), train(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.allclose(first[0], other[0])
    assert not torch.allclose(first[0], without(x))


@pytest.mark.parametrize("n", [32, 128, 512])
def test_reluformer_starts_with_unit_variance(n):
    B, H, D, N = 128, 4, 32, n + 8
    q, k, v, lengths = torch.randn(B, H, 1, D), torch.randn(B, H, N, D), torch.randn(B, H, N, 8), torch.full((B,), n)
    out = rectiformer.attention(q, k, v, "reluformer", key_lengths=lengths)
    stats = rectiformer.attention_stats(q, k, "reluformer", key_lengths=lengths)
    # Normal queries are not all of length sqrt(D): their mean length is shorter by this factor.
    shorter = math.sqrt(2 / D) * math.exp(math.lgamma((D + 1) / 2) - math.lgamma(D / 2))
    for measured, expected, bias in (
        (out.square().mean(-1), 1.0, 0.0),
        (stats.mass, math.sqrt(n / math.pi) * shorter, 0.0),
        # 0.9769, or section 2.2's 0.975, is the limit for many keys; what is neglected is of the order 1 / n.
        (stats.entropy, math.log(n) - (math.log(4 * math.pi) - 0.57722) / 2, 1 / n),
    ):
        error = measured.std().item() / math.sqrt(B * H)  # rows share no key, so they are independent
        assert abs(measured.mean().item() - expected) < 5 * error + bias


@every_variant
def test_bfloat16_is_finite(variant):
    module, x = build(variant, dtype=torch.bfloat16), tokens(2, 20, dtype=torch.bfloat16).requires_grad_()
    out = module(x, causal=True, key_lengths=torch.tensor([20, 3]))
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert all(tensor.isfinite().all() for tensor in (out, x.grad, *(part.grad for part in module.parameters())))


# Seconds, for it compiles. `aot_eager` traces both passes as the default backend does, but builds no C++.
@pytest.mark.parametrize("variant", ["rela-g", "reluformer", "entmax15"])
def test_compiles_as_one_graph(variant):
    torch._dynamo.reset()
    module, x = build(variant), tokens(2, 6).requires_grad_()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    results = [run(x, causal=True, key_lengths=torch.tensor([6, 4])) for run in (compiled, module)]
    assert_same(*results)
    grads = [torch.autograd.grad(out.square().sum(), [x, *module.parameters()]) for out in results]
    for grad, eager_grad in zip(*grads, strict=True):
        assert_same(grad, eager_grad)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 5}, "num_heads = 5 does not divide embed_dim = 16"),
        ({"num_kv_heads": 3}, "num_kv_heads = 3 does not divide num_heads = 4"),
        ({"num_heads": 0}, "embed_dim = 16, num_heads = 0, num_kv_heads = 0; each must be at least 1"),
        ({"variant": "rela-h"}, "unknown variant 'rela-h'; did you mean 'rela-i' or 'rela-g' or 'rela'?"),
        ({"option_sharing": "heads"}, "unknown value of option_sharing 'heads'; did you mean 'head'?"),
        ({"dropout": 1.0}, "dropout = 1.0, but it is a probability below 1"),
        ({"dropout": -0.1}, "dropout = -0.1, but it is a probability below 1"),
        ({"options": {"gamma": 2.0}}, "variant 'rela-g' takes no options, but 'gamma' was given"),
        ({"variant": "topk", "options": {"alpha": 2}}, "unknown option of variant 'topk': 'alpha'; known are keep"),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_refusals_name_the_values(arguments, message):
    with pytest.raises(RectiformerError) as refusal:
        RectifiedAttention(**{"embed_dim": WIDTH, "num_heads": HEADS} | arguments)
    assert str(refusal.value) == message


@every_variant
@pytest.mark.parametrize("cross", [False, True])
def test_centered_keys_have_no_common_part_and_padding_has_no_say(variant, cross):
    module, x = build(variant, center_keys=True, cross=cross), tokens(2, 5)
    source = tokens(2, 7) if cross else x
    lengths = torch.tensor([source.shape[1], 3])
    source[1, 3:] = torch.nan
    out = module(x, source if cross else None, key_lengths=lengths)
    _, keys, _ = module.project(x, source if cross else None, None, lengths)
    assert_same(1 + keys[1, :, :3].mean(1), torch.ones(HEADS, HEAD).double())
    alone = module(x[1:], source[1:, :3] if cross else None) if cross else module(x[1:, :3])
    assert_same(out[1] if cross else out[1, :3], alone[0])


@pytest.mark.parametrize("variant", ["softmax", "sparsemax", "entmax15", "entmax", "topk"])
def test_centered_keys_leave_what_sums_to_one_as_it_is(variant):
    module, plain, x = build(variant, center_keys=True), build(variant), tokens(2, 5)
    plain.load_state_dict(module.state_dict())
    assert_same(module(x), plain(x))
