"""A conversion that was stopped or killed ends as one that was not: bit for bit on a CPU."""

import signal

from end_to_end.tiny import outcome

STUDENT = {
    "model_variant": "relu-exp", "model_score_bias": "zero", "model_center_keys": "yes", "training_anneal_from": 4,
    "training_anneal_fraction": 0.3, "training_grad_accumulation": 1, "training_steps": 12,
}  # fmt: skip
STOPS = [("advance 5", "SIGKILL"), ("advance 6", "SIGTERM"), ("advance 10", "SIGKILL")]
"""In the first phase, at its end, and in the second."""


def test_a_killed_conversion_ends_as_one_that_was_not(launcher, straight, data, tmp_path):
    shared = {"data": data, "training_grad_accumulation": 1}
    assert launcher.train(tmp_path / "teacher", model_variant="softmax", training_steps=4, **shared).exit == 0
    options = {**shared, **STUDENT, "distillation_teacher": tmp_path / "teacher"}
    for moment, name in STOPS:
        ended = launcher.train(tmp_path / "run", moments={moment: name}, **options)
        assert ended.exit == (-signal.SIGKILL if name == "SIGKILL" else 143)
    assert launcher.train(tmp_path / "run", **options).exit == 0
    assert outcome(tmp_path / "run") == straight(**options)
