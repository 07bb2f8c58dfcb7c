"""Strict configuration: what is wrong is named, with the nearest right thing."""

import dataclasses
from pathlib import Path

import pytest

from rectiformer import MEMORIES, VARIANTS, ConfigError
from rectiformer.config import Config, DataConfig
from rectiformer.toml import docstrings, load_config, to_toml

SHIPPED = sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))


def write(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_file_and_overrides_in_that_order(tmp_path):
    path = write(tmp_path, "[model]\nhidden_size = 32\n[training]\nsteps = 7\nlearning_rate = 2\n")
    config = load_config(path, ["training.steps=9", "model.variant=softmax"])
    assert config.model.hidden_size == 32
    assert config.model.variant == "softmax"
    assert config.training.steps == 9
    assert config.training.learning_rate == 2.0
    assert config.training.batch_tokens == Config().training.batch_tokens


def test_one_file_or_a_list_of_files(tmp_path):
    path = write(tmp_path, "[data]\nsource = 'a.de'\ntarget = ['a.en', 'b.en']\n")
    config = load_config(path, ["data.valid_source=-"])
    assert config.data.source == ("a.de",)
    assert config.data.target == ("a.en", "b.en")
    assert config.data.valid_source == ("-",)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.num_heads=8", "training.epsilon=1e-9", "log.tensorboard=true"],
        ["data.source='a \"b\\\\c\".de'", "data.target=['tab\\t.en', 'ü.en']"],
    ],
    ids=["defaults", "numbers", "hostile names"],
)
def test_printed_configuration_reads_back(tmp_path, overrides):
    config = load_config(None, overrides)
    assert load_config(write(tmp_path, to_toml(config))) == config
    assert load_config(write(tmp_path, to_toml(config, comments=True))) == config


def test_comments_say_of_every_key_what_it_is_about():
    text = to_toml(Config(), comments=True)
    assert "\n# The loop.\n[training]\n# Updates.\nsteps = 2000\n" in text
    assert "\n# Label smoothing.\nlabel_smoothing = 0.1\n# Where the smoothed mass goes:" in text
    assert '\n# One of "auto", "cpu", "cuda".\ndevice = "auto"\n' in text
    keys = {f"{type(getattr(Config(), name)).__name__}.{key}" for name, key in every_key()}
    assert set(docstrings()) - {name.split(".")[0] for name in keys} - {"Config"} <= keys
    said = " ".join(text.replace("\n#", "").split())
    assert all(" ".join(about.split()) in said for name, about in docstrings().items() if name != "Config")
    assert max(map(len, text.split("\n"))) <= 120


def every_key():
    """Section and name of every key."""
    for section in dataclasses.fields(Config):
        for key in dataclasses.fields(getattr(Config(), section.name)):
            yield section.name, key.name


def test_every_character_of_a_file_name_reads_back(tmp_path):
    name = "".join(map(chr, [*range(1, 256), 0x2028, 0x10FFFF]))
    config = Config(data=DataConfig(source=(name,)))
    assert load_config(write(tmp_path, to_toml(config))) == config


def test_a_file_name_that_no_configuration_can_hold_is_refused():
    name = b"\xff.de".decode(errors="surrogateescape")  # as the command line gives it
    for value in (name, f"['a.de', '{name}']"):
        with pytest.raises(
            ConfigError, match=r"data\.source = '\\udcff\.de', but its bytes are not UTF-8; rename"
        ) as caught:
            load_config(None, [f"data.source={value}"])
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configurations_name_what_there_is(path):
    model = load_config(path).model
    assert {model.variant_at(kind) for kind in ("encoder", "decoder", "cross")} <= set(VARIANTS)
    assert model.memory in MEMORIES


def test_tiny_writes_out_every_default():
    (tiny,) = [path for path in SHIPPED if path.name == "tiny.toml"]
    assert load_config(tiny) == Config()
    text = tiny.read_text(encoding="utf-8")
    written = {line.partition(" =")[0] for line in text.split("\n") if " = " in line and not line.startswith("#")}
    assert written == {line.partition(" =")[0] for line in to_toml(Config()).split("\n") if " = " in line}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[model]\nvarient = 'rela'", "unknown key 'model.varient'; did you mean 'variant' or"),
        ("[modle]\nhidden_size = 3", "unknown key 'modle'; did you mean 'model'?"),
        ("model = 3", "'model' must be a section, not 3"),
        ("[model]\nhidden_size = 'wide'", "model.hidden_size = 'wide', but it must be an int"),
        ("[model]\nhidden_size = true", "model.hidden_size = True, but it must be an int"),
        ("[log]\ntensorboard = 1", "log.tensorboard = 1, but it must be a bool"),
        ("[model]\nhidden_size = 10\nnum_heads = 4", "model.num_heads = 4 does not divide model.hidden_size = 10"),
        ("[model]\nnum_heads = 0", "model.num_heads = 0, but it must be at least 1"),
        ("[model]\ndropout = 1.0", "model.dropout = 1.0, but it must be at least 0 and below 1"),
        ("[training]\nlearning_rate = nan", "training.learning_rate = nan, but it must be at least 0"),
        (
            "[training]\noptimizer = 'adamx'",
            "unknown value of training.optimizer 'adamx'; did you mean 'adam' or 'adamw'?",
        ),
        ("[data]\nsource = [1]", "data.source = [1], but it must be a file name or a list of them"),
        ("[model", "is not valid TOML"),
    ],
)
def test_mistakes_are_named(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


OLD_KEYS = {
    "model.width": "hidden_size",
    "model.heads": "num_heads",
    "model.slots": "ffn_size",
    "model.slot_dropout": "ffn_dropout",
    "model.order": "norm",
    "model.tie": "tie_embeddings",
    "model.learn": "gamma_sharing",
    "model.learned_start": "gamma_init",
    "model.center": "center_keys",
    "model.open": "score_bias",
    "model.threshold": "score_bias",
    "training.tokens": "batch_tokens",
    "training.accumulate": "grad_accumulation",
    "training.rate": "learning_rate",
    "training.clip": "clip_grad_norm",
    "training.smoothing": "label_smoothing",
    "training.smoothing_over": "label_smoothing_over",
    "training.start": "init_from",
    "training.average": "average_checkpoints",
    "data.longest": "max_length",
    "data.segment": "segment_length",
    "checkpoint.wait": "async_save",
}
"""Keys of earlier trees, and what is one instead."""


@pytest.mark.parametrize(("old", "new"), OLD_KEYS.items())
def test_a_key_of_an_earlier_tree_is_no_key_and_the_message_names_todays(old, new):
    section, key = old.split(".")
    fields = {item.name for item in dataclasses.fields(getattr(Config(), section))}
    assert new in fields
    assert key not in fields
    with pytest.raises(ConfigError, match=rf"^unknown key '{old}'; .*\b{new}\b") as caught:
        load_config(None, [f"{old}=1"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.heads=4", "unknown key 'model.heads'; did you mean 'num_heads'?"),
        ("training.rate=1", "unknown key 'training.rate'; did you mean 'learning_rate'?"),
        ("training.clip=1", "unknown key 'training.clip'; did you mean 'clip_grad_norm'?"),
        ("checkpoint.wait=true", "unknown key 'checkpoint.wait'; known are every, keep, async_save"),
    ],
    ids=["near", "last word of a key", "first word of a key", "nothing near"],
)
def test_an_unknown_key_is_told_the_nearest_or_all(override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert str(caught.value) == message


@pytest.mark.parametrize("override", ["steps=3", "training.steps", "training.=3", "=3", "training.steps="])
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


NESTED = "[" * 3_000
DIGITS = "1" * 5_000
HEX = f"0x{'f' * 2_000}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"[data]\nweights = {NESTED}", "is not valid TOML: brackets are nested too deeply"),
        (f"[training]\nsteps = {DIGITS}", "is not valid TOML: Exceeds the limit (4300 digits)"),
        (f"[training]\nsteps = {HEX}", "..., but it must be at least 1 and below 2147483648"),
        (f"[training]\nepsilon = {HEX}", "training.epsilon = inf, but it must be at least 0 and below 1e+30"),
        (f"[data]\nweights = [{HEX}]", "data.weights has inf, but each must be more than 0"),
        ('[data]\nsource = "a\\u0000b"', "data.source = 'a\\x00b', but no name can have a NUL character in it"),
        ('[training]\ninit_from = "\\u0000"', "training.init_from = '\\x00', but no name can have a NUL"),
    ],
    ids=["nesting", "digits", "hexadecimal", "float", "weights", "NUL in a list", "NUL"],
)
def test_what_only_an_attacker_writes_is_named_too(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300


EXTREMES = [
    "-1", "2147483648", "18446744073709551616", "1e30", str(10**30), "1e308", "-1e308", "nan", "inf", "-inf", HEX,
    DIGITS, NESTED, "true", "'word'", "[1]", "[1e308]", "{a = 1}", "1979-05-27", '"\\u0000"',
]  # fmt: skip
KEYS = [(section, key) for section, values in vars(Config()).items() for key in vars(values)]


@pytest.mark.parametrize(("section", "key"), KEYS, ids=lambda name: name)
def test_extreme_values_of_every_key_are_taken_or_named(section, key):
    for value in EXTREMES:
        found = take_or_name(section, key, value)
        if isinstance(found, ConfigError):
            assert f"{section}.{key}" in str(found)
            assert "\n" not in str(found)
        elif isinstance(found, int | float):
            assert 0 <= found < (1e30 if isinstance(found, float) else 2**63)


def take_or_name(section, key, value):
    """The value of a key as it was taken, or the error that names it."""
    try:
        return getattr(getattr(load_config(None, [f"{section}.{key}={value}"]), section), key)
    except ConfigError as error:
        return error
