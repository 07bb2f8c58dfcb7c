"""`explain` says what `attention` then does."""

from dataclasses import replace

import pytest
import torch

import rectiformer.ops.attention as attention_module
from rectiformer import attention, explain
from rectiformer.errors import ArgumentError


def draw(length, size=16, dtype=torch.float32):
    return torch.randn(1, 2, length, size, dtype=dtype)


def taken(monkeypatch, q, **arguments):
    """The implementation that `attention` really runs."""
    ran = []

    def watch(backend):
        def choose(*inputs):
            found = backend.choose(*inputs)
            return found if isinstance(found, str) else lambda *inputs: ran.append(backend.name) or found(*inputs)

        return replace(backend, choose=choose)

    monkeypatch.setattr(attention_module, "BACKENDS", tuple(watch(backend) for backend in attention_module.BACKENDS))
    attention(q, q, q, **arguments)
    return ran[0]


@pytest.mark.parametrize("arguments", [{}, {"variant": "softmax"}, {"backend": "reference"}, {"causal": True}], ids=str)
def test_it_names_the_implementation_that_runs(monkeypatch, arguments):
    q = draw(5)
    assert explain(q, q, q, **arguments).backend == taken(monkeypatch, q, **arguments)


def test_it_says_why_a_faster_one_is_not_taken():
    q = draw(5)
    found = explain(q, q, q, "softmax")
    assert found.declined["blocked"] == "weights of 'softmax' depend on more than their own score"
    assert "not blocked: weights of 'softmax' depend on more than their own score" in str(found)


@pytest.mark.parametrize("variant", ["rela", "softmax", "sparsemax", "entmax"])
def test_it_says_why_the_taken_one_is_taken_and_every_faster_one_is_not(variant):
    q = draw(5)
    found = explain(q, q, q, variant)
    first, *rest = str(found).split("\n")
    assert first == f"backend {found.backend}: {found.reason}"
    assert found.reason
    faster = ["fused", "sdpa", *(["blocked"] if found.backend == "reference" else [])]
    assert list(found.declined) == faster
    assert rest == [f"  not {name}: {why}" for name, why in found.declined.items()]
    assert all(found.declined.values())


def test_torchs_kernels_are_left_to_the_gpu():
    q = draw(5, dtype=torch.bfloat16)
    assert explain(q, q, q, "softmax").declined["sdpa"] == "it runs on a GPU, and q is on cpu"


def test_what_was_asked_for_is_said_to_be():
    q = draw(5)
    assert str(explain(q, q, q, backend="reference")) == "backend reference: asked for by backend='reference'"


@pytest.mark.usefixtures("interpreter")
def test_it_tells_short_kernels_from_long_ones():
    q = draw(20)
    assert explain(q, q, q, backend="fused").kernel == "short"
    found = explain(q, q, q, backend="fused", attn_bias=torch.zeros(1, 1, 20, 20))
    assert found.kernel == "long"
    assert set(found.tilings) == {"forward", "keys", "queries", "bias"}
    assert "not short: it has no bias or mask" in str(found)
    assert "costs" not in str(explain(draw(200), draw(200), draw(200), backend="fused"))


@pytest.mark.usefixtures("interpreter")
def test_it_notes_what_slows_the_kernels_down():
    q, odd = draw(200), draw(200, size=17)
    mask = torch.ones(1, 1, 200, 200, dtype=torch.bool)
    assert not explain(q, q, q, backend="fused").notes
    assert "without the tensor copy engine" in str(explain(odd, odd, odd, backend="fused"))
    assert "pass of its own" in str(explain(q, q, q, "reluformer", backend="fused", attn_mask=mask))


def test_a_backend_that_cannot_is_refused_as_attention_refuses_it():
    q = draw(5)
    with pytest.raises(ArgumentError, match="backend 'blocked' cannot run this call"):
        explain(q, q, q, "softmax", backend="blocked")
