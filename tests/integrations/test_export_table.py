"""The table in docs/export.md is what happens."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_every_variant_exports_where_the_table_says_so():
    run = subprocess.run([sys.executable, "docs/exports.py", "--check"], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
