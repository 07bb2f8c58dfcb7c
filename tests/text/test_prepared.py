"""Text on disk as ids: what went in comes out, damage is seen, and nothing outside the folder is ever read."""

import dataclasses
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rectiformer.config import Config, DataConfig, VocabularyConfig
from rectiformer.errors import ConfigError, DataError, NoSpaceError
from rectiformer.text.corpus import Counts
from rectiformer.text.prepared import Prepared, hash_data, prepare
from rectiformer.text.vocabulary import Vocabulary

SOURCE = ["der alte Hund", "ein kleines Haus", "sie sieht den Fluss\u2028 und", "das Haus ist alt\0", "\ufeffHunde"] * 4
TARGET = ["the old dog", "a small house", "she sees the river", "the house is old", "dogs"] * 4


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, lines in {"a.de": SOURCE, "a.en": TARGET, "v.de": SOURCE[1:4], "v.en": TARGET[1:4]}.items():
        (tmp_path / name).write_bytes("".join(line + "\n" for line in lines).encode())
    return tmp_path


def configure(vocabulary=None, **data):
    data = {"source": ("a.de",), "target": ("a.en",), "valid_source": ("v.de",), "valid_target": ("v.en",)} | data
    return Config(data=DataConfig(**data), vocabulary=VocabularyConfig(**{"size": 60} | (vocabulary or {})))


def texts(encoded, prepared):
    """Both sides of every pair, decoded."""
    return [
        (prepared.source.decode(encoded.source(pair)), prepared.target.decode(encoded.target(pair)))
        for pair in range(encoded.pairs)
    ]


def readable(line):
    return line.replace("\0", "\ufffd")


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_prepared_is_what_was_read(files, shared):
    prepared = prepare(configure({"shared": shared}), files / "data")
    expected = [(readable(source), target) for source, target in zip(SOURCE, TARGET, strict=True)]
    assert texts(prepared.train[0], prepared) == expected
    assert texts(prepared.valid, prepared) == expected[1:4]
    assert prepared.valid_text == list(zip(SOURCE[1:4], TARGET[1:4], strict=True))
    assert (prepared.source is prepared.target) == shared
    assert prepared.train[0].source(0).dtype == np.uint16
    assert prepared.train[0].document_starts.tolist() == [0]


def test_lengths_and_manifest_count_the_ids(files):
    prepared = prepare(configure(), files / "data")
    train, summary = prepared.train[0], prepared.manifest["splits"]["train-0"]
    assert train.source_lengths.dtype == train.target_lengths.dtype == np.int32
    assert train.source_lengths.tolist() == [len(prepared.source.encode(line)) for line in SOURCE]
    assert train.target_lengths.tolist() == [len(prepared.target.encode(line)) for line in TARGET]
    assert summary["source_tokens"] == train.source_lengths.sum()
    assert summary["target_tokens"] == train.target_lengths.sum()
    assert summary["pairs"] == summary["counts"]["pairs"] == train.pairs == 20
    assert summary["documents"] == 1


def test_the_files_are_those_described(files):
    prepare(configure({"sampling": 0.1, "copies": 2}), files / "data")
    arrays = ["documents.starts", "source.ids", "source.starts", "target.ids", "target.starts"]
    found = sorted(str(path.relative_to(files / "data")) for path in (files / "data").rglob("*") if path.is_file())
    expected = [f"{split}/{name}" for split in ("train-0", "train-1", "valid") for name in arrays]
    assert found == sorted(
        [*expected, "manifest.json", "source.model", "target.model", "valid/source.txt", "valid/target.txt"]
    )
    starts = np.fromfile(files / "data/train-0/source.starts", dtype="<i8")
    assert starts[0] == 0
    assert starts[-1] * 2 == (files / "data/train-0/source.ids").stat().st_size
    assert sorted(os.listdir(files)) == ["a.de", "a.en", "data", "v.de", "v.en"]


def test_without_validation_files_there_is_no_validation(files):
    prepared = prepare(configure(valid_source=(), valid_target=()), files / "data")
    assert prepared.valid is None
    assert prepared.valid_text == []
    assert not (files / "data/valid").exists()


def test_the_grammar_needs_no_files(tmp_path):
    config = Config(data=DataConfig(sentences=200, valid_sentences=20), vocabulary=VocabularyConfig(size=200))
    prepared = prepare(config, tmp_path / "data")
    assert (prepared.train[0].pairs, prepared.valid.pairs, len(prepared.valid_text)) == (200, 20, 20)


def test_the_hash_depends_on_the_training_data_alone(files):
    first = prepare(configure(), files / "one").hash
    shutil.copy("a.de", "b.de")
    os.utime("a.en", (1, 1))
    same = prepare(configure(source=("b.de",), valid_source=(), valid_target=()), files / "two").hash
    assert first == same == Prepared.open(files / "one").hash
    with open("a.en", "a") as file:
        file.write("one more\n")
    with open("b.de", "a") as file:
        file.write("noch eins\n")
    assert prepare(configure(source=("b.de",)), files / "three").hash != first
    assert prepare(configure({"size": 50}, source=("b.de",)), files / "four").hash != first


def test_copies_are_other_subwords_of_the_same_text(files):
    vocabulary = {"sampling": 0.1, "copies": 3, "size": 100, "kind": "bpe"}
    prepared = prepare(configure(vocabulary), files / "data")
    assert len(prepared.train) == 3
    lengths = {tuple(copy.source_lengths.tolist()) for copy in prepared.train}
    assert len(lengths) == 3
    assert len({tuple(texts(copy, prepared)) for copy in prepared.train}) == 1
    assert prepare(configure(vocabulary), files / "again").hash == prepared.hash


def test_copies_without_sampling_would_be_equal_so_there_is_one(files):
    assert len(prepare(configure({"copies": 3}), files / "data").train) == 1


def long_line_among_normal_ones(files):
    """Pair 3 has about 100,000 subwords on its source side."""
    source = [*SOURCE[:2], "Hund Haus " * 50_000, *SOURCE[2:5]]
    (files / "a.de").write_bytes("".join(line + "\n" for line in source).encode())
    (files / "a.en").write_text("".join(line + "\n" for line in [*TARGET[:2], "dog house", *TARGET[2:5]]))


@pytest.mark.parametrize(("too_long", "dropped", "truncated"), [("drop", 1, 0), ("truncate", 0, 1)])
def test_a_very_long_line_is_dropped_or_cut_and_counted(files, too_long, dropped, truncated):
    long_line_among_normal_ones(files)
    prepared = prepare(configure({"size": 100}, max_length=50, too_long=too_long), files / "data")
    counts = Counts(**prepared.manifest["splits"]["train-0"]["counts"])
    assert (counts.pairs, counts.too_long, counts.truncated) == (6 - dropped, dropped, truncated)
    assert (prepared.train[0].source_lengths == 50).sum() == truncated
    kept = [target for _, target in texts(prepared.train[0], prepared)]
    assert kept == [*TARGET[:2], *(["dog house"] * truncated), *TARGET[2:5]]


def test_a_very_long_line_can_be_an_error(files):
    long_line_among_normal_ones(files)
    with pytest.raises(DataError, match=r"pair 3 has [\d,]+ subwords on a side, but data\.max_length = 50; raise it"):
        prepare(configure(max_length=50, too_long="error"), files / "data")
    assert sorted(os.listdir(files)) == ["a.de", "a.en", "v.de", "v.en"]


def test_validation_is_neither_dropped_nor_cut(files):
    prepared = prepare(configure(max_length=8), files / "data")
    assert prepared.train[0].source_lengths.max() <= 8 < prepared.valid.source_lengths.max()
    assert prepared.valid.pairs == 3


def test_a_document_survives_the_loss_of_its_first_pair(files):
    """Lines 1, 4 and 7 start documents; line 4 is too long, line 7 blank to sentencepiece only."""
    (files / "a.de").write_text(f"Hund\nHaus\n\n{'Hund ' * 30}\nHaus\n\n\u2581\nalt\n")
    (files / "a.en").write_text("dog\nhouse\n\ndog\nhouse\n\nx\nold\n")
    prepared = prepare(configure({"size": 30}, documents="blank", max_length=10), files / "data")
    assert [target for _, target in texts(prepared.train[0], prepared)] == ["dog", "house", "house", "old"]
    assert prepared.train[0].document_starts.tolist() == [0, 2, 3]
    counts = prepared.manifest["splits"]["train-0"]["counts"]
    assert (counts["documents"], counts["empty"], counts["too_long"]) == (3, 1, 1)


def test_nothing_left_after_dropping_is_an_error(files):
    with pytest.raises(DataError, match=r"no sentence pairs left in train-0: .* 20 too long"):
        prepare(configure(max_length=1), files / "data")


@pytest.mark.parametrize("side", ["source", "target"])
def test_standard_input_is_read_once_for_both_passes(files, monkeypatch, side):
    name = "a.de" if side == "source" else "a.en"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((files / name).read_bytes())))
    piped = prepare(configure(**{side: ("-",)}), files / "piped")
    assert piped.hash == prepare(configure(), files / "data").hash
    assert not (files / "piped/spool").exists()
    assert not piped.is_from(configure(**{side: ("-",)}))


def test_a_model_from_elsewhere_is_used_as_it_is(files):
    vocabulary = Vocabulary.train(SOURCE + TARGET, VocabularyConfig(size=70, kind="bpe"))
    vocabulary.save(files / "own.model")
    prepared = prepare(configure({"source_model": "own.model"}), files / "shared")
    assert prepared.source.sha256 == prepared.target.sha256 == vocabulary.sha256
    apart = prepare(configure({"source_model": "own.model", "shared": False}), files / "apart")
    assert apart.source.sha256 == vocabulary.sha256 != apart.target.sha256
    both = {"source_model": "own.model", "target_model": "own.model", "shared": False}
    assert prepare(configure(both), files / "both").target.sha256 == vocabulary.sha256
    with pytest.raises(ConfigError, match=r"needs vocabulary\.shared = false"):
        prepare(configure({"target_model": "own.model"}), files / "wrong")


def test_an_existing_folder_is_not_written_over(files):
    prepared = prepare(configure(), files / "data")
    with pytest.raises(DataError, match="data exists"):
        prepare(configure(), files / "data")
    assert Prepared.open(files / "data").hash == prepared.hash


def test_a_folder_knows_what_it_was_made_from(files):
    prepare(configure(), files / "data")
    prepared = Prepared.open(files / "data")
    assert prepared.is_from(configure())
    assert not prepared.is_from(configure(max_length=99))
    assert not prepared.is_from(configure({"size": 61}))
    assert prepared.is_from(dataclasses.replace(configure(), training=dataclasses.replace(Config().training, seed=7)))
    with open("a.de", "a") as file:
        file.write("mehr\n")
    assert not prepared.is_from(configure())


def test_progress_is_told_for_every_part(files):
    told = []
    prepare(configure(), files / "data", lambda stage, done: told.append((stage, done)))
    assert told == [("vocabulary", 0), ("train-0", 20), ("valid", 3)]


def test_a_failure_leaves_nothing_behind(files):
    (files / "v.en").write_bytes(b"a\n\xff\nc\n")
    with pytest.raises(DataError, match=r"v\.en:2:1: not UTF-8"):
        prepare(configure(), files / "data")
    assert sorted(os.listdir(files)) == ["a.de", "a.en", "v.de", "v.en"]


def prepare_until(stage, signal_number):
    """The process id of a child that sends itself a signal in this stage of preparing `data` from standard input."""
    child = os.fork()
    if child == 0:
        sys.stdin = io.TextIOWrapper(io.BytesIO(b"\n".join(line.encode() for line in SOURCE)))

        def progress(what, count):
            if what == stage:
                os.kill(os.getpid(), signal_number)

        try:
            prepare(configure(source=("-",)), Path("data"), progress)
        finally:
            os._exit(1)
    return child


@pytest.mark.parametrize("stage", ["spool", "vocabulary", "train-0"])
def test_what_a_killed_process_left_is_removed_by_the_next_and_that_of_a_running_one_is_not(files, stage):
    stopped = prepare_until(stage, signal.SIGSTOP)
    try:
        os.waitpid(stopped, os.WUNTRACED)
        killed = prepare_until(stage, signal.SIGKILL)
        os.waitpid(killed, 0)
        assert {f"data.tmp-{killed}", f"data.tmp-{stopped}"} <= set(os.listdir(files))
        notes = []
        prepare(configure(), Path("data"), note=notes.append)
        assert notes == [f"removed data.tmp-{killed}, left by a killed process"]
        assert sorted(os.listdir(files)) == ["a.de", "a.en", "data", f"data.tmp-{stopped}", "v.de", "v.en"]
    finally:
        os.kill(stopped, signal.SIGKILL)
        os.waitpid(stopped, 0)


def test_a_full_disk_is_named(files, monkeypatch):
    """`/dev/full` takes nothing: the first file that is flushed into it fails as on a full disk."""
    make = os.mkdir

    def make_full(path, *rest, **keys):
        make(path, *rest, **keys)
        if str(path).endswith("train-0"):
            os.symlink("/dev/full", os.path.join(path, "source.ids"))

    monkeypatch.setattr(os, "mkdir", make_full)
    with pytest.raises(NoSpaceError, match=r"no space left for .*data; nothing was kept") as error:
        prepare(configure(), files / "data")
    assert error.value.exit_code == 6
    assert sorted(os.listdir(files)) == ["a.de", "a.en", "v.de", "v.en"]


@pytest.fixture
def folder(files):
    prepare(configure(), files / "data")
    return files / "data"


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["train-0/source.ids", "train-0/documents.starts", "valid/target.txt", "source.model"])
def test_a_flipped_bit_is_seen(folder, name):
    flip(folder / name)
    with pytest.raises(DataError, match=r"hash .*; remove the folder and run `rectiformer data prepare` again"):
        Prepared.open(folder)


@pytest.mark.parametrize("name", ["train-0/source.ids", "valid/target.starts", "target.model"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_file_cut_short_or_missing_is_seen(folder, name, verify):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1])
    with pytest.raises(DataError, match=f"{len(content) - 1:,} bytes, but the manifest says {len(content):,}"):
        Prepared.open(folder, verify)
    (folder / name).unlink()
    with pytest.raises(DataError, match="No such file"):
        Prepared.open(folder, verify)


def change(folder, **entries):
    """Rewrite the manifest with other entries."""
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | entries))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 1}',
        "[" * 100_000,
        '{"format": 1, "files": {"a": 3}}',
        '{"format": 1, "files": []}',
    ],
)
def test_a_manifest_that_is_none_is_seen(folder, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=r"manifest\.json|data: |data/a: "):
        Prepared.open(folder)


def test_a_manifest_of_another_version_is_refused(folder):
    change(folder, format=3)
    with pytest.raises(DataError, match="format 3, but this version reads 1 and 2"):
        Prepared.open(folder)


@pytest.mark.parametrize("key", ["hash", "vocabularies", "splits"])
def test_a_manifest_that_contradicts_itself_is_refused(folder, key):
    changed = {"hash": "0" * 64, "vocabularies": {"source": "0" * 64, "target": "0" * 64}, "splits": {}}
    change(folder, **{key: changed[key]})
    with pytest.raises(DataError, match="data hash"):
        Prepared.open(folder, verify=False)


def test_no_folder_is_an_error(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        Prepared.open(tmp_path / "missing")


@pytest.mark.parametrize("escape", ["relative", "absolute", "link", "linked folder", "pipe", "folder", "loop", "nul"])
def test_names_that_lead_out_of_the_folder_are_refused(folder, escape):
    secret = folder.parent / "secret"
    secret.mkdir()
    (secret / "file").write_text("not yours")
    (folder / "link").symlink_to(secret / "file")
    (folder / "out").symlink_to(secret)
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    name = {
        "relative": "../secret/file",
        "absolute": str(secret / "file"),
        "link": "link",
        "linked folder": "out/file",
        "pipe": "pipe",
        "folder": "train-0",
        "loop": "loop/file",
        "nul": "a\0b",
    }[escape]
    manifest = json.loads((folder / "manifest.json").read_text())
    change(folder, files={name: {"bytes": 9, "sha256": "0" * 64}, **manifest["files"]})
    with pytest.raises(DataError, match=r"nothing was read|loop|not a manifest"):
        Prepared.open(folder)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_manifest_that_is_no_file_is_refused(folder, kind):
    path = folder / "manifest.json"
    path.rename(folder / "other.json")
    path.symlink_to("other.json") if kind == "link" else os.mkfifo(path)
    with pytest.raises(DataError, match="not a regular file; nothing was read"):
        Prepared.open(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("source.starts", np.array([0, 5, 3, 9]), "its offsets do not cut"),
        ("source.starts", np.array([1, 2]), "its offsets do not cut"),
        ("target.starts", np.array([0]), "its offsets do not cut"),
        ("documents.starts", np.array([0, 20]), "its documents do not lie in 20 pairs"),
        ("documents.starts", np.array([3]), "its documents do not lie in 20 pairs"),
    ],
)
def test_arrays_that_do_not_fit_each_other_are_refused(folder, name, content, message):
    """Even where a manifest vouches for them."""
    path = folder / "train-0" / name
    path.write_bytes(content.astype("<i8").tobytes())
    sign_anew(folder)
    with pytest.raises(DataError, match=message):
        Prepared.open(folder)


def test_ids_outside_the_vocabulary_are_refused(folder):
    ids = np.fromfile(folder / "train-0/target.ids", dtype="<u2")
    ids[7] = 60_000
    ids.tofile(folder / "train-0/target.ids")
    sign_anew(folder)
    with pytest.raises(DataError, match="id 60000 in a vocabulary of"):
        Prepared.open(folder)


def sign_anew(folder):
    """What an attacker would do: a manifest that fits the files as they are now."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        content = (folder / name).read_bytes()
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    change(folder, files=manifest["files"], hash=hash_data(manifest))


PREPARE_AND_MEASURE = """
import resource, sys
from pathlib import Path
from rectiformer.config import Config, DataConfig, VocabularyConfig
from rectiformer.text import corpus
from rectiformer.text.prepared import prepare
corpus.BATCH_PAIRS = 256  # what is held at once; little, so that what is held for longer stands out
def run(name):
    data = DataConfig(source=(name,), format="tsv")
    prepare(Config(data=data, vocabulary=VocabularyConfig(size=100, sentences=500)), Path(name + ".data"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ballast = b"x" * (96 << 20)  # more than importing once took for a while, so that all that follows shows in the peak
small = run("small.tsv")
print((run("large.tsv") - small) * 1024)
"""


def test_memory_does_not_grow_with_the_text(files):
    """15 MB of text after 1.5 MB of it: the peak grows by less than half of that; to hold it all takes 50 MB more."""
    row = (
        "der alte Hund sieht ein kleines Haus am Fluss " * 8
        + "\t"
        + "the old dog sees a small house near the river " * 8
    )
    for name, rows in (("small.tsv", 2_000), ("large.tsv", 20_000)):
        (files / name).write_text(f"{row}\n" * rows)
    more = (files / "large.tsv").stat().st_size - (files / "small.tsv").stat().st_size
    run = [sys.executable, "-c", PREPARE_AND_MEASURE]
    grown = int(subprocess.run(run, cwd=files, capture_output=True, text=True, check=True).stdout)
    assert grown < more / 2
