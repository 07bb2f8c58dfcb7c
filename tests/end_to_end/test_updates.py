"""Updates that must not happen, updates from the oddest batches, and updates cut into micro-batches."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest
import torch
from end_to_end.tiny import outcome, overrides, steps_on_disk

from rectiformer import VARIANTS
from rectiformer.config import Config, ModelConfig, TrainingConfig
from rectiformer.errors import DivergedError
from rectiformer.model.transformer import Transformer
from rectiformer.runs.folder import weights_of
from rectiformer.text.batches import Batch
from rectiformer.toml import load_config
from rectiformer.train.start import train
from rectiformer.train.update import Updater

SMALL = ModelConfig(hidden_size=16, num_heads=2, encoder_layers=1, decoder_layers=1, ffn_size=16)
VOCABULARY = 40
CPU = torch.device("cpu")


class Injection:
    """Spoils what the model gives in one micro-batch of update 7, and holds the weights it found then."""

    def __init__(self, spoil, micro_batch):
        self.spoil, self.turn = spoil, 2 * 6 + micro_batch
        self.calls = 0

    def __call__(self, module, inputs, output):
        if not isinstance(module, Transformer) or not module.training:
            return None
        self.calls += 1
        if self.calls != self.turn + 1:
            return None
        self.model = module
        self.weights = {name: weight.clone() for name, weight in weights_of(module).items()}
        return self.spoil(output)


def spoil_gradient(output):
    output.register_hook(lambda gradient: gradient * torch.inf)
    return output


SPOILS = {
    "loss": (lambda output: output * torch.nan, 0),
    "loss of the second micro-batch": (lambda output: output + torch.inf, 1),
    "gradient": (spoil_gradient, 1),
}


@pytest.mark.parametrize(("spoil", "micro_batch"), SPOILS.values(), ids=SPOILS)
def test_nothing_is_updated_with_numbers_that_are_not_finite(launcher, straight, data, tmp_path, spoil, micro_batch):
    injection, folder = Injection(spoil, micro_batch), tmp_path / "run"
    hook = torch.nn.modules.module.register_module_forward_hook(injection)
    try:
        with pytest.raises(DivergedError, match="step 7: loss or gradient is not a finite number") as caught:
            train(load_config(None, overrides(training_clip_grad_norm=1.0)), folder, data=data)
    finally:
        hook.remove()
    assert caught.value.exit_code == 5
    assert all(torch.equal(weight, injection.weights[name]) for name, weight in weights_of(injection.model).items())
    assert steps_on_disk(folder)[-1] == 6
    log = [record for record in straight(data=data, training_clip_grad_norm=1.0)["log"] if "loss" in record]
    assert_names_batches(folder / "diverged.json", log[5]["batches"], log[6]["batches"])
    ended = launcher.train(folder, data=data, training_clip_grad_norm=1.0)
    assert (ended.exit, "resumed at step 6" in ended.notes) == (0, True)
    assert outcome(folder) == straight(data=data, training_clip_grad_norm=1.0)


def assert_names_batches(path, before, after):
    """The pairs named are those that lead from one digest of the log to the next."""
    found = json.loads(path.read_bytes())
    digest = hashlib.sha256(before.encode())
    for pairs in found["pairs"]:
        digest.update(np.array(pairs, dtype="<i8").tobytes())
    assert (found["step"], len(found["pairs"]), digest.hexdigest()[:16]) == (7, 2, after)


def build_batch(source_lengths, target_lengths, seed=0):
    """Random ids; a row of which the target has length 0 is only there to fill a shape."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(source_lengths), max(source_lengths), max(target_lengths)
    ids = [torch.randint(4, VOCABULARY, (shape[0], width), generator=generator) for width in shape[1:]]
    lengths = [torch.tensor(lengths) for lengths in (source_lengths, target_lengths)]
    for rows, counts in zip(ids, lengths, strict=True):
        rows[torch.arange(rows.shape[1]) >= counts[:, None]] = 0
    shifted = torch.cat([torch.full((shape[0], 1), 2), ids[1][:, :-1]], 1)
    pairs = np.arange(sum(length > 0 for length in target_lengths))
    return Batch(
        pairs,
        ids[0],
        lengths[0],
        shifted,
        ids[1],
        lengths[1],
        int(lengths[1].sum()),
        full=len(set(source_lengths)) == 1,
    )


def build_updater(model=SMALL, **training):
    torch.manual_seed(0)
    transformer = Transformer(model, VOCABULARY, VOCABULARY)
    return Updater(transformer.train(), Config(model=model, training=TrainingConfig(**training)), CPU)


BATCHES = {
    "an empty source": build_batch([0, 5, 3], [4, 2, 3]),
    "single tokens": build_batch([1, 1], [1, 1]),
    "rows of padding": build_batch([4, 0, 0], [2, 0, 0]),
    "all of it": build_batch([6, 1, 0, 0], [7, 1, 3, 0]),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_oddest_batches_give_finite_updates(variant, precision):
    updater = build_updater(dataclasses.replace(SMALL, variant=variant), precision=precision, warmup=10)
    for step, (name, batch) in enumerate(BATCHES.items(), start=1):
        updater.update(step, [batch])
        assert updater.flat_grad.isfinite().all(), name
        assert updater.flat_grad.abs().max() > 0, name
    assert updater.bad_step == -1
    assert 0 < updater.read().plain < 20
    assert all(weight.isfinite().all() for weight in updater.model.parameters())


@pytest.mark.parametrize("variant", ["rela-g", "reluformer"])
def test_penalties_of_the_oddest_batches_are_finite(variant):
    updater = build_updater(dataclasses.replace(SMALL, variant=variant), mass_penalty=0.1, entropy_penalty=0.1)
    for step, batch in enumerate(BATCHES.values(), start=1):
        updater.update(step, [batch])
        assert updater.flat_grad.isfinite().all()
    assert updater.bad_step == -1


def cut(batch, parts):
    """The same sentences in several batches, each padded as the whole was."""
    rows = len(batch.pairs) // parts
    for start in range(0, len(batch.pairs), rows):
        tensors = {
            item.name: getattr(batch, item.name)[start : start + rows]
            for item in dataclasses.fields(batch)
            if item.name not in ("tokens", "full", "links")
        }
        yield Batch(**tensors, tokens=int(tensors["target_lengths"].sum()))


@pytest.mark.parametrize("smoothing_over", ["others", "all"])
@pytest.mark.parametrize("loss_mean", ["token", "sentence"])
def test_one_large_batch_updates_like_four_small_ones(loss_mean, smoothing_over):
    lengths = torch.randint(1, 33, (2, 256), generator=torch.Generator().manual_seed(0)).tolist()
    batch = build_batch(*lengths)
    assert batch.source.numel() == 8192
    model = dataclasses.replace(SMALL, dropout=0.0, attention_dropout=0.0, ffn_dropout=0.0)
    whole, parts = (build_updater(model, loss_mean=loss_mean, label_smoothing_over=smoothing_over) for _ in range(2))
    whole.update(1, [batch])
    parts.update(1, list(cut(batch, 4)))
    assert (whole.flat_grad - parts.flat_grad).norm() <= 1e-6 * whole.flat_grad.norm()
    assert (whole.tokens, whole.updates) == (parts.tokens, parts.updates)
    ours, theirs = whole.read(), parts.read()
    assert ours.smoothed == pytest.approx(theirs.smoothed, rel=1e-6)
