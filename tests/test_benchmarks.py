"""Every benchmark starts; that of attention refuses wrong answers, and its points say how they were measured."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = [
    path.relative_to(ROOT)
    for folder in ("benchmarks", "examples")
    for path in sorted((ROOT / folder).glob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
]


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_every_script_starts_and_says_what_it_does(script, python):
    """Scripts that need a GPU or hours run nowhere else in these tests."""
    exit_code, printed = python(script, "--help")
    assert exit_code == 0, printed
    assert printed.startswith("usage:")


@pytest.fixture(scope="module")
def results(python, tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "points.jsonl"
    command = ["benchmarks/attention.py", "--variants", "rela", "sparsemax", "inhibitor"]
    command += ["--lengths", "16", "--tokens", "32", "--seconds", "0.01", "--masks", "causal", "--memory", "0.0004"]
    exit_code, printed = python(*command, "--out", out)
    assert exit_code == 0, printed
    return out, printed


def test_every_point_names_what_it_needs(results):
    points = [json.loads(line) for line in results[0].read_text().splitlines()]
    names = {point["name"] for point in points}
    assert names == {"rela", "sparsemax", "sparsemax (entmax)"}
    for point in points:
        assert point["ratio"]["p20"] <= point["ratio"]["p50"] <= point["ratio"]["p80"]
        assert point["turns"] >= 3
        assert {"commit", "device", "torch", "threads", "command", "time", "extra_mib", "error"} <= point.keys()
    assert {point["pass"] for point in points} == {"forward", "forward+backward"}


def test_what_would_not_fit_is_left_out_aloud(results):
    assert "inhibitor at 16: left out, would hold about" in results[1]


def test_a_wrong_answer_is_not_timed(python):
    """Run the check of the benchmark on attention that is off by one percent."""
    code = (
        "import sys; sys.path.insert(0, 'benchmarks'); sys.argv = ['attention.py']\n"
        "import attention as bench\n"
        "shape = bench.Shape('fp32', False, 16, 1, 1, 8)\n"
        "tensors = [bench.grid(1, 1, 16, 8, seed=s, dtype=bench.torch.float32).requires_grad_() for s in range(4)]\n"
        "right = next(bench.contenders(shape, ['rela']))\n"
        "bench.check(right, tensors, shape)\n"
        "wrong = bench.Contender('wrong', 'rela', lambda q, k, v: 1.01 * right.attend(q, k, v), 'blocked', 0)\n"
        "bench.check(wrong, tensors, shape)\n"
    )
    exit_code, printed = python("-c", code)
    assert exit_code == 1
    assert "AssertionError: wrong out: error" in printed
