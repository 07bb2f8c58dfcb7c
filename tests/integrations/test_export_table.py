"""What can be exported where: refusals, help, README.md and docs/export.md all follow one table, and it is true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rectiformer.config import ModelConfig
from rectiformer.errors import ArgumentError
from rectiformer.integrations.export import CAN_RUN, FORMATS, NORMS, placements, require_exportable, table
from rectiformer.ops.variants import VARIANTS, find_variant

ROOT = Path(__file__).parent.parent.parent
CASES = [(variant, format, norm) for variant in VARIANTS for format in FORMATS for norm in ("post", "pre")]


@pytest.mark.slow
def test_every_variant_exports_where_the_table_says_so():
    run = subprocess.run([sys.executable, "docs/exports.py", "--check"], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    rows = re.search("<!-- exports -->\\n(.*)<!-- /exports -->", page, re.DOTALL)[1].strip().split("\n")
    assert rows[0] == f"| variant | {' | '.join(FORMATS)} |"
    assert rows[2:] == [f"| `{variant}` | {' | '.join(cells)} |" for variant, *cells in table()]
    assert [row.split("`")[1] for row in rows[2:]] == list(VARIANTS)


def summarize(format):
    """What a format accepts, in one line."""
    rest = [name for name in VARIANTS if name not in CAN_RUN[format]]
    named = (name + ' (center_keys = "no")' * ("center" in placements(name, format)) for name in CAN_RUN[format])
    taken = f"every variant but {', '.join(rest)}" if len(rest) < len(CAN_RUN[format]) else ", ".join(named)
    return f"{taken}; norm {' or '.join(NORMS[format])}"


def test_help_and_readme_say_what_each_format_takes(rectiformer):
    shown = " ".join(rectiformer("export", "--help").out.split())
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for format in FORMATS:
        assert f"Takes {summarize(format)}." in shown
        assert f"({summarize(format)})" in readme


def test_a_refusal_says_where_else_a_model_can_go():
    for variant, format, norm in CASES:
        config = ModelConfig(variant=variant, norm=norm)
        elsewhere = [
            other
            for other in FORMATS
            if norm in placements(variant, other).split(", ") and "with" not in placements(variant, other)
        ]
        if format in elsewhere:
            require_exportable(config, format)
            continue
        with pytest.raises(ArgumentError) as caught:
            require_exportable(config, format)
        _, _, advice = str(caught.value).partition("; ")
        expected = (
            f"export it with --to {' or '.join(elsewhere)}" if elsewhere else "only rectiformer itself can run it"
        )
        if format == "transformers" and (variant, norm) == ("reluformer", "post"):
            expected += ', or train with model.center_keys = "no"'
        assert advice == expected


def test_marian_is_given_what_transformers_registers():
    pytest.importorskip("transformers")
    from rectiformer.integrations.marian import have_same_weights
    from rectiformer.integrations.transformers import STANDARD

    fit = {
        name
        for name in VARIANTS
        for standard in STANDARD.values()
        if have_same_weights(find_variant(standard), VARIANTS[name])
    }
    assert {"softmax", *fit} == set(CAN_RUN["transformers"])
