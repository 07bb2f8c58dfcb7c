"""Strict configuration: what is wrong is named, with the nearest right thing."""

import pytest

from rectiformer import ConfigError
from rectiformer.config import Config, load_config, to_toml


def write(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_defaults_file_and_overrides_in_that_order(tmp_path):
    path = write(tmp_path, "[attention]\nwidth = 32\n[demo]\nsteps = 7\nlearning_rate = 1\n")
    config = load_config(path, ["demo.steps=9", "attention.variant=softmax"])
    assert config.attention.width == 32
    assert config.attention.variant == "softmax"
    assert config.demo.steps == 9
    assert config.demo.learning_rate == 1.0
    assert config.demo.batch == Config().demo.batch


def test_printed_configuration_reads_back(tmp_path):
    config = load_config(None, ["attention.heads=4", "demo.learning_rate=0.001"])
    assert load_config(write(tmp_path, to_toml(config))) == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[attention]\nvarient = 'rela'", "unknown key 'attention.varient'; did you mean 'variant'?"),
        ("[atention]\nwidth = 3", "unknown key 'atention'; did you mean 'attention'?"),
        ("attention = 3", "'attention' must be a section, not 3"),
        ("[attention]\nwidth = 'wide'", "attention.width = 'wide', but it must be an int"),
        ("[attention]\nwidth = true", "attention.width = True, but it must be an int"),
        ("[attention]\nwidth = 10\nheads = 4", "heads = 4 does not divide width = 10"),
        ("[attention]\nheads = 0", "width = 64, heads = 0; each must be at least 1"),
        ("[attention]\ndropout = 1.5", "dropout = 1.5, but it is a probability below 1"),
        ("[demo]\nsteps = 0", "steps = 0, but it must be at least 1"),
        ("[demo]\nsentence = 99", "sentence = 99, but"),
        ("[demo]\nlearning_rate = -1", "learning_rate = -1.0, but it must be above 0"),
        ("[attention", "is not valid TOML"),
    ],
)
def test_mistakes_are_named(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("override", ["steps=3", "demo.steps", "demo.=3", "=3", "demo.steps="])
def test_malformed_overrides_are_named(override):
    with pytest.raises(ConfigError, match=r"is not of the form section\.key=value"):
        load_config(None, [override])


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.toml: No such file or directory"):
        load_config(tmp_path / "missing.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_config(binary)
