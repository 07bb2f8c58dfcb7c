"""The commands as a user runs them, in processes of their own."""

import os
import subprocess
import sys

import pytest

from rectiformer import VARIANTS, __version__


def rectiformer(*arguments, columns=160):
    return subprocess.run(
        [sys.executable, "-m", "rectiformer", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1"},
    )


def test_variants_lists_the_whole_table():
    run = rectiformer("variants")
    assert run.returncode == 0
    for variant in VARIANTS.values():
        (line,) = [line for line in run.stdout.splitlines() if line.split(" ")[0] == variant.name]
        assert variant.formula in line
        assert variant.paper in line
        assert ", ".join(variant.implementations) in line


@pytest.mark.parametrize("name", ["rela-g", "entmax"])
def test_one_variant_in_full(name):
    run = rectiformer("variants", name)
    variant = VARIANTS[name]
    assert run.returncode == 0
    for part in (variant.formula, variant.paper, variant.use, variant.output_norm, *variant.options):
        assert part in run.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["variants", "relu"], "rectiformer: unknown variant 'relu'; did you mean 'relu2'"),
        (["config", "missing.toml"], "rectiformer: cannot read missing.toml: No such file or directory"),
        (["demo", "--set", "demo.stepz=3"], "rectiformer: unknown key 'demo.stepz'; did you mean 'steps'"),
        (["demo", "--set", "attention.variant=soft"], "rectiformer: unknown variant 'soft'; did you mean 'softmax'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, words):
    run = rectiformer(*arguments)
    assert run.returncode == 2
    assert run.stderr.startswith(words)
    assert run.stderr.count("\n") == 1
    assert "Traceback" not in run.stderr


def test_help_names_every_command_with_a_sentence():
    text = rectiformer("--help").stdout
    for command in ("variants", "config", "demo"):
        assert command in text
        help_text = rectiformer(command, "--help")
        assert help_text.returncode == 0
        assert f"Usage: python -m rectiformer {command}" in help_text.stdout


def test_version_is_the_packages():
    run = rectiformer("--version")
    assert run.returncode == 0
    assert run.stdout.strip() == f"rectiformer {__version__}"


def test_config_prints_toml_with_overrides():
    run = rectiformer("config", "--set", "demo.steps=3")
    assert run.returncode == 0
    assert "[demo]\nsteps = 3\n" in run.stdout


def test_demo_shows_both_heads():
    run = rectiformer("demo", "--set", "demo.steps=8")
    assert run.returncode == 0, run.stderr
    assert "training rela-g: step 8 of 8" in run.stdout
    assert "rela-g: " in run.stdout
    assert "softmax: " in run.stdout
