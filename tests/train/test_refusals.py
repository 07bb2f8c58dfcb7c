"""What is refused before anything is made: one line, no folder, and the next try has nothing in its way."""

import re

import pytest
from commands import lines, run_main

from rectiformer.config import VocabularyConfig
from rectiformer.errors import CheckpointError, ConfigError, RectiformerError
from rectiformer.runs.folder import create_run
from rectiformer.text.prepared import prepare
from rectiformer.text.vocabulary import Vocabulary
from rectiformer.toml import load_config
from rectiformer.train.start import train

SETTINGS = [
    "data.sentences=60",
    "data.valid_sentences=8",
    "vocabulary.size=90",
    "model.hidden_size=16",
    "model.num_heads=2",
    "model.ffn_size=16",
    "model.encoder_layers=1",
    "model.decoder_layers=1",
    "training.batch_tokens=300",
    "training.steps=1",
    "training.device=cpu",
]
DOCUMENTS = "data.grammar=documents"

# What is refused, with which message, and what mends it.
CASES = {
    "positions in sentences that nobody marks": (
        ["model.positions=sentence"],
        'model.positions = "sentence" needs a vocabulary with a separator',
        [DOCUMENTS],
    ),
    "heads of one dimension that are opened": (
        ["model.score_bias=open", "model.num_heads=16"],
        "heads of 1 dimension have none left for scores .*; use fewer heads, or model.score_bias = 'none'",
        ["model.num_heads=8"],
    ),
    "an unknown variant": (["model.cross_variant=rella"], "unknown variant 'rella'", ["model.cross_variant=rela"]),
    "an unknown memory": (["model.memory=rellu"], "unknown memory 'rellu'", ["model.memory=relu"]),
    "an unknown norm": (["model.output_norm=rns"], "unknown output norm 'rns'", ["model.output_norm=rms"]),
    "slots that are no square": (
        ["model.memory=product-relu", "model.ffn_size=20"],
        "slots = 20 is no square, as 'product-relu' needs; use 16 or 25",
        ["model.ffn_size=25"],
    ),
    "an odd width to be halved": (
        ["model.memory=product-relu", "model.hidden_size=15", "model.num_heads=3"],
        "width = 15 is odd, but 'product-relu' halves it",
        ["model.hidden_size=18"],
    ),
    "a number that is not learned there": (
        ["model.variant=entmax", "model.alpha_init=3"],
        r"alpha is learned between 1\.001 and 2 and cannot start at 3",
        ["model.alpha_init=1.3"],
    ),
    "a number that is fixed where none may be": (
        ["model.variant=entmax", "model.alpha_sharing=fixed", "model.alpha_init=0.5"],
        "alpha = 0.5, but variant 'entmax' needs a number above 1",
        ["model.alpha_init=3"],
    ),
    "two vocabularies in one matrix": (
        ["vocabulary.shared=false"],
        'model.tie_embeddings = "all" needs one vocabulary, but source and target each have their own; '
        'use model.tie_embeddings = "target"',
        ["model.tie_embeddings=target"],
    ),
    "penalties on what has no weights": (
        ["model.encoder_variant=inhibitor", "training.mass_penalty=0.1"],
        "need weights, but encoder attention is 'inhibitor', which has none",
        ["training.mass_penalty=0"],
    ),
    "segments of nothing": (
        ["data.segment_length=40"],
        r'data\.segment_length needs documents: use data\.grammar = "documents"',
        [DOCUMENTS],
    ),
    "a target model next to a shared one": (
        ["vocabulary.target_model=no.model"],
        r"vocabulary\.target_model is given, but it needs vocabulary\.shared = false",
        ['vocabulary.target_model=""'],
    ),
    "a stream that is sampled": (
        ["data.stream=true", "vocabulary.sampling=0.1"],
        r"vocabulary\.sampling = 0\.1 needs prepared text, but data\.stream = true",
        ["data.stream=false"],
    ),
    "a stream without subwords": (
        ["data.stream=true"],
        r"data\.stream leaves no text to train subwords on",
        ["data.stream=false"],
    ),
    "a dataset without a column": (
        ["data.source=hf:some", "data.target=hf:other?column=en"],
        "hf:some names no column",
        ["data.source=[]", "data.target=[]"],
    ),
}


def configured(*changes):
    return load_config(None, [*SETTINGS, *changes])


@pytest.mark.parametrize(("wrong", "message", "mended"), CASES.values(), ids=CASES)
def test_what_cannot_be_trained_leaves_nothing_behind(tmp_path, wrong, message, mended):
    for resume in (False, True):
        with pytest.raises(RectiformerError, match=message) as caught:
            train(configured(*wrong), tmp_path / "run", resume=resume)
        assert "\n" not in str(caught.value)
        assert not list(tmp_path.iterdir())
    assert train(configured(*wrong, *mended), tmp_path / "run").finished


@pytest.mark.parametrize("case", list(CASES)[:2])
def test_the_command_says_so_in_one_line(tmp_path, case, capsys):
    wrong, message, mended = CASES[case]
    out = tmp_path / "deep" / "run"

    def run(*changes):
        return run_main("train", "--out", out, *(word for each in (*SETTINGS, *changes) for word in ("--set", each)))

    assert run(*wrong) == 2
    messages = lines(capsys.readouterr().err)
    assert len(messages) == 1
    assert re.search(message, messages[0])
    assert not list(tmp_path.iterdir())
    assert run(*wrong, *mended) == 0


def test_early_stopping_needs_text_to_validate_on(tmp_path):
    assert run_main("data", "generate", tmp_path / "text", "--sentences", 60) == 0
    text = [f"data.source={tmp_path / 'text.de'}", f"data.target={tmp_path / 'text.en'}"]
    with pytest.raises(ConfigError, match=r"validation\.patience needs data\.valid_source and data\.valid_target"):
        train(configured(*text, "validation.patience=2"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert train(configured(*text), tmp_path / "run").finished
    with pytest.raises(ConfigError, match=r"validation\.patience needs data\.valid_source"):  # it may be changed
        train(configured(*text, "validation.patience=2"), tmp_path / "run", resume=True)


def test_named_vocabularies_are_looked_at_before_any_text(tmp_path):
    words = Vocabulary.train(["so many words", "and some more"] * 5, VocabularyConfig(size=30))
    words.save(tmp_path / "words.model")
    named = [DOCUMENTS, f"vocabulary.source_model={tmp_path / 'words.model'}"]
    for wrong, message in {
        "data.segment_length=40": r"words\.model has no control symbol <sep>, but data\.segment_length needs one",
        "model.positions=sentence": 'model.positions = "sentence" needs a vocabulary with a separator',
    }.items():
        with pytest.raises(ConfigError, match=message):
            train(configured(*named, wrong), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    apart = ["vocabulary.shared=false", f"vocabulary.target_model={tmp_path / 'words.model'}"]
    assert train(configured(*named, *apart), tmp_path / "run").finished  # named twice it is one all the same


def test_subwords_that_a_start_does_not_know_are_refused_before_text_is_prepared(tmp_path):
    train(configured(), tmp_path / "first")
    words = Vocabulary.train(["so many words", "and some more"] * 5, VocabularyConfig(size=30))
    words.save(tmp_path / "words.model")
    start, named = f"training.init_from={tmp_path / 'first'}", f"vocabulary.source_model={tmp_path / 'words.model'}"
    with pytest.raises(CheckpointError, match="its source vocabulary has hash"):
        train(configured(start, named), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert train(configured(start), tmp_path / "run").finished


PREPARED = {
    "other segments": (
        [],
        ["data.segment_length=40", DOCUMENTS],
        r"was prepared with data\.segment_length = 0, but here it is 40",
    ),
    "other files": ([], ["data.weights=[1, 2]"], r"data\.weights has 2 numbers, but .*data was made from 1 files"),
    "no separators": ([], ["model.positions=sentence", DOCUMENTS], "needs a vocabulary with a separator"),
    "two vocabularies": (["vocabulary.shared=false"], [], 'model.tie_embeddings = "all" needs one vocabulary'),
    "no text": (
        ["data.stream=true", "data.valid_source=valid.tsv", "data.format=tsv"],
        [],
        r"was prepared for a stream and has no text to train on; set data\.stream = true",
    ),
}


@pytest.mark.parametrize(("made", "wrong", "message"), PREPARED.values(), ids=PREPARED)
def test_prepared_data_that_does_not_fit_leaves_nothing_behind(tmp_path, monkeypatch, made, wrong, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "valid.tsv").write_text("eins zwei drei vier fünf\tone two three four five\n" * 9, encoding="utf-8")
    prepare(configured(*made), tmp_path / "data")
    with pytest.raises(ConfigError, match=message):
        train(configured(*wrong), tmp_path / "run", data=tmp_path / "data")
    assert not (tmp_path / "run").exists()


def test_text_that_is_prepared_in_the_folder_is_kept_for_the_next_try(tmp_path):
    """A run that was killed before it was created goes on, once it is not refused any more."""
    folder = tmp_path / "run"
    prepare(configured(), folder / "data")
    with pytest.raises(ConfigError, match="needs a vocabulary with a separator"):
        train(configured("model.positions=sentence"), folder, resume=True)
    assert [path.name for path in folder.iterdir()] == ["data"]
    made = (folder / "data/manifest.json").stat().st_ino
    assert train(configured(), folder, resume=True).finished
    assert (folder / "data/manifest.json").stat().st_ino == made


def test_a_run_that_was_created_before_is_resumed(tmp_path):
    """Two vocabularies of one size in one matrix were let through once."""
    config = configured("vocabulary.shared=false", "vocabulary.size=60")
    data = prepare(config, tmp_path / "data")
    assert data.source.size == data.target.size
    create_run(tmp_path / "run", config, data.source, data.target, data.hash)
    assert train(config, tmp_path / "run", resume=True, data=tmp_path / "data").finished
