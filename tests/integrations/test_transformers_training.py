"""Hugging Face models with rectified attention learn, are saved and compiled: gradients that flow."""

import math

import pytest
import torch
from integrations.small_models import CONFIGS, KINDS, build, draw_ids
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from rectiformer.integrations.transformers import STANDARD


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
