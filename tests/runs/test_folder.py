"""Run folders: what is written is read back, and whatever was changed or does not fit is refused by name."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest
import torch

from rectiformer.config import Config, DataConfig, LogConfig, ModelConfig, TrainingConfig, VocabularyConfig
from rectiformer.errors import CheckpointError
from rectiformer.runs.checkpoint import save_checkpoint
from rectiformer.runs.folder import (
    Run,
    changed_keys,
    create_run,
    load_model,
    load_weights,
    open_run,
    resume_run,
    weights_of,
)
from rectiformer.text.vocabulary import Vocabulary

SMALL = ModelConfig(hidden_size=8, num_heads=2, encoder_layers=1, decoder_layers=1, ffn_size=8)
CONFIG = Config(model=SMALL, vocabulary=VocabularyConfig(size=40))


@pytest.fixture(scope="module")
def vocabularies():
    words = ("ein kleines haus", "the small house", "zwei alte wagen", "two old cars")
    return [Vocabulary.train([f"{word} {number}" for word in words for number in range(50)], CONFIG.vocabulary)] * 2


@pytest.fixture
def run(tmp_path, vocabularies):
    return create_run(tmp_path / "run", CONFIG, *vocabularies, data_hash="d" * 64)


def save_step(run, step, *names, value=0.0, **options):
    """A checkpoint whose sets of weights `names` are `value`, `value` + 1 and so on everywhere."""
    tensors = {
        name: {key: torch.full_like(tensor, value + number) for key, tensor in weights_of(run.build_model()).items()}
        for number, name in enumerate(names)
    }
    return save_checkpoint(run.path, step, tensors, {}, run.identity, **options)


def first_weight(model):
    return model.target_embedding.table[0, 0].item()


def test_an_opened_run_is_the_created_one(run):
    opened = open_run(run.path)
    assert opened.config == CONFIG
    assert opened.identity == run.identity
    assert opened.data_hash == "d" * 64
    assert opened.source.encode("ein haus") == run.source.encode("ein haus")


def test_keys_that_came_later_change_no_hash_of_older_runs(vocabularies):
    """The hash that checkpoints carried before there were such keys."""
    run = Run(Path(), Config(), *vocabularies, "")
    assert run.identity["config"] == "aee33a8e47e88a537fb6ca18d580a97e8600ef3b35450c5b380801e8a4bd5590"
    other = dataclasses.replace(run, config=Config(model=ModelConfig(attention_power=3)))
    assert other.identity["config"] != run.identity["config"]


def test_the_model_is_built_for_the_vocabulary(run):
    model = run.build_model()
    assert model.output.shape == (run.target.size, 8)
    assert model.target_embedding.bos == run.target.bos


def test_a_folder_in_use_is_not_created_again(run, vocabularies):
    with pytest.raises(CheckpointError, match="exists; use --resume to go on with it, or another --out"):
        create_run(run.path, CONFIG, *vocabularies, data_hash="")


def test_a_folder_with_nothing_but_its_lock_is_free(tmp_path, vocabularies):
    (tmp_path / "run.lock").touch()
    created = create_run(tmp_path, CONFIG, *vocabularies, data_hash="")
    assert open_run(tmp_path).identity == created.identity


@pytest.mark.parametrize("name", ["run.json", "source.model", "target.model"])
def test_what_is_missing_is_named(run, name):
    (run.path / name).unlink()
    with pytest.raises(CheckpointError, match=f"no complete run folder: {name} is missing"):
        open_run(run.path)
    os.mkfifo(run.path / name)  # opening it for reading would wait forever
    with pytest.raises(CheckpointError, match=f"{name} is missing or not a file"):
        open_run(run.path)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no run folder .*nowhere; `rectiformer train` makes one"):
        open_run(tmp_path / "nowhere")


@pytest.mark.parametrize("count", [2, 9])
def test_a_folder_of_runs_names_them(tmp_path, vocabularies, count):
    names = [str(create_run(tmp_path / f"run-{i}", CONFIG, *vocabularies, data_hash="").path) for i in range(count)]
    (tmp_path / "notes").mkdir()
    with pytest.raises(CheckpointError) as caught:
        open_run(tmp_path)
    more = " and 1 more" if count == 9 else ""
    assert str(caught.value) == f"{tmp_path} is no run but holds some; name one: {', '.join(names[:8])}{more}"


def test_an_exported_folder_is_told_from_a_damaged_run(tmp_path):
    (tmp_path / "export.json").touch()
    with pytest.raises(CheckpointError, match="is exported, and this needs the run folder it was made from"):
        open_run(tmp_path)


@pytest.mark.parametrize("name", ["source.model", "target.model"])
def test_a_changed_vocabulary_is_refused(run, name):
    data = bytearray((run.path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (run.path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name} has hash .* expected {run.source.sha256}"):
        open_run(run.path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": 2}', '{"format": 2, "identity": {}}', '{"format": 1, "identity": {}}', "[" * 9999],
)
def test_a_damaged_record_is_refused(run, text):
    (run.path / "run.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"run\.json is damaged"):
        open_run(run.path)


def test_a_key_that_config_toml_does_not_know_is_named(run):
    path = run.path / "config.toml"
    path.write_text(path.read_text().replace("heads = 2", "haeds = 2"))
    with pytest.raises(CheckpointError, match=r"config\.toml is damaged: unknown key 'model\.num_haeds'"):
        open_run(run.path)


def test_changed_keys_are_those_that_differ():
    new = dataclasses.replace(
        CONFIG,
        training=TrainingConfig(learning_rate=2.0, steps=7),
        log=LogConfig(every=1),
        data=DataConfig(source=("a",)),
    )
    assert changed_keys(CONFIG, CONFIG) == []
    assert changed_keys(CONFIG, new) == ["data.source", "training.steps", "training.learning_rate", "log.every"]


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("log", "every", 7),
        ("checkpoint", "keep", 9),
        ("validation", "beam", 2),
        ("training", "steps", 9),
        ("training", "device", "cuda"),
        ("training", "compile", "no"),
        ("data", "source", ("elsewhere",)),
    ],
)
def test_a_free_key_may_change_on_resume_and_stays_changed(run, section, key, value):
    new = dataclasses.replace(CONFIG, **{section: dataclasses.replace(getattr(CONFIG, section), **{key: value})})
    assert resume_run(run, new, run.data_hash).config == new
    assert open_run(run.path).config == new


def test_a_changed_run_is_not_resumed_and_keeps_its_configuration(run):
    new = dataclasses.replace(
        CONFIG, model=dataclasses.replace(SMALL, num_heads=4), training=TrainingConfig(learning_rate=2.0, steps=7)
    )
    with pytest.raises(
        CheckpointError, match=r"model\.num_heads = 4 \(was 2\), training\.learning_rate = 2\.0 \(was 1\.0\); undo"
    ):
        resume_run(run, new, run.data_hash)
    with pytest.raises(CheckpointError, match="the data has hash eeeeeeeeeeee, but it was trained on dddddddddddd"):
        resume_run(run, CONFIG, "e" * 64)
    assert open_run(run.path).config == CONFIG


def test_each_way_to_name_a_checkpoint(run):
    notices = []
    save_step(run, 10, "model", value=1.0, best=True)
    save_step(run, 20, "model", value=2.0)
    for name, step, value in [
        ("best", 10, 1.0),
        ("latest", 20, 2.0),
        ("10", 10, 1.0),
        (str(run.path / "checkpoints" / "step-00000020"), 20, 2.0),
    ]:
        model, found = load_model(run, name, notice=notices.append)
        assert (found, first_weight(model), model.training) == (step, value, False)
    assert notices == []


def in_a_child(work):
    """Whether `work` ends without an error in a process of its own, which may hook whatever it likes."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def train_on_before_each_read(run, reads):
    """Before this process opens a file of weights, save two more steps, so that the one it has found is deleted."""
    steps = iter(range(2, 2 + 2 * reads))

    def hook(event, arguments):
        if event == "open" and str(arguments[0]).endswith("model.safetensors") and arguments[1] is None:
            for step in [next(steps, 0), next(steps, 0)]:
                if step:
                    save_step(run, step, "model", value=float(step), best=True)

    sys.addaudithook(hook)


@pytest.mark.parametrize("name", ["best", "latest"])
@pytest.mark.parametrize("reads", [1, 2, 3])
def test_a_reader_of_a_run_in_training_takes_the_next_step_and_tells_of_no_damage(run, name, reads):
    save_step(run, 1, "model", value=1.0, best=True)

    def read():
        train_on_before_each_read(run, reads)
        notices = []
        model, step = load_model(run, name, notice=notices.append)
        assert (step, first_weight(model), notices) == (1 + 2 * reads, 1.0 + 2 * reads, [])

    assert in_a_child(read)


def test_a_damaged_step_is_told_of_while_a_training_goes_on(run):
    save_step(run, 1, "model", best=True)
    save_step(run, 2, "model", best=True)
    (run.path / "checkpoints" / "step-00000002" / "model.safetensors").write_bytes(b"")

    def read():
        train_on_before_each_read(run, 99)
        with pytest.raises(CheckpointError, match=r"step-00000002.*"):
            load_model(run, "2")

    assert in_a_child(read)


def test_best_falls_back_to_the_latest_with_a_notice(run):
    notices = []
    save_step(run, 10, "model")
    assert load_model(run, notice=notices.append)[1] == 10
    assert notices == [f"no checkpoint of {run.path} is marked as best; the latest is taken"]


def test_a_run_without_checkpoints_says_so(run):
    with pytest.raises(CheckpointError, match="has no complete checkpoint; train it with --resume"):
        load_model(run, "latest")
    with pytest.raises(CheckpointError, match="step-00000099 is no checkpoint"):
        load_model(run, "99")


@pytest.mark.parametrize(
    ("names", "value"), [(["model"], 0.0), (["model", "ema"], 1.0), (["model", "ema", "averaged"], 2.0)]
)
def test_averaged_weights_come_before_a_moving_average_before_the_last(run, names, value):
    save_step(run, 10, *names, best=True)
    assert first_weight(load_model(run)[0]) == value


def test_a_checkpoint_of_another_run_is_refused(run, tmp_path, vocabularies):
    other = create_run(tmp_path / "other", CONFIG, *vocabularies, data_hash="e" * 64)
    foreign = save_step(other, 10, "model")
    with pytest.raises(CheckpointError, match=f"does not belong to run .*: data is {'e' * 64} in the checkpoint"):
        load_model(run, str(foreign.path))


def test_weights_that_do_not_fit_are_all_named_and_none_is_loaded(run):
    model = run.build_model()
    before = {name: tensor.clone() for name, tensor in weights_of(model).items()}
    wrong = {name: tensor + 1 for name, tensor in before.items()}
    del wrong["source_embedding.bias"]
    wrong["extra"] = torch.zeros(1)
    wrong["target_embedding.bias"] = torch.zeros(9)
    with pytest.raises(
        CheckpointError,
        match=r"source_embedding.bias is missing; extra is unknown to the model; "
        r"target_embedding.bias is \[9\] instead of \[8\]",
    ):
        load_weights(model, wrong)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(model).items())


@pytest.mark.parametrize(("tie", "tables"), [("all", 1), ("target", 2), ("none", 3)])
def test_tied_weights_are_kept_once_and_stay_tied(run, tie, tables):
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(SMALL, tie_embeddings=tie))
    run = dataclasses.replace(run, config=config)
    model, other = run.build_model(), run.build_model()
    weights = weights_of(model)
    assert sum(tensor.shape[0] == run.target.size for tensor in weights.values()) == tables
    load_weights(other, weights)
    ids = torch.tensor([[4, 5, 6, 3]])
    assert torch.equal(model.eval()(ids, None, ids), other.eval()(ids, None, ids))
    assert (other.output is other.target_embedding.table) == (tie != "none")
