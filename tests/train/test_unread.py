"""Settings that nothing reads are warned of, and nothing that we ship has any."""

from pathlib import Path

import pytest

from rectiformer.studies.catalog import STUDIES
from rectiformer.studies.plan import SCALES
from rectiformer.toml import load_config
from rectiformer.train.reporting import Reporter
from rectiformer.train.start import announce
from rectiformer.train.unread import UNREAD, find_unread

ROOT = Path(__file__).parents[2]
GIVEN = {
    "data.links": ("a", "training.guided_alignment=1"),
    "training.guided_layer": (1, "training.guided_alignment=1"),
    "training.guided_head": (2, "training.guided_alignment=1"),
    "data.mixed": ("true", "data.segment_length=9"),
    "vocabulary.copies": (2, "vocabulary.sampling=0.1"),
    "model.norm_epsilon": (0.01, "model.cross_variant=rela"),
    "model.gamma_sharing": ("layer", "model.cross_variant=reluformer"),
    "model.gamma_init": (2, "model.cross_variant=reluformer"),
    "model.alpha_sharing": ("layer", "model.variant=entmax"),
    "model.alpha_init": (2, "model.variant=entmax"),
    "model.beta_sharing": ("layer", "model.variant=threshold-diff"),
    "model.beta_init": (2, "model.variant=threshold"),
    "training.decay_fraction": (0.1, "training.schedule=wsd"),
    "training.anneal_fraction": (0.1, "training.anneal_from=16"),
    "training.penalty_warmdown": (0.1, "training.mass_penalty=1"),
    "training.entropy_of": ("raw", "training.entropy_penalty=1"),
    "distillation.teacher_step": (3, "distillation.teacher=run"),
    "distillation.align": (0.1, "distillation.teacher=run"),
}
"""Each setting of the table: a value, and what has it read."""


def warnings(*settings: str) -> list[str]:
    return list(find_unread(load_config(None, [*settings])))


def test_every_row_of_the_table_is_tested():
    assert set(GIVEN) == {key for row in UNREAD for key in row.keys}


@pytest.mark.parametrize("key", GIVEN)
def test_a_setting_that_nothing_reads_is_warned_of(key):
    value, reader = GIVEN[key]
    (warning,) = warnings("model.variant=softmax", f"{key}={value}")
    assert warning.startswith(f"warning: {key} is given, but ")
    assert warnings("model.variant=softmax", f"{key}={value}", reader) == []


def test_one_reason_is_said_once_and_before_training(tmp_path):
    notes: list[str] = []
    reporter = Reporter()
    reporter.note = notes.append
    settings = ["data.links=a", "training.guided_layer=1", "training.warmup=9"]
    announce(load_config(None, settings), tmp_path, resume=False, reporter=reporter)
    assert notes == [
        "warning: data.links, training.guided_layer are given, but training.guided_alignment = 0, so nothing is "
        "done with them"
    ]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_configurations_have_none(path):
    assert list(find_unread(load_config(path))) == []


@pytest.mark.parametrize("scale", SCALES)
def test_studies_have_none(scale):
    for study in STUDIES.values():
        for training in study.trainings(study.at(scale)):
            assert list(find_unread(training.config)) == [], training
