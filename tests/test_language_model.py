"""The language model of examples/: it learns with a softmax and with a ReLU, and its table says what was measured."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import language_model
from language_model import GPT, SIZES

from rectiformer import attention

ROOT = Path(__file__).parent.parent
SMALL = replace(SIZES["toy"], hidden_size=32, length=12)
TINY = ["--layers", "1", "--hidden-size", "64", "--length", "32", "--batch-size", "16"]


@pytest.fixture(scope="module")
def example(python):
    """Runs the example with some words: its exit code and what it printed."""
    return lambda *words: python("examples/language_model.py", *words, RECTIFORMER_COMMIT="tested")


@pytest.fixture(scope="module")
def trained(example, tmp_path_factory):
    """The points of a training with each of two variants, and what it printed."""
    out = tmp_path_factory.mktemp("results") / "points.jsonl"
    exit_code, printed = example("softmax", "rela-g", *TINY, "--updates", 100, "--out", out)
    assert exit_code == 0, printed
    return out, [json.loads(line) for line in out.read_text().splitlines()], printed


@pytest.mark.parametrize("variant", ["softmax", "rela-g"])
def test_it_learns_more_than_how_frequent_words_are(trained, variant):
    points = [point for point in trained[1] if point["variant"] == variant]
    assert [point["update"] for point in points] == list(range(10, 101, 10))
    assert points[-1]["loss"] < 0.6 * points[-1]["unigram_loss"]
    assert points[-1]["loss"] < points[0]["loss"]
    assert all(point["tokens_per_second"] > 0 for point in points[1:])


def test_only_the_rectified_one_has_zeros(trained):
    zeros = {point["variant"]: point["zeros"] for point in trained[1]}  # the last of each
    assert zeros["softmax"] == 0
    assert 0 < zeros["rela-g"] < 1


def test_points_say_where_they_come_from(example, trained):
    out, points, printed = trained
    for point in points:
        assert point["commit"] == "tested"
        words = " ".join(["softmax", "rela-g", *TINY, "--updates", "100"])
        assert point["command"] == f"python examples/language_model.py {words}"
        assert {"device", "torch", "seed", "text", "parameters", "null_rows", "perplexity"} <= point.keys()
    assert example("--table", out)[1].strip() == printed[printed.index("text grammar") :].strip()


def test_the_table_averages_over_seeds_and_leaves_out_what_was_not_finished(example, trained, tmp_path):
    last = trained[1][-1]
    changes = [{"loss": 2.0}, {"seed": 2, "loss": 3.0}, {"seed": 3, "loss": 9.0, "update": 54}, {"commit": "other"}]
    (tmp_path / "points").write_text("\n".join(json.dumps(last | change) for change in changes))
    first, second = example("--table", tmp_path / "points")[1].split("text grammar")[1:]
    assert "commit tested" in first
    assert "commit other" in second
    (row,) = [line for line in first.splitlines() if line.startswith("| rela-g")]
    assert row.split(" | ")[2:4] == ["2", "2.500"]


def test_a_training_reads_files_of_the_user(example, tmp_path):
    (tmp_path / "text").write_text("\n".join(f"line {i} of {i * i % 97}" for i in range(1000)))
    words = ["relu2-open", *TINY, "--updates", "20", "--text", tmp_path / "text", "--vocabulary-size", "60"]
    exit_code, printed = example(*words, "--grad-accumulation", "3")
    assert exit_code == 0, printed
    assert "text text," in printed


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["sofmax"], "unknown variant 'sofmax'; there are "),
        (["softmax-open"], "unknown variant 'softmax-open'"),
        (["--updates", "19"], "--updates 19 is too few to measure 10 times; give 20 or more"),
        (["--text", "missing"], "cannot read missing: No such file or directory"),
        (["--table", "missing"], "cannot read missing: No such file or directory"),
        (["--table", "README.md"], "README.md:1 is no line of JSON that --out wrote"),
    ],
)
def test_what_cannot_work_is_refused(example, words, complaint):
    exit_code, printed = example(*words)
    assert exit_code == 2
    assert complaint in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("name", ["softmax", "rela-g", "relu2-open", "threshold", "threshold-diff", "sigmoid"])
def test_no_token_sees_what_follows(name):
    torch.manual_seed(1)
    model = GPT(SMALL, name, 50)
    ids = torch.randint(50, (2, 12))
    changed = torch.cat([ids[:, :7], (ids[:, 7:] + 1) % 50], 1)
    before, after = model(ids), model(changed)
    torch.testing.assert_close(after[:, :7], before[:, :7])
    assert not torch.isclose(after[:, 7:], before[:, 7:]).all()


def test_an_open_score_bias_is_added_to_every_score(monkeypatch):
    """It rides in one dimension of queries and keys; here it is given to `attention` as what it is."""
    torch.manual_seed(1)
    layer = language_model.Attention(SMALL, "relu2-open")
    torch.nn.init.normal_(layer.score_bias.weight)
    x = torch.randn(2, 12, 32)
    gpt = GPT(SMALL, "softmax", 50)
    rotation = language_model.Rotation(gpt.cos, gpt.sin)
    ours = layer(x, rotation)

    def biased(q, k, v, variant, causal):
        rest = q.clone(), k.clone()
        for part in rest:
            part[..., 0] = 0
        return attention(*rest, v, variant, causal=causal, attn_bias=layer.score_bias(x).mT[..., None])

    monkeypatch.setattr(language_model, "attention", biased)
    torch.testing.assert_close(layer(x, rotation), ours)
