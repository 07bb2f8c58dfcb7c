"""Folders made to harm: no code in them runs, nothing outside them is read, nothing waits."""

import ast
import json
import os
import pickle
import signal
from pathlib import Path

import pytest
import torch

import rectiformer
from rectiformer.errors import CheckpointError
from rectiformer.runs.checkpoint import (
    best_checkpoint,
    file_entry,
    find_checkpoint,
    open_checkpoint,
    save_checkpoint,
    seal,
)

PACKAGE = Path(rectiformer.__file__).parent
FILES = ["model.safetensors", "state.json", "manifest.json"]
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
TORCH = {"load", "save", "hub", "package"}


def unsafe_uses(source):
    """What a source text does that could run code hidden in data."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] in MODULES:
                yield module
            case ast.ImportFrom(module="torch", names=names):
                yield from (f"torch.{alias.name}" for alias in names if alias.name in TORCH)
            case ast.Attribute(value=ast.Name(id="torch"), attr=attribute) if attribute in TORCH:
                yield f"torch.{attribute}"
            case ast.Name(id="eval" | "exec" | "__import__" as name):
                yield name
            case ast.keyword(arg="weights_only" | "allow_pickle" as name):
                yield name


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_in_the_package_runs_code_from_data(path):
    assert list(unsafe_uses(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", "pickle"),
        ("import os, shelve as s", "shelve"),
        ("def f():\n    from marshal import loads", "marshal"),
        ("from yaml import load", "yaml"),
        ("import torch\nx = torch.load(p)", "torch.load"),
        ("torch.save(x, p)", "torch.save"),
        ("from torch import nn, load as l", "torch.load"),
        ("eval('1')", "eval"),
        ("run = exec", "exec"),
        ("f(p, weights_only=True)", "weights_only"),
        ("np.load(p, allow_pickle=True)", "allow_pickle"),
    ],
)
def test_the_scan_sees_unsafe_code(source, found):
    assert list(unsafe_uses(source)) == [found]


@pytest.mark.parametrize(
    "source", ["model.eval()", "from safetensors.torch import load, save", "torch.loads = 1", "re.compile('')"]
)
def test_the_scan_passes_safe_code(source):
    assert list(unsafe_uses(source)) == []


def save(folder, **options):
    return save_checkpoint(folder, 1, {"model": {"w": torch.ones(8)}}, {}, {"data": "1f"}, **options)


class Payload:
    """Makes a folder when unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("forged", [False, True], ids=["found by its hash", "found by its format"])
@pytest.mark.parametrize("file", ["model.safetensors", "model.pt", "model.bin"])
def test_a_pickle_is_refused_and_never_runs(tmp_path, file, forged):
    marker = tmp_path / "marker"
    payload = pickle.dumps(Payload(marker))
    path = save(tmp_path).path
    (path / "model.safetensors").rename(path / file)
    (path / file).write_bytes(payload)
    if forged:
        forge(path, files={file: file_entry(payload)})
    with pytest.raises(CheckpointError, match=r"is damaged|holds no model.safetensors"):
        open_checkpoint(path).tensors("model")
    assert not marker.exists()
    pickle.loads(payload)
    assert marker.exists(), "the payload does nothing, so the test says nothing"


def forge(path, **changes):
    """Rewrite a manifest as an attacker can: with a hash that fits."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    del manifest["sha256"]
    (path / "manifest.json").write_bytes(seal({**manifest, **changes}))


@pytest.mark.parametrize("name", ["../secret", "{folder}/secret", "..", ".", "", "a\x00b", "sub/secret", "\ud800"])
def test_a_manifest_names_nothing_outside_its_folder(tmp_path, name):
    path = save(tmp_path).path
    for secret in (tmp_path / "secret", path.parent / "secret"):
        secret.write_bytes(b"secret")
    forge(path, files={name.format(folder=tmp_path): file_entry(b"secret")})
    with pytest.raises(CheckpointError, match="no list of files inside the folder"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"step": 8},
        {"step": "1"},
        {"step": True},
        {"files": []},
        {"files": {"model.safetensors": 5}},
        {"files": {"model.safetensors": {"size": -1, "sha256": "00"}}},
        {"files": {"model.safetensors": {"size": "8", "sha256": "00"}}},
        {"identity": {"data": ["1f"]}},
        {"extra": [[[]]]},
    ],
    ids=str,
)
def test_a_manifest_unlike_ours_is_refused(tmp_path, changes):
    path = save(tmp_path).path
    forge(path, **changes)
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged|model.safetensors is damaged"):
        open_checkpoint(path)


@pytest.fixture
def no_waiting():
    """Fail, instead of hanging, where something waits for a FIFO."""

    def give_up(*_):
        raise AssertionError("still waiting after 5 s")  # no OSError: those are caught as damage

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


PLANTED = {
    "link out": lambda path, original: path.symlink_to(original),
    "FIFO": lambda path, original: os.mkfifo(path),
    "folder": lambda path, original: path.mkdir(),
    "device": lambda path, original: path.symlink_to("/dev/zero"),
}


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED.keys())
def test_only_regular_files_are_read(tmp_path, file, plant):
    path = save(tmp_path).path / file
    plant(path, path.rename(tmp_path / "original"))
    with pytest.raises(CheckpointError, match=f"{file} is damaged"):
        open_checkpoint(path.parent)


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED.keys())
def test_only_real_folders_and_files_stand_for_steps(tmp_path, plant):
    original = save(tmp_path, best=True).path
    moved = original.rename(tmp_path / "moved")
    plant(original, moved)
    warnings = []
    assert find_checkpoint(tmp_path, warnings.append) is None
    assert len(warnings) == 1
    best = original.with_name("best")
    plant(best, best.rename(tmp_path / "best"))
    with pytest.raises(CheckpointError, match="best is damaged"):
        best_checkpoint(tmp_path)
