"""The sealed record of a run: a damaged config.toml is never trained with, and an allowed change survives a kill."""

import dataclasses
import os
import random
import signal

import pytest

from rectiformer.config import Config, ModelConfig, TrainingConfig, VocabularyConfig
from rectiformer.errors import CheckpointError
from rectiformer.runs.folder import create_run, open_run, resume_run
from rectiformer.text.vocabulary import Vocabulary
from rectiformer.toml import to_toml

SMALL = ModelConfig(hidden_size=8, num_heads=2, encoder_layers=1, decoder_layers=1, ffn_size=8)
CONFIG = Config(model=SMALL, vocabulary=VocabularyConfig(size=40))


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.train([f"ein kleines haus {number}" for number in range(50)], CONFIG.vocabulary)


@pytest.fixture
def run(tmp_path, vocabulary):
    return create_run(tmp_path / "run", CONFIG, vocabulary, vocabulary, data_hash="d" * 64)


def damage_and_open(run, text):
    """What a run says whose config.toml holds `text`: "" where it opens, as what it was created as."""
    (run.path / "config.toml").write_bytes(text)
    try:
        opened = open_run(run.path)
    except CheckpointError as error:
        message = str(error)
    else:
        assert opened.config == CONFIG
        return ""
    assert message.startswith(f"{run.path / 'config.toml'} is ")
    assert "delete the file: run.json holds what it said" in message
    assert message.isprintable()
    return message


def flip(data, bit):
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def count_refused(run, flips):
    """How many of so many flipped bits of config.toml are refused; the others must mean the same."""
    text = (run.path / "config.toml").read_bytes()
    bits = random.Random(0).choices(range(8 * len(text)), k=flips)
    return sum(damage_and_open(run, flip(text, bit)) != "" for bit in bits)


def test_a_flipped_bit_of_the_configuration_is_refused_or_means_nothing(run):
    assert count_refused(run, 200) > 190


@pytest.mark.slow
def test_ten_thousand_flipped_bits_are_refused_or_mean_nothing(run):
    assert count_refused(run, 10_000) > 9_500


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.9])
def test_a_configuration_cut_short_is_refused(run, share):
    text = (run.path / "config.toml").read_bytes()
    assert damage_and_open(run, text) == ""
    within_a_line = text.index(b" = ", int(share * len(text))) + 3  # at the end of one, defaults may stand for the rest
    assert damage_and_open(run, text[:within_a_line])


def test_each_changed_key_is_named_with_both_values(run):
    text = (run.path / "config.toml").read_text()
    changed = text.replace("steps = 2000", "steps = 6000").replace("beta1 = 0.9", "beta1 = 0.8")
    message = damage_and_open(run, changed.encode())
    assert "training.steps = 6000 (saved: 2000), training.beta1 = 0.8 (saved: 0.9); undo that" in message


def test_a_configuration_that_is_gone_is_written_again_on_resume(run):
    (run.path / "config.toml").unlink()
    opened = open_run(run.path)
    assert opened.config == CONFIG
    resume_run(opened, CONFIG, run.data_hash)
    assert (run.path / "config.toml").read_text() == to_toml(CONFIG)


def test_comments_in_the_configuration_stay_where_nothing_changes(run):
    path = run.path / "config.toml"
    path.write_text(path.read_text() + "# mine\n")
    resume_run(open_run(run.path), CONFIG, run.data_hash)
    assert path.read_text().endswith("# mine\n")


def test_every_flipped_bit_of_the_record_is_refused(run):
    data = (run.path / "run.json").read_bytes()
    for bit in range(0, 8 * len(data), 331):
        (run.path / "run.json").write_bytes(flip(data, bit))
        with pytest.raises(CheckpointError, match=r"run\.json is damaged"):
            open_run(run.path)


def die_in_resume(run, config):
    """Resume in a process that is killed between the two files it writes."""
    child = os.fork()
    if child == 0:
        os.environ["RECTIFORMER_FAILPOINT"] = "before-config"
        try:
            resume_run(open_run(run.path), config, run.data_hash)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_kill_between_record_and_configuration_loses_neither(run):
    """Twice: the second change must not leave a config.toml that is older than what the record knows."""
    for steps in (9, 11):
        config = dataclasses.replace(CONFIG, training=TrainingConfig(steps=steps))
        die_in_resume(run, config)
        assert f"steps = {steps}\n" not in (run.path / "config.toml").read_text()
        assert open_run(run.path).config == config
    resume_run(open_run(run.path), config, run.data_hash)
    assert (run.path / "config.toml").read_text() == to_toml(config)
    assert open_run(run.path).config == config
