"""What transformers calls: masks as ranges or matrices, additive masks, names to register, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from closeness import peak_allocation
from integrations.small_models import LM, draw_ids
from torch import nn
from torch.testing import assert_close
from transformers import AttentionInterface, AutoModelForCausalLM, Gemma2Config, MistralConfig
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from rectiformer import attention
from rectiformer.errors import ArgumentError
from rectiformer.integrations.transformers import Band, attend, mask, register


@torch.no_grad()
def test_autocast_computes_in_its_dtype():
    q, k, v = (torch.randn(2, 4, 5, 8) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        mixed, _ = attend(nn.Module(), q, k, v.bfloat16(), None, variant="rela", options={})
    half, _ = attend(nn.Module(), q.bfloat16(), k.bfloat16(), v.bfloat16(), None, variant="rela", options={})
    assert mixed.dtype == torch.bfloat16
    assert torch.equal(mixed, half)


def test_a_device_without_autocast_gives_shapes():
    q = torch.empty(2, 4, 5, 8, device="meta")
    mixed, _ = attend(nn.Module(), q, q, q, None, variant="rela", options={})
    assert (mixed.shape, mixed.device.type) == ((2, 5, 4, 8), "meta")


def test_dropout_drops_weights():
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    torch.manual_seed(3)
    z, _ = attend(nn.Module(), q, k, v, Band(True), dropout=0.5, variant="relu-seqlen", options={})
    torch.manual_seed(3)
    assert_close(z, attention(q, k, v, "relu-seqlen", causal=True, dropout_p=0.5).transpose(1, 2))
    assert not torch.allclose(z, attention(q, k, v, "relu-seqlen", causal=True).transpose(1, 2))


def test_the_scale_of_a_head_becomes_that_of_its_views():
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    given = {"variant": "threshold-diff", "options": {"beta": 0.25}}
    z, other = (attend(nn.Module(), q, k, v, None, scaling=scaling, **given)[0] for scaling in (8**-0.5, None))
    assert_close(z, other)
    assert z.any()


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


def test_a_name_that_is_not_registered_gets_ours_as_a_note():
    """transformers lists its own alone."""
    register()
    with pytest.raises(ValueError, match="is not supported") as caught:
        AutoModelForCausalLM.from_config(MistralConfig(**LM), attn_implementation="rela-q")
    (note,) = caught.value.__notes__
    assert note.startswith("rectiformer has registered ")
    assert "'rectified', 'rectified-sqrt', 'rela'" in note


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
    with pytest.raises(ArgumentError, match=r"attention_mask \[1, 1, 2, 2\] holds torch.int64; make it boolean"):
        attend(nn.Module(), q, q, q, torch.ones(1, 1, 2, 2, dtype=torch.long), variant="rela", options={})


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
