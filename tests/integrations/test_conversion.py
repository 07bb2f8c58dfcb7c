"""A small Hugging Face model learns with softmax, then does the same with rectified attention."""

import copy
import math
from statistics import fmean

import pytest
import torch
from integrations.small_models import BODY, CONFIGS, SPECIAL, build, draw_ids
from transformers import AutoModelForCausalLM, OPTConfig

from rectiformer.errors import ArgumentError
from rectiformer.integrations.conversion import convert_attention
from rectiformer.model.imitation import divergence


def draw_batch(kind):
    """Sequences whose last token repeats the first of eight words; an encoder-decoder copies its source, some of it
    padding."""
    ids = torch.randint(4, 12, (32, 6))
    if kind == "llama":
        ids[:, -1] = ids[:, 0]
        return {"input_ids": ids, "labels": torch.where(torch.arange(6) == 5, ids, -100)}
    real = torch.arange(6) < torch.randint(3, 7, (32, 1))
    ids = torch.where(real, ids, 0)
    return {"input_ids": ids, "attention_mask": real.long(), "labels": torch.where(real, ids, -100)}


def learn(kind, batches):
    model = build(kind, "sdpa", torch.float32).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for batch in batches:
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < math.log(8)
    return model.eval()


@torch.no_grad()
def apart(model, teacher, batch):
    """The mean divergence of what two models predict."""
    real = batch["labels"] != -100
    return divergence(model(**batch).logits, teacher(**batch).logits)[real].mean().item()


@pytest.mark.parametrize(("kind", "modules"), [("llama", 2), ("marian", 6)])
def test_a_converted_model_predicts_what_its_softmax_did(kind, modules):
    batches, held_out = [draw_batch(kind) for _ in range(60)], draw_batch(kind)
    teacher = learn(kind, batches)
    model, losses = copy.deepcopy(teacher), []
    found = convert_attention(
        model, "rectified", batches, learning_rate=5e-3, progress=lambda done, loss: losses.append(loss)
    )
    swapped = copy.deepcopy(teacher)
    swapped.set_attn_implementation("rectified")
    assert model.config._attn_implementation == "rectified"
    assert not model.training
    assert len(losses) == 60
    assert apart(model, teacher, held_out) < apart(swapped, teacher, held_out) / 3
    assert len(found) == modules
    assert fmean(each.error for each in found) < fmean(each.swapped for each in found)


def test_padding_of_a_causal_model_does_not_count_though_its_stack_is_called_decoder():
    sizes = {**BODY, **SPECIAL, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 32}
    model = AutoModelForCausalLM.from_config(OPTConfig(**sizes), attn_implementation="sdpa")
    ids, other = draw_ids(3, 8), draw_ids(3, 8)
    real = torch.arange(8) < torch.tensor([[8], [5], [3]])
    first, second = (
        convert_attention(copy.deepcopy(model), "rectified", [{"input_ids": each, "attention_mask": real.long()}])
        for each in (ids, torch.where(real, ids, other))
    )
    assert [each.swapped for each in first] == pytest.approx([each.swapped for each in second], rel=1e-6)


def test_what_does_not_fit_is_refused():
    model, batch = AutoModelForCausalLM.from_config(CONFIGS["llama"](), attn_implementation="sdpa"), draw_batch("llama")
    for given, words in [
        (("unheard-of", [batch]), "attention 'unheard-of' is not registered"),
        (("rectified", []), "there are no batches"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            convert_attention(model, *given)
    model.train()
    with pytest.raises(ValueError, match="input_ids"):
        convert_attention(model, "rectified", [{"labels": batch["labels"]}])
    assert (model.config._attn_implementation, model.training) == ("sdpa", True)
    model.set_attn_implementation("rectified")
    with pytest.raises(ArgumentError, match="the model attends by 'rectified' already"):
        convert_attention(model, "rela", [batch])
