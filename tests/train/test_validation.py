"""Validation: a loss that batches cannot change, translations that end, and a model that trains on afterwards."""

import pytest
import torch
import torch.nn.functional as F

from rectiformer.config import Config, DataConfig, ModelConfig, TrainingConfig, ValidationConfig, VocabularyConfig
from rectiformer.model.transformer import Transformer
from rectiformer.text.prepared import prepare
from rectiformer.train.validation import EXTRA_LENGTH, Validation, Validator
from rectiformer.translate.evaluate import symbols_of

MODEL = ModelConfig(
    hidden_size=16, num_heads=2, encoder_layers=1, decoder_layers=1, ffn_size=16, dropout=0.5, tie_embeddings="none"
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    data = DataConfig(sentences=200, valid_sentences=30)
    config = Config(data=data, vocabulary=VocabularyConfig(size=120))
    return prepare(config, tmp_path_factory.mktemp("validation") / "data")


def build(prepared, check=lambda: None, tokens=200, precision="fp32", **validation):
    config = Config(
        model=MODEL,
        training=TrainingConfig(batch_tokens=tokens, precision=precision),
        validation=ValidationConfig(**{"sentences": 6, **validation}),
    )
    torch.manual_seed(0)
    model = Transformer(MODEL, prepared.source.size, prepared.target.size, bos=prepared.target.bos).train()
    return Validator(model, prepared, config, check)


def loss_by_hand(model, prepared):
    """Cross-entropy of every validation pair, one by one, without any padding."""
    source, target, valid = prepared.source, prepared.target, prepared.valid
    total = tokens = 0.0
    for index in range(valid.pairs):
        ids = torch.tensor([[*valid.source(index).tolist(), source.eos]])
        words = [*valid.target(index).tolist(), target.eos]
        logits = model(ids, None, torch.tensor([[target.bos, *words[:-1]]]))
        total += F.cross_entropy(logits[0], torch.tensor(words), reduction="sum").item()
        tokens += len(words)
    return total / tokens


@pytest.mark.parametrize("tokens", [1, 60, 100_000])
def test_the_loss_is_that_of_all_pairs_whatever_the_batches(prepared, tokens):
    validator = build(prepared, tokens=tokens)
    found = validator.validate()
    assert found.loss == pytest.approx(loss_by_hand(validator.model.eval(), prepared), rel=1e-5)


def test_a_validation_is_repeatable_and_leaves_the_model_as_it_was(prepared):
    validator = build(prepared, beam=2)
    before = {name: tensor.clone() for name, tensor in validator.model.state_dict().items()}
    first, second = validator.validate(), validator.validate()
    assert (first.loss, first.bleu, first.chrf) == (second.loss, second.bleu, second.chrf)
    assert first.seconds > 0
    assert validator.model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in validator.model.state_dict().items())
    validator.model(torch.tensor([[5, 6]]), None, torch.tensor([[2, 5]])).sum().backward()


def test_a_model_that_never_ends_costs_little(prepared):
    validator = build(prepared, sentences=30)
    with torch.no_grad():  # every state is the vector of ones, so the scores are the sums of the output's rows
        norm = validator.model.decoder[-1].around_memory.norm
        norm.weight.zero_()
        norm.bias.fill_(1.0)
        validator.model.output[prepared.target.eos] = -10.0
    rows, step = [], validator.model.step
    validator.model.step = lambda ids, state: rows.append(len(ids)) or step(ids, state)
    assert validator.validate().bleu == pytest.approx(0.0, abs=1.0)
    lengths = [len(prepared.source.encode(source)) + 1 for source, _ in prepared.valid_text]
    assert sum(rows) <= sum(lengths) + len(lengths) * EXTRA_LENGTH


@pytest.mark.parametrize(("calls", "training"), [(1, True), (2, False), (None, True)])
def test_what_check_raises_ends_the_validation(prepared, calls, training):
    """At the first batch of the loss, between two, and after the last batch of translations."""
    made = []
    if calls is None:
        build(prepared, lambda: made.append(None), tokens=100, sentences=2).validate()
        calls = len(made)
        made.clear()

    def check():
        made.append(None)
        if len(made) == calls:
            raise InterruptedError

    validator = build(prepared, check, tokens=100, sentences=2)
    validator.model.train(training)
    with pytest.raises(InterruptedError):
        validator.validate()
    assert len(made) == calls
    assert validator.model.training == training
    assert not torch.is_inference_mode_enabled()


def test_only_as_many_sentences_are_translated_as_asked(prepared):
    done = []
    validator = build(prepared, sentences=4, tokens=1)
    translate = validator.translator.translate
    validator.translator.translate = lambda lines, *args, **named: (
        done.extend(lines) or translate(lines, *args, **named)
    )
    validator.validate()
    assert done == [source for source, _ in prepared.valid_text[:4]]


def test_a_higher_value_is_always_better():
    found = Validation(loss=2.5, bleu=30.0, chrf=50.0, seconds=1.0)
    assert [found.value(metric) for metric in ("loss", "bleu", "chrf")] == [-2.5, 30.0, 50.0]


def test_symbols_are_those_of_each_side(prepared):
    symbols = symbols_of(prepared)
    assert (symbols.source_pad, symbols.source_end) == (prepared.source.pad, prepared.source.eos)
    assert (symbols.target_pad, symbols.target_end) == (prepared.target.pad, prepared.target.eos)
    assert symbols.target_start == prepared.target.bos
