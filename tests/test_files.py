"""Files of users: the old one or the new one, whatever happens, and nothing else in the folder."""

import errno
import os
import resource
import stat
import threading
from pathlib import Path

import pytest

from rectiformer.errors import ArgumentError, DataError, NoSpaceError
from rectiformer.files import replace_file, replacing


def write(path, content=b"new\n", **options):
    with replacing(path, **options) as file:
        file.write(content)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_old_file_is_there_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "out"
    path.write_bytes(b"old\n")
    with replacing(path) as file:
        file.write(b"new\n")
        file.flush()
        assert path.read_bytes() == b"old\n"
    assert path.read_bytes() == b"new\n"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [ValueError("wrong input"), KeyboardInterrupt(), SystemExit(1)], ids=repr)
@pytest.mark.parametrize("existing", [True, False])
def test_what_fails_leaves_everything_as_it_was(tmp_path, error, existing):
    path = tmp_path / "out"
    if existing:
        path.write_bytes(b"old\n")
    with pytest.raises(type(error)), replacing(path) as file:  # noqa: PT012 (a file and what fails while it is open)
        file.write(b"half of")
        raise error
    assert names(tmp_path) == ["out"] * existing
    assert not existing or path.read_bytes() == b"old\n"


@pytest.fixture
def full_disk():
    """A limit of the file size stands for the disk: both refuse a write in the middle of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))  # Python ignores SIGXFSZ, so a write fails with EFBIG
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_named_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "out"
    path.write_bytes(b"old\n")
    with pytest.raises(NoSpaceError, match=f"no space left while writing {path} .*; what was saved before is kept"):
        write(path, b"x" * 100_000)
    with pytest.raises(OSError, match="File too large") as caught:
        replace_file(path, b"x" * 100_000)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old\n"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("target", ["elsewhere/real", "elsewhere/new"])
def test_links_keep_pointing(tmp_path, target):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "real").write_bytes(b"old\n")
    (tmp_path / "link").symlink_to("between")
    (tmp_path / "between").symlink_to(target)
    write(tmp_path / "link")
    assert os.readlink(tmp_path / "link") == "between"
    assert os.readlink(tmp_path / "between") == target
    assert (tmp_path / target).read_bytes() == b"new\n"
    assert names(tmp_path) == ["between", "elsewhere", "link"]


def test_permissions_are_those_of_the_old_file_or_of_the_umask(tmp_path):
    (tmp_path / "old").write_bytes(b"old\n")
    (tmp_path / "old").chmod(0o640)
    before = os.umask(0o027)
    try:
        write(tmp_path / "old")
        write(tmp_path / "new")
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("old", "new")] == [0o640, 0o640]


def test_pipes_devices_and_descriptors_are_written_to_as_they_are(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    found = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write(tmp_path / "pipe")
    reader.join()
    assert found == [b"new\n"]
    write(Path("/dev/null"))
    with open(tmp_path / "log", "a+b") as log:
        write(Path(f"/dev/fd/{log.fileno()}"))
        log.write(b"and more\n")  # into the same file, not one that lost its name
    assert (tmp_path / "log").read_bytes() == b"new\nand more\n"
    assert names(tmp_path) == ["log", "pipe"]


def test_a_full_device_is_named():
    with pytest.raises(NoSpaceError, match="no space left while writing /dev/full"):
        write(Path("/dev/full"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("missing/out", errno.ENOENT), ("file/out", errno.ENOTDIR), ("folder", errno.EISDIR), ("loop", errno.ELOOP)],
)
def test_what_cannot_be_written_is_refused_in_one_line(tmp_path, name, reason):
    (tmp_path / "file").write_bytes(b"old\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    before = names(tmp_path)
    path = tmp_path / name
    for refusal in (DataError, ArgumentError):
        with pytest.raises(refusal, match=f"^cannot write {path}: {os.strerror(reason)}; "):
            write(path, refusal=refusal)
    assert names(tmp_path) == before


def test_an_error_about_another_file_is_passed_on(tmp_path):
    with pytest.raises(FileNotFoundError, match="input"), replacing(tmp_path / "out"):
        open(tmp_path / "input", "rb").close()
    assert names(tmp_path) == []
