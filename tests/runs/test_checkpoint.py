"""Checkpoints against kills, full disks and damage: the newest complete one is always found."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from rectiformer.errors import ArgumentError, CheckpointError, DivergedError, NoSpaceError
from rectiformer.files import FAILPOINTS, require_space
from rectiformer.runs.checkpoint import (
    Checkpoint,
    best_checkpoint,
    find_checkpoint,
    newest_checkpoints,
    open_checkpoint,
    read_manifest,
    save_checkpoint,
    seal,
)
from rectiformer.runs.folder import require_own

FILES = ["model.safetensors", "state.json", "manifest.json"]

# Saves steps 1 (best) to 3, then is killed in saving step 4; one import of torch serves all failpoints.
WRITER = """
import os, sys
from pathlib import Path
import torch
from rectiformer.runs.checkpoint import save_checkpoint

torch.set_num_threads(1)
for failpoint in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        for step in range(1, 5):
            if step == 4:
                os.environ["RECTIFORMER_FAILPOINT"] = failpoint
            tensors = {name: {"w": torch.full((999,), float(step))} for name in ("model", "optimizer")}
            save_checkpoint(Path(sys.argv[1]) / failpoint, step, tensors, {}, {}, best=step == 1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
KILLS = [*FAILPOINTS, "mid-tensor:2", "mid-tensor:3"]
FOUND_AFTER = {"before-latest": 4, "mid-prune": 4}  # elsewhere step 4 was not complete yet, and it is step 3
LEFT_AFTER = {"before-latest": [], "mid-prune": ["step-00000002.tmp"]}  # elsewhere an unfinished step 4


def save(folder, step, *, value=None, size=8, **options):
    weight = torch.full((size,), float(step if value is None else value))
    return save_checkpoint(folder, step, {"model": {"w": weight}}, {"step": step}, {"data": "1f"}, **options)


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def steps(folder):
    return [int(name.removeprefix("step-")) for name in names(folder) if name.startswith("step-")]


def unwarned(message):
    raise AssertionError(f"warned: {message}")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A folder with a run killed at each failpoint."""
    folder = tmp_path_factory.mktemp("killed")
    writer = subprocess.run([sys.executable, "-c", WRITER, folder, *KILLS], capture_output=True, text=True, check=True)
    assert writer.stdout.split() == [str(-signal.SIGKILL)] * len(KILLS)
    return folder


@pytest.mark.parametrize("failpoint", KILLS)
def test_newest_complete_step_is_found_after_a_kill(killed, failpoint):
    folder, warnings = killed / failpoint, []
    left = [name for name in names(folder) if name.endswith(".tmp")]
    assert left == LEFT_AFTER.get(failpoint, ["step-00000004.tmp"])
    found = find_checkpoint(folder, warnings.append)
    assert found.step == FOUND_AFTER.get(failpoint, 3)
    assert all(found.tensors(name)["w"].eq(found.step).all() for name in ("model", "optimizer"))
    assert best_checkpoint(folder).step == 1
    assert warnings == [f"removed {folder / 'checkpoints' / name}, left by a killed save" for name in left]
    assert not [name for name in names(folder) if name.endswith(".tmp")]
    save(folder, 4)
    assert find_checkpoint(folder, unwarned).step == 4
    assert steps(folder) == [1, 3, 4]
    assert (folder / "checkpoints" / "latest").read_text() == "step-00000004\n"


def test_what_is_saved_is_what_is_loaded(tmp_path):
    model = {
        "matrix": torch.randn(3, 5).T,  # not contiguous
        "half": torch.randn(7).bfloat16(),
        "scalar": torch.tensor(0.1, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "random state": torch.get_rng_state(),
    }
    state = {"best": float("-inf"), "rate": 0.1 + 0.2, "cursor": [3, 14], "note": "\u2028\x00é"}
    saved = save_checkpoint(tmp_path, 7, {"model": model, "none": {}}, state, {"config": "ab", "data": "cd"}, best=True)
    for checkpoint in (saved, find_checkpoint(tmp_path, unwarned), best_checkpoint(tmp_path)):
        assert (checkpoint.step, checkpoint.state(), checkpoint.tensors("none")) == (7, state, {})
        assert checkpoint.manifest["identity"] == {"config": "ab", "data": "cd"}
        loaded = checkpoint.tensors("model")
        assert loaded.keys() == model.keys()
        assert all(torch.equal(loaded[key], model[key]) and loaded[key].dtype == model[key].dtype for key in model)
        loaded["matrix"].zero_()  # a copy: the next round finds the file as it was


def test_nothing_is_found_where_nothing_was_saved(tmp_path):
    assert find_checkpoint(tmp_path, unwarned) is None
    assert best_checkpoint(tmp_path) is None
    assert newest_checkpoints(tmp_path / "missing", 3, unwarned) == []


@pytest.mark.parametrize(
    ("saves", "keep", "left"),
    [
        ([1, 2, 3, 4], 2, [3, 4]),
        ([1, 2, 3, 4], 0, [3, 4]),
        ([1, 2, 3, 4], 3, [2, 3, 4]),
        (["1 best", 2, 3, 4], 2, [1, 3, 4]),
        (["1 best", 2, "3 best", 4, 5], 2, [3, 4, 5]),
        ([1, 2, 3, 4, 2], 4, [1, 2]),  # went back: steps 3 and 4 are of an abandoned future
        ([1, 2, "3 best", 4, 2], 4, [1, 2, 3]),
        ([99_999_999, 100_000_000, 100_000_001], 2, [100_000_000, 100_000_001]),  # names of different length
    ],
)
def test_the_newest_and_the_best_are_kept(tmp_path, saves, keep, left):
    for entry in saves:
        step, _, best = str(entry).partition(" ")
        save(tmp_path, int(step), best=bool(best), keep=keep)
    assert steps(tmp_path) == left


def test_nothing_is_deleted_while_the_best_cannot_be_told(tmp_path):
    for step in (1, 2):
        save(tmp_path, step, best=step == 1)
    (tmp_path / "checkpoints" / "best").write_text("../../elsewhere\n")
    for step in (3, 4):
        save(tmp_path, step)
    assert steps(tmp_path) == [1, 2, 3, 4]
    with pytest.raises(CheckpointError, match="does not name a step"):
        best_checkpoint(tmp_path)


def test_saving_a_step_again_replaces_it_and_leaves_mapped_files_alone(tmp_path):
    path = save(tmp_path, 5, value=1).path
    mapped, inode = load_file(path / "model.safetensors"), path.stat().st_ino
    save_checkpoint(tmp_path, 5, {"model": mapped}, {}, {})
    assert path.stat().st_ino != inode, "replaced file by file: a kill would leave files of two saves"
    assert find_checkpoint(tmp_path, unwarned).tensors("model")["w"].eq(1).all()
    save(tmp_path, 5, value=2)
    assert mapped["w"].eq(1).all()
    assert find_checkpoint(tmp_path, unwarned).tensors("model")["w"].eq(2).all()
    assert names(tmp_path) == ["latest", "step-00000005"]


def test_a_step_set_aside_counts_until_its_place_is_taken(tmp_path):
    """The moment between the two renames of a replacement."""
    path = save(tmp_path, 5, best=True).path
    path.rename(path.with_name("step-00000005.old"))
    assert find_checkpoint(tmp_path, unwarned).tensors("model")["w"].eq(5).all()
    assert best_checkpoint(tmp_path).step == 5
    save(tmp_path, 5, value=6)
    path.with_name("step-00000005.old").mkdir()  # killed before the old one was deleted
    warnings = []
    assert find_checkpoint(tmp_path, warnings.append).tensors("model")["w"].eq(6).all()
    assert len(warnings) == 1
    assert steps(tmp_path) == [5]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_weights_are_never_written(tmp_path, bad):
    save(tmp_path, 1)
    before = names(tmp_path)
    with pytest.raises(DivergedError, match="step 2: model 'w' holds numbers that are not finite") as caught:
        save_checkpoint(tmp_path, 2, {"model": {"w": torch.tensor([1.0, bad])}}, {}, {})
    assert caught.value.exit_code == 5
    assert names(tmp_path) == before


def test_tied_tensors_are_refused_by_name(tmp_path):
    weight = torch.ones(4, 4)
    with pytest.raises(ArgumentError, match="model 'source' and 'target' share storage"):
        save_checkpoint(tmp_path, 1, {"model": {"source": weight, "target": weight.T}}, {}, {})
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("checked", [True, False], ids=["found before", "found while writing"])
def test_a_full_disk_keeps_the_last_checkpoint(small_disk, monkeypatch, checked):
    save(small_disk, 1, size=2**18)  # 1 MiB
    before = names(small_disk)
    if not checked:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**40))
    with pytest.raises(NoSpaceError, match=r"step-00000002.* bytes are") as caught:
        save(small_disk, 2, size=2**20)
    assert (caught.value.exit_code, "\n" in str(caught.value)) == (6, False)
    if checked:
        assert f"{shutil.disk_usage(small_disk).free} are free" in str(caught.value)
    assert names(small_disk) == before
    assert find_checkpoint(small_disk, unwarned).tensors("model")["w"].eq(1).all()


@pytest.fixture
def small_files():
    """No file may grow over 64 KiB: the disk full, where nothing can be mounted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))  # Python ignores SIGXFSZ, so a write fails with EFBIG
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
def test_a_write_cut_short_keeps_the_last_checkpoint(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(NoSpaceError, match=os.strerror(errno.EFBIG)):
        save(tmp_path, 2, size=2**16)
    assert names(tmp_path) == ["latest", "step-00000001"]
    assert find_checkpoint(tmp_path, unwarned).step == 1


def test_a_run_starts_only_where_two_checkpoints_fit(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    require_space(tmp_path / "not" / "yet", free // 4, free // 4)
    with pytest.raises(NoSpaceError, match="bytes are needed"):
        require_space(tmp_path / "not" / "yet", free * 3 // 4, free * 3 // 4)


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


DAMAGE = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "emptied": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "missing": lambda path: path.unlink(),
    "garbage": lambda path: path.write_bytes(b"\xff" * 40),
    "other JSON": lambda path: path.write_bytes(b"[1, 2]"),
    "deep JSON": lambda path: path.write_bytes(b"[" * 100_000),
    "huge": lambda path: os.truncate(path, 2**40),
}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A folder with steps 1 and 2. Who damages step 2 puts it right again."""
    folder = tmp_path_factory.mktemp("two")
    save(folder, 1)
    save(folder, 2)
    return folder


def assert_passed_over(folder):
    """Step 2 is damaged: by name it is refused, and otherwise step 1 is taken with a warning."""
    warnings = []
    newest = folder / "checkpoints" / "step-00000002"
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(newest)
    assert (caught.value.exit_code, "\n" in str(caught.value)) == (4, False)
    assert str(newest) in str(caught.value)
    assert find_checkpoint(folder, warnings.append).step == 1
    assert warnings == [f"{caught.value}; taken instead: step-00000001"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_step_is_never_loaded(two_steps, file, damage):
    path = two_steps / "checkpoints" / "step-00000002" / file
    content = path.read_bytes()
    try:
        damage(path)
        assert_passed_over(two_steps)
    finally:
        path.write_bytes(content)
    assert find_checkpoint(two_steps, unwarned).step == 2


@pytest.mark.parametrize("file", FILES)
@given(position=st.floats(0, 1, exclude_max=True))
@settings(max_examples=150)
def test_one_flipped_bit_anywhere_is_noticed(two_steps, file, position):
    path = two_steps / "checkpoints" / "step-00000002" / file
    bit = int(position * 8 * path.stat().st_size)
    flip(path, bit)
    try:
        assert_passed_over(two_steps)
    finally:
        flip(path, bit)


def test_damage_after_opening_is_noticed_on_reading(tmp_path):
    checkpoint = save(tmp_path, 1)
    flip(checkpoint.path / "model.safetensors", 700)
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged"):
        checkpoint.tensors("model")
    with pytest.raises(CheckpointError, match=r"holds no optimizer.safetensors; it has model.safetensors, state.json"):
        checkpoint.tensors("optimizer")


def test_none_is_found_where_all_are_damaged(tmp_path):
    for step in (1, 2):
        (save(tmp_path, step).path / "manifest.json").unlink()
    warnings = []
    assert find_checkpoint(tmp_path, warnings.append) is None
    assert len(warnings) == 2


def test_newest_checkpoints_passes_over_damage_and_changes_nothing(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step, keep=5)
    (tmp_path / "checkpoints" / "step-00000004" / "state.json").unlink()
    (tmp_path / "checkpoints" / "step-00000006.tmp").mkdir()  # another process is saving
    before, warnings = names(tmp_path), []
    assert [checkpoint.step for checkpoint in newest_checkpoints(tmp_path, 3, warnings.append)] == [5, 3, 2]
    assert len(warnings) == 1
    assert names(tmp_path) == before


def test_identities_that_differ_are_listed_by_key():
    found = {"config": "aa", "data": "bb", "vocabulary": "cc"}
    checkpoint = Checkpoint(Path("run/checkpoints/step-00000001"), 1, {"identity": found})
    require_own(SimpleNamespace(path=Path("run"), identity=found), checkpoint)
    with pytest.raises(CheckpointError, match="does not belong to run run: ") as caught:
        require_own(
            SimpleNamespace(path=Path("run"), identity={"config": "aa", "data": "dd", "extra": "ee"}), checkpoint
        )
    assert str(caught.value).partition("run run: ")[2].split("; ") == [
        "data is bb in the checkpoint, dd here",
        "extra is missing in the checkpoint, ee here",
        "vocabulary is cc in the checkpoint, missing here",
    ]


def test_a_file_larger_than_memory_is_refused_before_it_is_read(tmp_path):
    """A sparse file of terabytes costs nobody anything, and its manifest can be sealed by anybody."""
    path = save(tmp_path, 1).path
    size = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    manifest = read_manifest(path)
    manifest["files"]["model.safetensors"]["size"] = size
    (path / "manifest.json").write_bytes(seal(manifest))
    os.truncate(path / "model.safetensors", size)
    with pytest.raises(
        CheckpointError, match=rf"it has {size} bytes, more than this machine has memory; nothing of it"
    ):
        open_checkpoint(path)
