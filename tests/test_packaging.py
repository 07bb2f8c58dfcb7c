"""What is installed: the wheel and the sdist hold the package with its pages, schema and lexicon, and nothing else."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

import rectiformer

ROOT = Path(__file__).parent.parent
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # setuptools writes its own arguments there
for make in (build_meta.build_wheel, build_meta.build_sdist):
    make(out)
"""


def tracked():
    names = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split("\n")
    return [name for name in names if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """The files of the wheel and of the sdist, made from what git tracks."""
    pytest.importorskip("setuptools", "77")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked():
        if not name.startswith(("docs/", "benchmarks/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    run = subprocess.run([sys.executable, "-c", BUILD, str(out)], capture_output=True, text=True, cwd=source)
    assert run.returncode == 0, run.stderr
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive, tarfile.open(sdist) as tar:
        held = {member.name.partition("/")[2] for member in tar.getmembers() if member.isfile()}
        return {"wheel": set(archive.namelist()), "sdist": held}


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_holds_every_file_of_the_package(contents, kind):
    files = {name for name in tracked() if name.startswith("rectiformer/")}
    assert {PurePosixPath(name).suffix for name in files} >= {".py", ".html", ".js", ".css", ".json", ".tsv", ".typed"}
    assert files <= contents[kind]


def test_it_holds_nothing_else(contents):
    about = f"rectiformer-{rectiformer.__version__}.dist-info/"
    assert {name for name in contents["wheel"] if not name.startswith("rectiformer/")} == {
        about + name
        for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    }
    others = {name for name in contents["sdist"] if not name.startswith(("rectiformer/", "rectiformer.egg-info/"))}
    written = {"PKG-INFO", "setup.cfg"}
    assert others - written == {
        "CITATION.cff",
        "LICENSE",
        "MANIFEST.in",
        "README.md",
        "constraints.txt",
        "pyproject.toml",
    }


def test_one_version_is_named_everywhere():
    for name, pattern in (("pyproject.toml", r'^version = "(.+)"'), ("CITATION.cff", r"^version: (.+)")):
        assert re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)[1] == rectiformer.__version__
