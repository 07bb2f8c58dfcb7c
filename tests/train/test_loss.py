"""The losses against dense distributions, and the penalties against numbers worked out by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from closeness import assert_no_worse, grid_inputs

from rectiformer import VARIANTS
from rectiformer.config import ModelConfig, TrainingConfig
from rectiformer.model.transformer import Transformer
from rectiformer.ops.attention import check_call
from rectiformer.ops.reference import reference_weights
from rectiformer.ops.weights import attention_with_rows
from rectiformer.train.loss import batch_losses, collect_penalties, penalties, penalty_strength, token_losses

V = 11
SMOOTHINGS = [0.0, 0.1, 0.5]


def config(**settings):
    return TrainingConfig(**{"label_smoothing": 0.1, **settings})


def draw(rows=3, length=5):
    return torch.randn(rows, length, V, dtype=torch.float64) * 3, torch.randint(V, (rows, length))


def dense_target(target, smoothing, over):
    """The whole distribution that a word stands for."""
    right = F.one_hot(target, V).double()
    if over == "others":
        return right * (1 - smoothing) + (1 - right) * smoothing / (V - 1)
    return right * (1 - smoothing) + smoothing / V


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_smoothing_over_others_is_the_divergence_from_a_dense_distribution(smoothing):
    logits, target = draw()
    smoothed, plain = token_losses(logits, target, config(label_smoothing=smoothing))
    dense = dense_target(target, smoothing, "others")
    divergence = F.kl_div(logits.log_softmax(-1), dense, reduction="none").sum(-1)
    torch.testing.assert_close(smoothed, divergence.float())
    torch.testing.assert_close(plain, F.cross_entropy(logits.mT, target, reduction="none").float())


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_smoothing_over_all_is_torchs_own(smoothing):
    logits, target = draw()
    smoothed, _ = token_losses(logits, target, config(label_smoothing=smoothing, label_smoothing_over="all"))
    own = F.cross_entropy(logits.mT, target, reduction="none", label_smoothing=smoothing)
    torch.testing.assert_close(smoothed, own.float())


@pytest.mark.parametrize("smoothing", SMOOTHINGS[1:])
@pytest.mark.parametrize(("over", "constant"), [("others", False), ("all", True)])
def test_a_perfect_model_has_the_least_loss(over, constant, smoothing):
    """0 where the entropy of the smoothed distribution is subtracted, that entropy where it is not."""
    target = torch.arange(V)
    dense = dense_target(target, smoothing, over)
    logits = dense.log().requires_grad_()
    loss, _ = token_losses(logits, target, config(label_smoothing=smoothing, label_smoothing_over=over))
    entropy = -(dense * dense.log()).sum(-1) if constant else torch.zeros(V)
    torch.testing.assert_close(loss, entropy.float(), rtol=0, atol=1e-6)
    loss.sum().backward()
    torch.testing.assert_close(logits.grad, torch.zeros_like(logits), rtol=0, atol=1e-6)


@pytest.mark.parametrize("over", ["others", "all"])
def test_gradients_are_the_difference_of_distributions(over):
    logits, target = draw()
    logits.requires_grad_()
    loss, _ = token_losses(logits, target, config(label_smoothing_over=over))
    loss.sum().backward()
    difference = logits.detach().softmax(-1) - dense_target(target, 0.1, over)
    torch.testing.assert_close(logits.grad.float(), difference.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_logits_are_summed_in_float32(dtype):
    logits, target = draw()
    narrow = logits.to(dtype)
    smoothed, plain = token_losses(narrow, target, config())
    exact = token_losses(narrow.double(), target, config())
    assert smoothed.dtype == plain.dtype == torch.float32
    torch.testing.assert_close((smoothed, plain), exact)


@pytest.mark.parametrize("mean", ["token", "sentence"])
def test_padding_counts_nowhere(mean):
    logits, target = draw(4, 6)
    logits.requires_grad_()
    lengths = torch.tensor([6, 3, 1, 0])
    summed, summed_plain = batch_losses(logits, target, lengths, config(loss_mean=mean))
    rows = [token_losses(logits[row, :length], target[row, :length], config()) for row, length in enumerate(lengths)]
    expected = sum(smoothed.mean() if mean == "sentence" else smoothed.sum() for smoothed, _ in rows[:3])
    torch.testing.assert_close(summed, expected)
    torch.testing.assert_close(summed_plain, sum(plain.sum() for _, plain in rows).detach())
    assert not summed_plain.requires_grad
    summed.backward()
    padding = torch.arange(6) >= lengths[:, None]
    assert not logits.grad[padding].any()
    assert logits.grad[~padding].any(-1).all()


def observe(weights, causal=False):
    """Row sums of exactly these weights [M, N], and what they come from: ReLA with the keys of an identity."""
    weights = torch.as_tensor(weights, dtype=torch.float32)
    queries = weights.view(-1, 1, *weights.shape[-2:]).requires_grad_()
    keys = torch.eye(weights.shape[-1])[None, None].expand(len(queries), 1, -1, -1)
    call = check_call(queries, keys, keys, "rela", causal=causal, scale=1.0)
    return attention_with_rows(queries, keys, keys, call)[1], queries


MASS, ENTROPY = {"mass_penalty": 1.0}, {"entropy_penalty": 1.0}


@pytest.mark.parametrize(
    ("rows", "weights_of_penalties", "expected"),
    [
        ([[1, 0, 0, 0]], MASS | ENTROPY, 0),
        ([[0.75, 0.25, 0, 0]], MASS | ENTROPY, 0),  # entropy .562 is below 0.7 log 4 = .970
        ([[2, 0, 0, 0]], MASS, math.log(2)),
        ([[0.5, 0, 0, 0]], MASS, math.log(2)),
        ([[3, 0, 0, 0]], ENTROPY, 0),
        ([[1, 1, 1, 1]], ENTROPY, 0.3 * math.log(4)),  # of the row divided by its sum
        ([[1, 1, 1, 1]], MASS | ENTROPY, math.log(4) + 0.3 * math.log(4)),
        ([[2, 0, 0, 0], [-1, -1, -1, -1]], MASS, math.log(2)),  # a null row is in no mean
        ([[-1, -1, -1, -1]], MASS | ENTROPY, 0),
        ([[2, 0, 0, 0], [8, 0, 0, 0]], {"mass_penalty": 0.5}, 0.5 * (math.log(2) + math.log(8)) / 2),
        ([[1, 1, 1, 1], [1, 0, 0, 0]], {"entropy_penalty": 0.1}, 0.1 * 0.3 * math.log(4) / 2),
    ],
)
def test_penalties_in_closed_form(rows, weights_of_penalties, expected):
    seen, queries = observe(rows)
    found = penalties(seen, None, config(**weights_of_penalties))
    assert found.item() == pytest.approx(expected, abs=1e-6)
    found.backward()
    assert queries.grad.isfinite().all()


@pytest.mark.parametrize(
    ("row", "expected"), [([0.5, 0.5, 0.5, 0.5], 2 * math.log(2) - 0.7 * math.log(4)), ([2, 2, 2, 2], 0)]
)
def test_the_entropy_may_be_that_of_the_weights_as_they_are(row, expected):
    """-4 * 0.5 log 0.5 is 2 log 2; of weights above 1 it is negative."""
    found = penalties(observe([row])[0], None, config(entropy_of="raw", **ENTROPY))
    assert found.item() == pytest.approx(max(expected, 0), abs=1e-6)


def test_penalties_fall_in_a_straight_line():
    settings = config(steps=100, penalty_warmdown=0.5)
    assert [penalty_strength(settings, step) for step in (1, 26, 51, 52, 100)] == [1.0, 0.5, 0.0, 0.0, 0.0]
    assert {penalty_strength(config(steps=100), step) for step in (1, 50, 100)} == {1.0}


def test_the_bound_of_the_entropy_counts_visible_keys():
    """Causal rows of equal weights over 1, 2, 3 and 4 keys: each is above its bound by 0.3 log n."""
    seen, _ = observe(torch.ones(4, 4), causal=True)
    expected = 0.3 * sum(math.log(n) for n in (1, 2, 3, 4)) / 4
    assert penalties(seen, None, config(**ENTROPY)).item() == pytest.approx(expected, abs=1e-6)


def test_padded_queries_have_no_penalty():
    rows = torch.tensor([[[2.0, 0], [4.0, 0]], [[8.0, 0], [16.0, 0]], [[5.0, 0], [5.0, 0]]])
    found = penalties(observe(rows)[0], torch.tensor([2, 1, 0]), config(**MASS))
    assert found.item() == pytest.approx((math.log(2) + math.log(4) + math.log(8)) / 3, abs=1e-6)


def build(variant="reluformer"):
    model = Transformer(ModelConfig(hidden_size=16, num_heads=2, ffn_size=16, variant=variant), V, V).eval()
    source, target = torch.randint(3, V, (2, 9)), torch.randint(3, V, (2, 12))
    return model, source, torch.tensor([9, 5]), target, torch.tensor([4, 12])


@pytest.mark.parametrize("variant", [name for name, variant in VARIANTS.items() if variant.has_weights])
def test_penalties_of_a_model_are_finite_and_move_its_attention(variant):
    model, source, source_lengths, target, target_lengths = build(variant)
    settings = config(mass_penalty=1.0, entropy_penalty=1.0)
    with collect_penalties(model, source_lengths, target_lengths, settings) as found:
        model(source, source_lengths, target)
    assert len(found) == len(list(model.sites())) == 6
    total = torch.stack(found).sum()
    assert total > 0
    total.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert model.encoder[0].attention.input_weight.grad.any()


def test_each_site_is_masked_by_the_side_its_queries_are_on():
    model, source, source_lengths, target, target_lengths = build()
    settings = config(mass_penalty=1.0)
    seen = []
    for site in model.sites():
        site.attention.row_observer = lambda rows, site=site: seen.append((site.kind, rows))
    model(source, source_lengths, target)
    lengths = {"encoder": source_lengths, "decoder": target_lengths, "cross": target_lengths}
    expected = [penalties(rows, lengths[kind], settings) for kind, rows in seen]
    with collect_penalties(model, source_lengths, target_lengths, settings) as found:
        model(source, source_lengths, target)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("fails", [False, True])
def test_observers_are_gone_afterwards(fails):
    model, *_, target_lengths = build()
    try:
        with collect_penalties(model, target_lengths, target_lengths, config(mass_penalty=1.0)):
            assert all(site.attention.row_observer is not None for site in model.sites())
            if fails:
                raise InterruptedError
    except InterruptedError:
        assert fails
    assert all(site.attention.row_observer is None for site in model.sites())


SETTINGS = {
    "causal": {"causal": True},
    "cross": {"lengths": [20, 11]},
    "padded": {"key_lengths": [24, 7], "lengths": [20, 11]},
    "grouped": {"causal": True, "heads": 4},
}


def dense_penalties(weights, visible, lengths, settings):
    """The definition, from all weights."""
    mass = weights.sum(-1)
    share = weights / torch.where(mass > 0, mass, 1)[..., None]
    entropy = -(share * torch.where(share > 0, share, 1).log()).sum(-1)
    counted = (mass > 0) & (torch.arange(mass.shape[-1]) < lengths[:, None])[:, None]
    each = settings.mass_penalty * (mass + 1e-8).log().abs()
    each = each + settings.entropy_penalty * (entropy - 0.7 * visible.clamp_min(1).log()).clamp_min(0)
    return each[counted].mean()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("variant", [name for name, variant in VARIANTS.items() if variant.rectified])
def test_gradients_of_penalties_are_the_reference_s(variant, setting, fused, request):
    if fused:
        request.getfixturevalue("interpreter")
    settings = config(mass_penalty=0.3, entropy_penalty=2.0)
    arguments = dict(SETTINGS[setting])
    heads, lengths = arguments.pop("heads", 2), torch.tensor(arguments.pop("lengths", [20, 20]))
    inputs = grid_inputs(2, heads, 2, 20, 24, 8, 8)

    def gradients(dtype, dense):
        q, k, v, _ = (tensor.to(dtype).requires_grad_() for tensor in inputs)
        call = check_call(q, k, v, variant, **arguments)
        if dense:
            weights = reference_weights(q, k, call, precision=dtype)
            found = dense_penalties(weights, call.visibility.counts(q.device), lengths, settings)
        else:
            found = penalties(attention_with_rows(q, k, v, call)[1], lengths, settings)
        return [found.detach(), *torch.autograd.grad(found, [q, k])]

    ours, eager, exact = gradients(torch.float32, False), gradients(torch.float32, True), gradients(torch.float64, True)
    assert exact[1].abs().max() > 1e-3
    for name, *results in zip(["penalty", "d_q", "d_k"], ours, eager, exact, strict=True):
        assert_no_worse(f"{variant} {name}", *results)
