"""Sixty configurations of Hugging Face models: ours is what runs and learns, nothing hidden is seen, caches agree.

A few of each task run always, all sixty with `-m slow`.
"""

import inspect
from dataclasses import replace
from functools import partial

import pytest
import torch
from integrations.many_models import CASES, TASKS, build_case
from integrations.small_models import draw_ids, pad, positions_of
from torch.testing import assert_close as assert_same
from transformers import GenerationMixin

from rectiformer.integrations.transformers import register, verify

register("our-softmax", "softmax")

FEW = [CASES[index] for index in (1, 4, 27, 28, 32, 38, 42, 46, 51, 54, 57, 59)]
SIGNALS = ("image", "sound", "dual")
assert_close = partial(assert_same, rtol=1e-5, atol=1e-5)  # norms and rotations inside are computed in float32


def call(model, ids, real=None, source=None, **others):
    """What a model of text makes of ids: logits, or hidden states; those of a decoder for a source."""
    if source is not None:
        return model(input_ids=source, attention_mask=real, decoder_input_ids=ids, **others)
    takes_positions = (
        isinstance(model, GenerationMixin) and "position_ids" in inspect.signature(model.forward).parameters
    )
    if real is not None and takes_positions:
        others["position_ids"] = positions_of(real)
    return model(input_ids=ids, attention_mask=real, **others)


def example(case, model):
    """Something to give the model: outputs by one call of it."""
    if case.task == "image":
        return model(pixel_values=torch.randn(2, 3, 12, 12, dtype=torch.float64))[0]
    if case.task == "sound":
        return model(input_values=torch.randn(2, 4000, dtype=torch.float64))[0]
    if case.task == "dual":
        return model(input_ids=draw_ids(2, 7), pixel_values=torch.randn(2, 3, 12, 12, dtype=torch.float64))[0]
    return call(model, draw_ids(2, 7), source=draw_ids(2, 9) if case.task == "seq2seq" else None)[0]


def check_gradients(case, model, reached):
    """Every attention module that reached us has parameters that learn."""
    outputs = example(case, model)
    (outputs * torch.randn_like(outputs)).sum().backward()
    for name in reached:
        gradients = [each.grad for each in model.get_submodule(name).parameters() if each.grad is not None]
        assert all(gradient.isfinite().all() for gradient in gradients), name
        assert sum(bool(gradient.any()) for gradient in gradients) >= 1, name
    assert outputs.isfinite().all()


@torch.no_grad()
def check_padding(case, model):
    """A row gives the same alone as in a batch, whatever its padding holds."""
    short = draw_ids(6)
    for side in ("right", "left") if case.task == "decoder" else ("right",):
        padded, real = pad(short, 11, side)
        ids, reals = torch.stack([draw_ids(11), padded]), torch.stack([torch.ones_like(real), real])
        if case.task == "seq2seq":
            target = draw_ids(2, 5)
            assert_close(
                call(model, target, reals, ids)[0][1], call(model, target[1:], torch.ones(1, 6), short[None])[0][0]
            )
        else:
            assert_close(call(model, ids, reals)[0][1][real.bool()], call(model, short[None])[0][0])


@torch.no_grad()
def check_future(case, model):
    """Later tokens change nothing before them, and something from there on."""
    source = draw_ids(2, 9) if case.task == "seq2seq" else None
    ids = draw_ids(2, 9)
    changed = ids.clone()
    changed[:, 6:] = draw_ids(2, 3)
    before, after = (call(model, each, source=source).logits for each in (ids, changed))
    assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:], rtol=1e-3)


@torch.no_grad()
def check_cache(case, model):
    """Read in parts with a cache, tokens get the logits that they get at once."""
    source = draw_ids(2, 9) if case.task == "seq2seq" else None
    ids, cache, parts = draw_ids(2, 12), None, []
    for part in ids.split([5, 6, 1], 1):
        outputs = call(model, part, source=source, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        parts.append(outputs.logits)
    assert_close(torch.cat(parts, 1), call(model, ids, source=source, use_cache=False).logits)


@torch.no_grad()
def check_weights(case, model):
    """Asked for its attentions, a model of text gives the weights of every layer, of what each query may see."""
    source = draw_ids(2, 9) if case.task == "seq2seq" else None
    outputs = call(model, draw_ids(2, 7), source=source, output_attentions=True)
    sizes = {"encoder_attentions": (9, 9), "decoder_attentions": (7, 7), "cross_attentions": (7, 9)}
    for name, size in sizes.items() if source is not None else (("attentions", (7, 7)),):
        assert [weights.shape[2:] for weights in outputs[name]] == [size, size], name
        if case.task == "decoder" or name == "decoder_attentions":
            assert not any(weights.triu(1).any() for weights in outputs[name])


@torch.no_grad()
def check_softmax(case):
    """Masks, scales, biases and heads arrive as the model means them: through us its softmax is the same.

    That of "sdpa"; but in transformers 5.17 the decoder of UMT5 computes another with it than with "eager", which for
    its part gives NaN in float64 for windows over padding.
    """
    found = []
    for name in ("our-softmax", "eager" if case.config == "UMT5" else "sdpa"):
        torch.manual_seed(1)
        model = build_case(replace(case, name=name))
        if case.task in SIGNALS:
            found.append(example(case, model))
            continue
        ids, real = draw_ids(2, 9), (torch.arange(9) < torch.tensor([[9], [5]])).long()
        source = draw_ids(2, 9) if case.task == "seq2seq" else None
        outputs = call(model, ids, real, source)[0]
        found.append(outputs if case.task == "seq2seq" else outputs[real.bool()])
    assert_close(*found)


def check(case):
    model = build_case(case)
    reach = verify(model)
    assert reach.reached
    assert not reach.missed + reach.idle
    check_gradients(case, model, reach.reached)
    if case.task not in SIGNALS:
        check_padding(case, model)
        check_weights(case, model)
    if case.task in ("decoder", "seq2seq"):
        check_future(case, model)
        check_cache(case, model)
    check_softmax(case)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_a_few_configurations(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sixty_configurations(case):
    check(case)


def test_there_are_sixty_and_each_task_is_among_the_few():
    assert len(CASES) == 60
    assert {case.task for case in FEW} == set(TASKS)


def test_the_check_finds_a_leak(monkeypatch):
    """A model whose attention sees the future, and its padding, fails."""
    case = CASES[0]
    model = build_case(case)
    for module in model.modules():
        if type(module).__name__ == "LlamaAttention":
            forward = module.forward
            monkeypatch.setattr(module, "forward", partial(see_all, forward))
    for failing in (check_padding, check_future):
        with pytest.raises(AssertionError, match="not close"):
            failing(case, model)


def see_all(forward, *arguments, **options):
    return forward(*arguments, **{**options, "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)})
