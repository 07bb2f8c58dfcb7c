"""The benchmarks of kernels, eager calls and language models run anywhere at small sizes, keep time, and judge."""

import argparse
import json
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from closeness import assert_no_worse

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import eager
import kernel_speed
import running
import turns
from kernel_errors import describe_call, part_errors
from kernel_peers import PLAIN, add_wheels, flex_emulation, plain
from kernel_report import judge, name_row, write_table
from kernel_rows import threshold_arguments
from kernel_sentences import decode_trial
from kernel_setup import TINY, Bench, Row, Scale, Trial

from rectiformer import VARIANTS
from rectiformer.ops.reference import reference_attention

ROOT = Path(__file__).parent.parent
BENCH = Bench("cpu", TINY, 1.0)
CASE = {"size": 64, "mask": "full", "length": 16384}
MATMUL = {"section": "matmul", "case": {"size": 8192}, "ms": {"cublas": 1.0}, "tflops": {"cublas": 800.0}}


@pytest.fixture(scope="module")
def run_script(python):
    """Runs a script of benchmarks/: what it printed."""

    def run(name, *words):
        exit_code, printed = python(f"benchmarks/{name}.py", *words, RECTIFORMER_COMMIT="tested")
        assert exit_code == 0, printed
        return printed

    return run


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def sweep(run_script, tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "points.jsonl"
    printed = run_script("kernel_speed", "--device", "cpu", "--tiny", "--milliseconds", "0.1", "--out", str(out))
    return out, printed


def test_every_section_is_measured_and_right(sweep):
    points = read(sweep[0])
    there = set(kernel_speed.SECTIONS)
    assert {point["section"] for point in points} == {"matmul", *there}
    for point in points:
        assert {"command", "commit", "device", "torch", "triton", "time"} <= point.keys()
        assert not point.get("complaint"), point
    assert all("errors" in point for point in points if point["section"] in ("forward", "backward", "short", "decode"))


def test_a_ratio_is_the_quotient_of_two_times(sweep):
    point = next(point for point in read(sweep[0]) if point["section"] == "backward")
    assert point["ratios"]["flash"] == point["ms"]["flash"] / point["ms"]["ours"]
    assert point["tflops"]["ours"] == pytest.approx(2.5 * 4 * 4 * 2 * 16**3 / point["ms"]["ours"] / 1e9)


def test_a_peer_that_cannot_run_is_named_once_a_section(sweep):
    assert sweep[1].count("forward: cudnn: left out: RuntimeError") == 1
    assert "entmax: adasplash: left out: ModuleNotFoundError" in sweep[1]
    assert "sigmoid: triton sigmoid: left out: ModuleNotFoundError" in sweep[1]
    assert "threshold: tda: left out: ModuleNotFoundError" in sweep[1]


def test_a_second_run_measures_nothing_again(run_script, sweep):
    before = read(sweep[0])
    printed = run_script(
        "kernel_speed", "--device", "cpu", "--tiny", "--sections", "forward", "decode", "--out", str(sweep[0])
    )
    assert read(sweep[0]) == before
    assert printed.startswith("| what |")
    assert "| decode H 4 K 2 D 16 B 4 beam 2 N 8 |" in printed


def test_the_plot_has_a_panel_for_each_head_size_and_direction(run_script, sweep, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plots" / "rates.svg"
    run_script("kernel_report", sweep[0], "--plot", path)
    for text in ("forward, head size 16", "backward, head size 16", "rela", "SDPA (flash)", "cuBLAS"):
        assert f"<!-- {text} -->" in path.read_text()


def test_a_row_is_given_up_when_the_time_is_over(capsys, tmp_path):
    rows = [Row("forward", {"size": size}, lambda: time.sleep(60)) for size in (1, 2)]
    options = argparse.Namespace(out=tmp_path / "points.jsonl", device="cpu", tiny=True, seconds=0.05)
    start = time.monotonic()
    assert running.measure_rows(rows, kernel_speed.measure, {}, options, start + options.seconds) == []
    assert time.monotonic() - start < 20
    assert capsys.readouterr().out == "0.05 seconds are over; left: forward D 1; forward D 2\n"
    assert not options.out.exists()


def test_a_row_that_may_take_too_long_is_not_begun(capsys):
    rows = [Row("entmax", {"size": 1}, lambda: pytest.fail("begun"))]
    options = argparse.Namespace(out=None, device="cpu", tiny=False, seconds=50.0)
    end = time.monotonic() + options.seconds
    assert running.measure_rows(rows, kernel_speed.measure, {}, options, end, kernel_speed.NEEDED) == []
    assert "left: entmax D 1" in capsys.readouterr().out


def test_a_contestant_that_fails_is_left_out_of_its_row():
    def fail():
        raise ValueError("no such thing")

    row = Row("forward", {}, lambda: Trial({"broken": fail, "ours": lambda: lambda: None}, lambda work: 1.0))
    assert kernel_speed.measure(row)["ms"] == {"ours": 1.0}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_attention_off_by_one_percent_is_wrong(direction):
    tensors = BENCH.draw_dense(16, 32)
    right = BENCH.ours(causal=True)
    assert not part_errors(right, tensors, direction, "rela", rows=8, causal=True).complaint
    wrong = part_errors(lambda *qkv: 1.01 * right(*qkv), tensors, direction, "rela", rows=8, causal=True)
    assert wrong.own == pytest.approx(0.01, rel=1e-3)
    assert wrong.complaint


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_can_emulate_a_relu(causal):
    q, k, v = (tensor.detach() for tensor in BENCH.draw_dense(16, 32)[:3])
    call = describe_call(q, k, v, "rela", causal=causal)
    exact = reference_attention(q.double(), k.double(), v.double(), call)
    found = flex_emulation(32, causal, "cpu")(q.double(), k.double(), v.double())
    plain = reference_attention(q, k, v, call)
    assert_no_worse("flex", found.float(), plain, exact)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", sorted(PLAIN))
def test_plain_torch_computes_the_same(variant, causal):
    tensors = BENCH.draw_dense(16, 32)
    arguments = (threshold_arguments() if variant == "threshold" else {}) | {"causal": causal}
    assert part_errors(plain(variant, causal), tensors, "backward", variant, **arguments).own < 1e-6


def test_sparse_decoding_hides_one_key_in_twenty():
    trial = decode_trial(Bench("cpu", Scale(layers=1), 1.0), (4, 2, 64), 4, 2, 2048)
    assert trial.facts["sparsity"] == pytest.approx(0.95, abs=0.01)


def test_wheels_are_unpacked_and_imported(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    with zipfile.ZipFile(tmp_path / "a_peer-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a_peer_of_attention.py", "name = 'peer'\n")
    add_wheels(tmp_path, tmp_path / "room")
    import a_peer_of_attention

    assert a_peer_of_attention.name == "peer"
    assert Path(a_peer_of_attention.__file__).exists()


@pytest.mark.parametrize(
    ("point", "verdicts"),
    [
        ({"section": "forward", "ratios": {"cudnn": 1.2, "flash": 2.0}, "tflops": {"ours": 720.0}}, "reached reached"),
        ({"section": "forward", "ratios": {"cudnn": 1.3, "flash": 1.1}, "tflops": {"ours": 700.0}}, "missed missed"),
        ({"section": "backward", "ratios": {"cudnn": 1.15, "flash": 1.1}}, "reached "),
        ({"section": "short", "ratios": {"varlen": 2.5, "padded sdpa": 1.9}}, "missed"),
        ({"section": "decode", "ratios": {"sdpa": 6}, "ms": {"ours": 5, "ours y": 4, "sdpa": 6}}, "missed reached"),
        ({"section": "entmax", "ratios": {"adasplash": 3.0}, "ms": {"ours": 1.0, "adasplash": 3.0}}, "reached"),
        ({"section": "flex", "ratios": {"flex": 2.1}, "errors": {"ours": 2e-3, "flex": 1e-3}}, "reached missed"),
        ({"section": "sigmoid", "ratios": {"x": 1.1}, "errors": {"ours": 1e-3, "x": 2e-3}}, "reached "),
        ({"section": "memory", "extra_percent": {"ours": 10.5, "cudnn": 0.4}}, "missed "),
        ({"section": "plain", "ratios": {"eager": 5.0}}, ""),
    ],
)  # fmt: skip
def test_figures_are_held_against_what_was_asked(point, verdicts):
    marks = list(judge({"case": CASE, **point}, cublas=800.0))
    assert [mark.verdict for mark in marks] == verdicts.split(" ")


def test_a_wrong_answer_gets_no_ratio():
    point = {"section": "backward", "case": CASE, "ms": {"ours": 1.0, "cudnn": 2.0}, "ratios": {"cudnn": 2.0}}
    assert "| 2.00 |" in write_table([MATMUL, point])
    table = write_table([MATMUL, {**point, "complaint": "d_q: error 1"}])
    assert "wrong answer: d_q: error 1" in table
    assert "2.00" not in table


def test_rows_of_a_case_have_names_of_their_own():
    rows = [row for section in kernel_speed.SECTIONS.values() for row in section(Bench("cpu", Scale(), 1.0))]
    names = [name_row({"section": row.section, "case": row.case}) for row in rows]
    assert len(set(names)) == len(names)


def test_a_hugging_face_model_trains_with_both_attentions(run_script, tmp_path):
    pytest.importorskip("transformers")
    out = tmp_path / "points.jsonl"
    words = ["--size", "tiny", "--head-size", "16", "--repeats", "1", "--turns", "1", "--out", str(out)]
    printed = run_script("huggingface_training", "--device", "cpu", *words)
    sdpa, ours = read(out)
    assert (sdpa["contestant"], ours["contestant"]) == ("sdpa", "rectified")
    assert ours["ratio"] == pytest.approx(sdpa["ms"] / ours["ms"])
    assert ours["tokens_per_second"] == pytest.approx(32 / (ours["ms"] / 1e3))
    assert sdpa["loss"] != ours["loss"]
    assert all(torch.tensor(point["loss"]).isfinite() for point in (sdpa, ours))
    assert "sdpa-cudnn: left out:" in printed


@pytest.fixture(scope="module")
def eager_sweep(run_script, tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "points.jsonl"
    return out, run_script("eager", "--device", "cpu", "--tiny", "--milliseconds", "0.1", "--out", str(out))


def test_eager_calls_are_measured_in_every_section(eager_sweep):
    points = read(eager_sweep[0])
    assert {point["section"] for point in points} == set(eager.SECTIONS)
    for point in points:
        assert {"command", "commit", "device", "torch", "time"} <= point.keys()
        assert not point.get("complaint"), point
        for name, microseconds in point["us"].items():
            least, most = point["us_least_most"][name]
            assert least <= microseconds <= most
    measured = {
        (point["case"]["variant"], point["case"]["time"]) for point in points if point["section"] == "attention"
    }
    for variant in eager.PLAIN:
        if variant in VARIANTS:
            assert {(variant, "host"), (variant, "wall")} <= measured
        else:
            assert f"attention: {variant}: left out" in eager_sweep[1]


def test_eager_calls_are_not_measured_again(run_script, eager_sweep):
    before = read(eager_sweep[0])
    printed = run_script(
        "eager", "--device", "cpu", "--tiny", "--sections", "norm", "profile", "--out", str(eager_sweep[0])
    )
    assert read(eager_sweep[0]) == before
    assert printed.startswith("| what |")
    assert "| norm host forward+backward |" in printed


@pytest.mark.parametrize(
    ("section", "case", "ratios", "verdicts"),
    [
        ("attention", {"time": "host", "pass": "forward", "length": 128}, {"plain": 0.5}, "reached "),
        ("attention", {"time": "host", "pass": "forward+backward", "length": 128}, {}, "reached"),
        ("attention", {"time": "wall", "pass": "forward", "length": 2048}, {"sdpa": 0.5, "plain": 0.9}, " missed"),
        ("attention", {"time": "wall", "pass": "forward+backward", "length": 2048}, {"sdpa": 0.99}, "missed"),
        ("attention", {"time": "wall", "pass": "forward", "length": 8192}, {"sdpa": 1.0, "plain": 2}, "missed reached"),
        ("module", {"variant": "rela-g"}, {"torch": 1.0}, "reached"),
        ("module", {"variant": "softmax"}, {"torch": 0.5}, ""),
        ("packed", {}, {"varlen": 0.9, "padded sdpa": 1.1}, " reached"),
    ],
)  # fmt: skip
def test_eager_figures_are_held_against_their_bars(section, case, ratios, verdicts):
    marks = eager.judge({"section": section, "case": case, "us": {"ours": 45.0}, "ratios": ratios})
    assert [mark.verdict for mark in marks] == verdicts.split(" ")


def test_contestants_take_turns():
    """A clock that slows down halfway hits both alike."""
    order = []
    works = {name: lambda name=name: order.append(name) for name in ("ours", "peer")}
    clock = iter([1.0] * 4 + [2.0] * 4)
    trial = Trial({name: lambda work=work: work for name, work in works.items()}, lambda work: work() or next(clock))
    point = turns.measure_in_turns(Row("forward", {}, lambda: trial), rounds=4, warm_ups=1)
    assert order == ["ours", "peer"] * 5
    assert point["ratios"] == {"peer": 1.0}
    assert point["ms_least_most"] == {"ours": [1.0, 2.0], "peer": [1.0, 2.0]}


def test_hugging_face_models_run_with_both_attentions(run_script, tmp_path):
    pytest.importorskip("transformers")
    out = tmp_path / "points.jsonl"
    printed = run_script(
        "huggingface", "--device", "cpu", "--tiny", "--milliseconds", "0.1", "--commit", "abc", "--out", str(out)
    )
    points = read(out)
    assert {point["commit"] for point in points} == {"abc"}, "the option goes before the environment and git"
    assert {point["command"] for point in points} == {
        "python benchmarks/huggingface.py --device cpu --tiny --milliseconds 0.1"
    }
    found = {(point["section"], point["case"]["model"], point["case"]["text"]) for point in points}
    kinds = (("train", "llama"), ("train", "bert"), ("generate", "llama"))
    assert found == {(*kind, text) for kind in kinds for text in ("short", "long")}
    for point in points:
        assert point["ratios"]["sdpa"] == point["ms"]["sdpa"] / point["ms"]["ours"]
        if point["section"] == "train":
            assert point["losses"]["ours"] != point["losses"]["sdpa"]
            assert all(torch.tensor(losses).isfinite().all() for losses in point["losses"].values())
    assert printed.count("| >= 0.97 |") == printed.count("| >= 1 |") == 3
