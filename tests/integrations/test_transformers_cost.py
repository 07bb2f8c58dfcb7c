"""What the bridge to Hugging Face costs on the host: waits for the device, copies, checks of repeated calls."""

import pytest
import torch
from integrations.small_models import build, draw_ids
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import StaticCache

from rectiformer.integrations import transformers as bridge
from rectiformer.ops import attention as attention_module
from rectiformer.ops.gpu import plans

WAITING = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select")
"""Operators that wait for the device, since Python gets their result or its size."""


class Waits(TorchDispatchMode):
    """Counts the operators that would wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, given=(), keywords=None):
        name = function.overloadpacket.__name__
        if name in WAITING:
            self.seen.append(name)
        return function(*given, **(keywords or {}))


def waits_of(model, ids, real):
    with torch.no_grad(), Waits() as waits:
        model(ids, attention_mask=real)
    return len(waits.seen)


PADDING = {
    "none": (lambda real: None, 0),
    "all real": (lambda real: real, 1),
    "left": (lambda real: real.index_fill(1, torch.tensor([0, 1]), 0), 2),
    "right": (lambda real: real.index_fill(1, torch.tensor([7, 8]), 0), 2),
}


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_forward_waits_for_the_device_at_its_mask_and_in_no_layer(kind, padding, monkeypatch):
    """ "sdpa" waits as often for a decoder; for a padded encoder once less, and then it reads a mask in every layer."""
    monkeypatch.setattr(attention_module, "is_readable", lambda tensor: False)  # as on a GPU: lengths go unchecked
    make, most = PADDING[padding]
    ids, real = draw_ids(2, 9), make(torch.ones(2, 9, dtype=torch.long))
    model = build(kind)
    model(ids)  # the first forward is traced
    ours = waits_of(model, ids, real)
    assert ours == most
    model.set_attn_implementation("sdpa")
    assert ours <= waits_of(model, ids, real) + (kind == "bert" and most == 2)


@pytest.mark.parametrize("padded", [False, True])
def test_a_step_of_generation_waits_once(padded):
    """Padding before a prompt is a mask, and a step does not ask whether it comes last."""
    model, ids, real = build("llama"), draw_ids(2, 9), torch.ones(2, 10, dtype=torch.long)
    if padded:
        real[1, :3] = 0
    with torch.no_grad():
        cache = model(ids, attention_mask=real[:, :9]).past_key_values
        with Waits() as waits:
            model(draw_ids(2, 1), attention_mask=real, past_key_values=cache)
    assert len(waits.seen) == 1


def test_a_step_with_a_static_cache_waits_for_nothing():
    model, ids, real = build("llama"), draw_ids(2, 9), torch.ones(2, 10, dtype=torch.long)
    cache = StaticCache(config=model.config, max_cache_len=12)
    with torch.no_grad():
        model(ids, attention_mask=real[:, :9], past_key_values=cache)
        with Waits() as waits:
            model(draw_ids(2, 1), attention_mask=real, past_key_values=cache)
    assert waits.seen == []


@pytest.fixture
def kernels(interpreter, monkeypatch):
    """Fused kernels in Triton's interpreter, without plans: how each call went, and what it returned."""
    calls, outputs = [], []
    monkeypatch.setattr(attention_module, "SHORTCUTS", plans.PlanCache())
    check, attention = attention_module.check_call, attention_module.attention

    def checked(*given, **options):
        calls[-1] = "checked"
        return check(*given, **options)

    def called(*given, **options):
        calls.append("planned")
        fused = given[0].dtype == torch.float32
        outputs.append(attention(*given, backend="fused" if fused else "auto", **options))
        return outputs[-1]

    monkeypatch.setattr(attention_module, "check_call", checked)
    monkeypatch.setattr(bridge, "attention", called)
    return calls, outputs


@torch.no_grad()
def test_generation_goes_straight_to_the_decoding_kernels(kernels):
    """Keys grow and heads share them: the first layer's prompt and first step are checked, and nothing else."""
    model, ids = build("llama", dtype=torch.float32), draw_ids(2, 5)
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    tokens = model.generate(ids, **given)
    assert kernels[0] == ["checked", "planned"] * 2 + ["planned", "planned"] * 3
    assert torch.equal(tokens, model.double().generate(ids, **given, use_cache=False))


def test_a_repeated_step_of_training_goes_straight_to_the_kernels_and_nothing_is_copied(kernels):
    model, ids = build("llama", dtype=torch.float32), draw_ids(2, 5)
    read = []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, given: read.append(given[0].data_ptr()))
    for _ in range(2):
        model(ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    calls, outputs = kernels
    assert calls == ["checked", "planned", "planned", "planned"]
    assert read == [z.data_ptr() for z in outputs], "the projection reads what the kernels left"
