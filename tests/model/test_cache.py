"""Decoding a token at a time, with caches that grow or are static, says what decoding all at once says."""

import pytest
import torch

from rectiformer import VARIANTS
from rectiformer.config import ModelConfig
from rectiformer.model.cache import KeyValueCache, StaticCache
from rectiformer.model.embedding import sinusoids
from rectiformer.model.norms import OUTPUT_NORMS
from rectiformer.model.transformer import Encoded, Transformer
from rectiformer.ops.decode import follow

START, WORDS, STEPS, BEAM = 2, 23, 11, 3
LENGTHS = torch.tensor([9, 5])


OTHERS = {
    "by sentence": {"positions": "sentence"},
    "open": {"variant": "reluformer", "score_bias": "open"},
    "with thresholds": {"variant": "reluformer", "score_bias": "zero"},
    "open and squared": {"variant": "relu2", "output_norm": "gated-rms", "center_keys": "yes", "score_bias": "open"},
    "of cosines": {"variant": "softmax", "qk_norm": True},
    "with a floor in the norm": {"variant": "rela-g", "norm_epsilon": 0.5},
    "gated by its input": {"variant": "rela", "output_gate": "head"},
    "both and open": {
        "variant": "relu-exp",
        "output_norm": "none",
        "center_keys": "yes",
        "score_bias": "open",
        "qk_norm": True,
        "output_gate": "head",
        "positions": "sentence",
    },
    **{f"{name} norm": {"variant": "rela-g", "output_norm": name} for name in OUTPUT_NORMS},
}


@pytest.fixture(params=[*VARIANTS, *OTHERS])
def model(request):
    return build(**OTHERS.get(request.param, {"variant": request.param}))


def build(**settings):
    config = ModelConfig(**{"hidden_size": 16, "num_heads": 2, "ffn_size": 16, **settings})
    model = Transformer(config, WORDS, WORDS, START, (3, 3)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def draw_source():
    return torch.randint(3, WORDS, (2, 9))


def begin(model, context, beam, static):
    """A state with growing or static caches, and what tells it the parents of the next step."""
    if not static:
        state = model.begin(context)
        return state, state.reorder
    state = model.begin_static(context, beam, STEPS + 2)
    return state, state.static.parents.copy_


def decode_whole(model, written, context):
    """Logits [B * beam, V] of what follows everything that was written [B * beam, M], all at once."""
    sources = torch.arange(len(context.states))
    states = model.decode(written, context.select(sources.repeat_interleave(len(written) // len(sources))))
    return model.logits(states[:, -1])


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_steps_equal_decoding_at_once(model, static):
    source, target = draw_source(), torch.randint(3, WORDS, (2, STEPS))
    target[:, 0] = START
    with torch.inference_mode():
        encoded = model.encode(source, LENGTHS)
        state, _ = begin(model, encoded, 1, static)
        steps = torch.stack([model.step(target[:, index], state) for index in range(STEPS)], 1)
        torch.testing.assert_close(steps, model(source, LENGTHS, target))
    assert state.position.tolist() == [STEPS]


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_hypotheses_continue_their_parents(model, static):
    with torch.inference_mode():
        encoded = model.encode(draw_source(), LENGTHS)
        state, choose_parents = begin(model, encoded, BEAM, static)
        written = torch.full((2 * BEAM, 1), START)
        for _ in range(STEPS):
            logits = model.step(written[:, -1], state)
            torch.testing.assert_close(logits, decode_whole(model, written, encoded))
            parents = torch.randint(BEAM, (2 * BEAM,)) + torch.arange(2).repeat_interleave(BEAM) * BEAM
            choose_parents(parents)
            written = torch.cat([written[parents], torch.randint(3, WORDS, (2 * BEAM, 1))], 1)


@pytest.mark.parametrize("order", ["post", "pre"])
def test_sentences_that_are_done_can_be_dropped(order):
    model = build(variant="rela-g", norm=order)
    with torch.inference_mode():
        encoded = model.encode(draw_source(), LENGTHS)
        state = model.begin(encoded)
        written = torch.full((2 * BEAM, 1), START)
        for index in range(6):
            model.step(written[:, -1], state)
            if index == 3:
                kept = torch.tensor([1])
                state.keep(kept, BEAM)
                written, encoded = written[BEAM:], encoded.select(kept)
            written = torch.cat([written, torch.randint(3, WORDS, (len(written), 1))], 1)
        logits = model.step(written[:, -1], state)
        torch.testing.assert_close(logits, decode_whole(model, written, encoded))


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_steps_beyond_the_known_positions(static):
    model, target = build(), torch.randint(3, WORDS, (2, STEPS))
    embedding = model.target_embedding
    embedding.positions = embedding.positions[:4]
    with torch.inference_mode():
        encoded = model.encode(draw_source(), LENGTHS)
        state, _ = begin(model, encoded, 1, static)
        steps = [model.step(target[:, index], state) for index in range(STEPS)]
    assert torch.equal(embedding.positions[:STEPS], sinusoids(STEPS, 16).double())
    assert not embedding.positions.is_inference()
    states = model.decode(target, Encoded(*(part.clone() for part in encoded[:2])))
    torch.testing.assert_close(torch.stack(steps, 1), model.logits(states))


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_steps_under_autocast_equal_decoding_at_once(static):
    """The caches hold what the products give, so rounding is all that differs: it is compared in bfloat16."""
    model, target = build().float(), torch.randint(3, WORDS, (2, STEPS))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        encoded = model.encode(draw_source(), LENGTHS)
        state, _ = begin(model, encoded, 1, static)
        steps = torch.stack([model.step(target[:, index], state) for index in range(STEPS)], 1)
        whole = model.logits(model.decode(target, encoded))
    assert state.self_caches[0].keys.dtype == state.cross_caches[0].keys.dtype == torch.bfloat16
    error = (steps.double() - whole.double()).square().mean().sqrt()
    rounded = (
        model.double().logits(model.decode(target, encoded._replace(states=encoded.states.double()))) - whole.double()
    ).square()
    assert error <= 2 * rounded.mean().sqrt()


def test_the_source_is_held_once_whatever_the_beam():
    model = build()
    with torch.inference_mode():
        encoded = model.encode(draw_source(), LENGTHS)
        for static in (False, True):
            state, _ = begin(model, encoded, BEAM, static)
            model.step(torch.full((2 * BEAM,), START), state)
            assert all(cache.keys.shape == (2, 2, 9, 8) for cache in state.cross_caches)
            assert all(len(cache.keys) == 2 * BEAM for cache in state.self_caches)


def test_a_growing_cache_holds_what_was_appended_through_reordering():
    cache, held = KeyValueCache(), torch.zeros(2, 1, 0, 3)
    for index in range(40):
        new = torch.randn(len(held), 1, 1 + index % 3, 3)
        keys, values = cache.append(new, -new)
        held = torch.cat([held, new], 2)
        assert torch.equal(keys, held)
        assert torch.equal(values, -held)
        rows = torch.randint(len(held), (1 + index % 4,))
        cache.reorder(rows)
        held = held[rows]
    assert cache.length == held.shape[2]


def write(cache, position, layer, new):
    """One position of every hypothesis, where a step would write it."""
    cache.buffer[2 * layer, :, :, position] = new
    cache.buffer[2 * layer + 1, :, :, position] = -new


def test_a_static_cache_follows_ancestors_without_moving_anything():
    cache, held = StaticCache(torch.zeros(2 * 2, 4, 2, 9, 3)), torch.zeros(4, 2, 0, 3)
    address = cache.buffer.data_ptr()
    for position in range(9):
        parents, new = torch.randint(4, (4,)), torch.randn(4, 2, 3)
        cache.parents.copy_(parents)
        cache.reorder(torch.tensor([position]))
        held = torch.cat([held[parents], new[:, :, None]], 2)
        for layer in range(2):
            write(cache, position, layer, new + layer)
            assert torch.equal(follow(cache.buffer[2 * layer], cache.ancestors)[:, :, : position + 1], held + layer)
            assert torch.equal(
                follow(cache.buffer[2 * layer + 1], cache.ancestors)[:, :, : position + 1], -held - layer
            )
    assert cache.buffer.data_ptr() == address


def test_a_larger_cache_takes_over_what_some_hypotheses_would_continue():
    cache, larger = StaticCache(torch.zeros(2, 4, 1, 4, 2)), StaticCache(torch.zeros(2, 2, 1, 8, 2))
    larger.buffer.fill_(torch.nan)  # of an earlier batch
    for position, parents in enumerate([[0, 1, 2, 3], [3, 3, 0, 1], [1, 0, 2, 2]]):
        cache.parents.copy_(torch.tensor(parents))
        cache.reorder(torch.tensor([position]))
        write(cache, position, 0, torch.randn(4, 1, 2))
    cache.parents.copy_(torch.tensor([2, 0, 0, 3]))
    expected = follow(cache.buffer[0], cache.ancestors)[[0, 3], :, :3]
    larger.take(cache, torch.tensor([1, 3]))
    assert torch.equal(follow(larger.buffer[0], larger.ancestors)[:, :, :3], expected)
    assert torch.equal(larger.buffer[:, :, :, 4:], torch.zeros(2, 2, 1, 4, 2))
    larger.reorder(torch.tensor([3]))
    assert torch.equal(follow(larger.buffer[0], larger.ancestors)[:, :, :3], expected)


def test_reordering_leaves_the_tensors_that_a_cache_was_made_of_alone():
    keys, rows = torch.randn(3, 2, 4, 5), torch.tensor([2, 0])
    for given in (keys, keys[:1].expand(3, -1, -1, -1)):
        before, cache = given.clone(), KeyValueCache(given, -given)
        cache.reorder(rows)
        assert torch.equal(given, before)
        assert torch.equal(cache.keys, before[rows])
        assert torch.equal(cache.values, -before[rows])
