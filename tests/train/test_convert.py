"""A softmax model becomes a rectified one: nearer to it by far than where its variant alone is changed."""

import json
from statistics import fmean

import pytest
import torch

from rectiformer.config import SITES
from rectiformer.errors import ConfigError
from rectiformer.model.attention import RectifiedAttention
from rectiformer.runs.folder import open_run
from rectiformer.runs.metrics import read_metrics
from rectiformer.text.prepared import Prepared
from rectiformer.toml import load_config, override_config
from rectiformer.train.convert import REPORT, convert, without_changes
from rectiformer.train.fitting import inherit, project_all, rotate_heads
from rectiformer.train.start import train
from rectiformer.train.teacher import SiteCall, load_teacher
from rectiformer.train.validation import Validator

TEACHER = (
    "data.sentences=3000", "data.valid_sentences=60", "vocabulary.size=400", "model.variant=softmax", "model.norm=pre",
    "model.hidden_size=48", "model.num_heads=3", "model.encoder_layers=1", "model.decoder_layers=1",
    "model.ffn_size=96", "model.dropout=0", "model.attention_dropout=0", "model.ffn_dropout=0", "training.steps=260",
    "training.batch_tokens=700", "training.schedule=linear", "training.learning_rate=6e-3", "training.warmup=60",
    "training.device=cpu", "validation.every=260", "validation.metric=loss", "validation.sentences=5",
    "checkpoint.every=260", "log.every=20",
)  # fmt: skip
SHORT = (
    "training.steps=60", "training.learning_rate=3e-3", "training.warmup=6", "validation.every=60",
    "checkpoint.every=20", "log.every=10",
)  # fmt: skip


@pytest.fixture(scope="module")
def softmax(tmp_path_factory):
    """The folder of a small softmax model that has learned something, with its data."""
    torch.set_num_threads(1)  # models this small gain nothing from more
    folder = tmp_path_factory.mktemp("softmax") / "run"
    train(load_config(None, TEACHER), folder)
    return folder


@pytest.fixture(scope="module")
def converted(softmax, tmp_path_factory):
    """The folder of its conversion, and what was found."""
    out = tmp_path_factory.mktemp("converted") / "run"
    return out, convert(softmax, "relu-exp", out, overrides=SHORT)


def last_loss(folder):
    return [record["valid_loss"] for record in read_metrics(folder / "metrics.jsonl") if "valid_loss" in record][-1]


def loss_of_a_swap(run, teacher):
    """Validation loss of the teacher's weights where no more than the variant is changed."""
    swapped = without_changes(run.config)
    model = type(run)(run.path, swapped, run.source, run.target, run.data_hash).build_model().eval()
    inherit(model, load_teacher(run, torch.device("cpu")))
    return Validator(model, Prepared.open(teacher / "data"), swapped, lambda: None).loss()


def test_a_converted_model_is_far_nearer_to_its_teacher_than_a_swapped_one(softmax, converted):
    run = open_run(converted[0])
    assert last_loss(softmax) < 3  # of 6 at first
    lost, swapped = last_loss(run.path) - last_loss(softmax), loss_of_a_swap(run, softmax) - last_loss(softmax)
    assert swapped > 0.5
    assert lost < swapped / 4


def test_heads_come_nearer_and_have_exact_zeros(converted):
    heads = converted[1].heads
    assert [(head.kind, head.head) for head in heads] == [
        (kind, head) for kind in ("encoder", "decoder", "cross") for head in range(3)
    ]
    for kind in SITES:
        own = [head for head in heads if head.kind == kind]
        assert fmean(head.error for head in own) < fmean(head.swapped for head in own)
    assert fmean(head.zeros for head in heads if head.kind == "cross") > 0.1
    assert all(head.agreement > 0.5 for head in heads)


def test_the_report_is_in_the_folder(converted):
    report = json.loads((converted[0] / REPORT).read_text())
    assert [head["error"] for head in report["heads"]] == [head.error for head in converted[1].heads]
    assert report["resisting_sites"] == converted[1].resisting


def test_a_conversion_that_is_resumed_at_its_end_says_the_same(softmax, converted):
    out, found = converted
    assert convert(softmax, "relu-exp", out, overrides=SHORT, resume=True).heads == found.heads


def test_metrics_tell_both_phases_apart(converted):
    records = [record for record in read_metrics(converted[0] / "metrics.jsonl") if "loss" in record]
    assert [("nll" in record) for record in records] == [False] * 3 + [True] * 3
    assert records[2]["loss"] < records[0]["loss"]


def test_other_commands_take_a_converted_run(converted, rectiformer):
    found = rectiformer("translate", converted[0], "--device", "cpu", stdin="Der Hund schläft.\n".encode())
    assert found.code == 0
    assert found.out.strip()


def test_a_site_can_keep_its_softmax(softmax, tmp_path, rectiformer):
    settings = [
        part for each in ("training.steps=2", "validation.every=2", "training.warmup=1") for part in ("--set", each)
    ]
    found = rectiformer(
        "convert", softmax, "--variant", "rela-g", "--out", tmp_path / "out", "--keep-softmax", "cross", *settings
    )
    assert (found.code, found.err) == (0, "")
    assert open_run(tmp_path / "out").config.model.variant_at("cross") == "softmax"
    rows = found.out.split("same top key")[1].split("error:")[0].split("\n")
    assert [row.split()[:2] for row in rows if row[:8].endswith("coder ")] == [["encoder", "1"], ["decoder", "1"]]
    assert not any(row.startswith("cross") for row in rows)
    assert "rectiformer analyze" in found.out
    again = rectiformer("convert", softmax, "--variant", "rela-g", "--out", tmp_path / "out")
    assert (again.code, "run folder" in again.err and "exists; use --resume" in again.err) == (4, True)
    other = rectiformer("convert", softmax, "--variant", "rela", "--out", tmp_path / "out", "--resume")
    assert (other.code, "to 'rela-g'; name that run and variant" in other.err) == (4, True)
    resume = ("convert", softmax, "--variant", "rela-g", "--out", tmp_path / "out", "--resume")
    kept = rectiformer(*resume, "--keep-softmax", "encoder")
    words = "with --keep-softmax encoder: its encoder attention is converted already; leave that out"
    assert (kept.code, words in kept.err) == (4, True)
    assert rectiformer(*resume, "--keep-softmax", "cross", "--set", "training.init_from=").code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("{softmax} --variant rula", 2, "unknown variant 'rula'; did you mean 'rela'"),
        ("{softmax} --variant softmax", 2, "cannot convert to variant 'softmax': it is what the run has"),
        ("{softmax} --variant inhibitor", 2, "it has no weights that could learn"),
        ("{tiny} --variant rela", 2, "its encoder attention is 'rela-g', and only a softmax can be converted"),
        ("missing --variant rela", 4, "there is no run folder missing"),
        ("{softmax} --variant rela --keep-softmax memory", 2, "unknown value of --keep-softmax 'memory'"),
        (
            "{softmax} --variant rela --keep-softmax encoder --keep-softmax decoder --keep-softmax cross",
            2,
            "nothing left to convert",
        ),
        ("{softmax} --variant rela --set model.num_heads=4", 2, "model.num_heads = 4, but it is 3 in"),
        ("{softmax} --variant rela --set data.stream=true", 2, "data.stream = true cannot be combined with"),
    ],
)
def test_what_does_not_fit_is_refused(softmax, tiny_run, tmp_path, rectiformer, arguments, code, words):
    given = arguments.format(softmax=softmax, tiny=tiny_run).split()
    found = rectiformer("convert", *given, "--out", tmp_path / "out")
    assert (found.code, found.out) == (code, "")
    assert words in found.err
    assert not (tmp_path / "out").exists()


def test_a_teacher_with_the_same_attention_leaves_nothing_to_align(softmax, tmp_path):
    config = override_config(open_run(softmax).config, [f"distillation.teacher={softmax}"])
    with pytest.raises(ConfigError, match="there is none to align"):
        train(config, tmp_path / "run", data=softmax / "data")


def test_the_basis_of_queries_and_keys_changes_no_score():
    module, x = RectifiedAttention(16, 2, "softmax").double(), torch.randn(3, 20, 16).double()
    with torch.no_grad():
        module.input_bias.normal_()
        call, before = SiteCall((x,), {}), module(x)
        queries, keys = project_all(module, [(call, torch.ones(3, 20, dtype=torch.bool))])
        rotate_heads(module, queries, keys)
        torch.testing.assert_close(module(x), before)
        q, k, _ = module.project(x, None, None)
    sizes = q.square().sum((0, 2)) * (k - k.mean((0, 2), keepdim=True)).square().sum((0, 2))
    assert (sizes.argmin(-1) == 0).all()  # the dimension that a score bias takes is the least
