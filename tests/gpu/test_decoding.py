"""Decoding a token at a time in bf16, captured or not, says what decoding whole sequences says, for every variant."""

import copy

import pytest
import torch

from rectiformer import VARIANTS
from rectiformer.model.norms import OUTPUT_NORMS
from rectiformer.model.transformer import Transformer
from rectiformer.studies.recipes import OPEN, THRESHOLD, attention_settings
from rectiformer.toml import load_config
from rectiformer.translate.options import SearchBatch, SearchOptions, Specials
from rectiformer.translate.search import search
from rectiformer.translate.translator import cast_weights

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # torch's own warnings
DEVICE = "cuda"
WORDS, START, STEPS = 60, 2, 100
SPECIALS = Specials(pad=0, unk=1, bos=START, eos=3)
LENGTHS = [70, 41, 17, 128]
CASES = {
    **{name: (f"model.variant={name}",) for name in VARIANTS},
    **{name: attention_settings(name) for name in (OPEN, THRESHOLD)},
    **{f"{name} norm": ("model.variant=rela-g", f"model.output_norm={name}") for name in OUTPUT_NORMS},
}


def build(case):
    """The same model twice: in float64, and held in bf16 as a translator on a GPU holds it."""
    sizes = ("hidden_size=512", "num_heads=8", "ffn_size=64", "encoder_layers=1", "decoder_layers=2", "norm=pre")
    torch.manual_seed(1)
    settings = [*(f"model.{size}" for size in sizes), *CASES[case]]
    model = Transformer(load_config(None, settings).model, WORDS, WORDS, START).to(DEVICE).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())  # so that both hold the same numbers
    held = copy.deepcopy(model)
    cast_weights(held, torch.bfloat16)
    return model.double(), held


def draw(*shape):
    return torch.randint(4, WORDS, shape, device=DEVICE)


def spread(error):
    return error.double().square().mean().sqrt().item()


@pytest.mark.parametrize("case", CASES)
def test_steps_err_no_more_than_whole_sequences(case):
    exact, held = build(case)
    source, lengths = draw(len(LENGTHS), max(LENGTHS)), torch.tensor(LENGTHS, device=DEVICE)
    target = draw(len(LENGTHS), STEPS)
    target[:, 0] = START
    with torch.inference_mode():
        true = exact(source, lengths, target)
        whole = held(source, lengths, target)
        state = held.begin_static(held.encode(source, lengths), 1, 128)
        steps = torch.stack([held.step(target[:, index], state) for index in range(STEPS)], 1)
    assert spread(steps - true) <= 2 * spread(whole - true)
    late = slice(STEPS // 2, None)
    assert spread((steps - true)[:, late]) <= 2 * spread((whole - true)[:, late])


@pytest.mark.parametrize("case", ["softmax", "rela-g", "reluformer", OPEN, "sparsemax", "layer norm"])
def test_captured_beam_search_gives_its_translations_the_scores_that_they_have(case):
    """Through beams, hypotheses that change rows, and capacities that grow."""
    exact, held = build(case)
    sources = [[*draw(length - 1).tolist(), SPECIALS.eos] for length in LENGTHS]
    found = search(held, SearchBatch(sources, SearchOptions(beam=4), SPECIALS))
    errors = []
    with torch.inference_mode():
        for source, hypotheses in zip(sources, found, strict=True):
            best = hypotheses[0]
            written = [*best.ids, *([SPECIALS.eos] if best.ended else [])]
            target = torch.tensor([[START, *written[:-1]]], device=DEVICE)
            ids, lengths = torch.tensor([source], device=DEVICE), torch.tensor([len(source)], device=DEVICE)
            logits = [model(ids, lengths, target)[0].double().log_softmax(-1) for model in (exact, held)]
            true, whole = (each.gather(1, torch.tensor(written, device=DEVICE)[:, None])[:, 0] for each in logits)
            searched = torch.tensor(best.token_scores, device=DEVICE, dtype=torch.float64)
            errors.append((spread(searched - true), spread(whole - true)))
    assert max(len(each[0].ids) for each in found) > 64
    ours, plain = (sum(error**2 for error in side) ** 0.5 for side in zip(*errors, strict=True))
    assert ours <= 2 * plain
