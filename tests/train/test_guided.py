"""Guided alignment: its loss by hand, its gradient where weights have none, and what a head learns from it."""

import copy
import json
import re
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from commands import run_main
from train.linked import SETTINGS, draw_gold, write_corpus

from rectiformer import VARIANTS
from rectiformer.config import Config, ModelConfig, TrainingConfig
from rectiformer.errors import ConfigError, DataError
from rectiformer.model.attention import RectifiedAttention
from rectiformer.model.transformer import Transformer
from rectiformer.ops.weights import head_scores
from rectiformer.runs.checkpoint import newest_checkpoints
from rectiformer.runs.metrics import read_metrics
from rectiformer.text.batches import Pairs, Symbols, collate
from rectiformer.text.links import CellLinks
from rectiformer.text.prepared import prepare
from rectiformer.toml import load_config
from rectiformer.train.guided import row_divergences
from rectiformer.train.start import train
from rectiformer.train.update import Updater
from rectiformer.translate.align import align_direction
from rectiformer.translate.translator import Translator

GUIDABLE = [name for name, row in VARIANTS.items() if row.has_weights and not row.difference_of]
NEVER_NULL = ["softmax", "sparsemax", "entmax15", "entmax", "topk"]


@pytest.mark.parametrize("nothing", [False, True])
def test_the_loss_is_the_divergence_from_even_links(nothing):
    scores = torch.randn(3, 4, 6, dtype=torch.float64)
    links = torch.rand(3, 4, 6) < 0.3
    links[0, 0] = False
    found = row_divergences(scores, links, nothing)
    classes = F.pad(scores, (0, 1), value=0.0) if nothing else scores
    even = F.pad(links, (0, 1))[..., : classes.shape[-1]].double()
    even = even / even.sum(-1, keepdim=True).clamp_min(1)
    expected = F.kl_div(classes.log_softmax(-1), even, reduction="none").sum(-1)
    assert found[0, 0] == 0
    torch.testing.assert_close(found, torch.where(links.any(-1), expected, 0.0))


def test_a_null_row_and_a_closed_key_learn():
    """All scores are negative, so no weight of a rectified row has a gradient; yet the linked key is drawn up."""
    scores = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    links = torch.tensor([[False, True, False]])
    assert not torch.autograd.grad(scores.relu().sum(), scores)[0].any()
    row_divergences(scores, links, nothing=True).sum().backward()
    assert (scores.grad < 0).tolist() == links.tolist()
    for _ in range(100):
        (gradient,) = torch.autograd.grad(row_divergences(scores, links, nothing=True).sum(), scores)
        scores.data -= gradient
    assert (scores > 0).tolist() == links.tolist(), "the linked key opens, the others stay closed"


def test_rows_without_links_and_hidden_keys_have_no_gradient():
    scores = torch.full((2, 3), -1e30, requires_grad=True)
    links = torch.tensor([[True, False, False], [False] * 3])
    row_divergences(torch.cat([scores[:, :1] * 0 + 1, scores[:, 1:]], 1), links, nothing=True).sum().backward()
    assert torch.isfinite(scores.grad).all()
    assert not scores.grad[:, 1:].any()


@pytest.mark.parametrize("variant", GUIDABLE)
def test_scores_of_a_head_are_those_its_weights_are_made_of(variant):
    """A key that scores more weighs no less, and a rectified weight is above 0 where the score is."""
    attention = RectifiedAttention(16, 4, variant, num_kv_heads=2, cross=True)
    seen = []
    attention.observer = seen.append
    bias = torch.randn(1, 4, 5, 7)
    bias[:, 1, 0, 0] = -torch.inf
    attention(torch.randn(2, 5, 16) * 3, torch.randn(2, 7, 16) * 3, key_lengths=torch.tensor([7, 4]), attn_bias=bias)
    (call,) = seen
    weights = call.weights()
    for head in range(4):
        scores, own = head_scores(call.q, call.k, head, variant, **call.call), weights[:, head]
        assert (scores[1, :, 4:] == -1e30).all()
        assert (scores[0, 0, 0] == -1e30) == (head == 1)
        if VARIANTS[variant].rectified or variant == "threshold":
            assert torch.equal(own > 0, scores > 0)
        if variant == "softmax":
            torch.testing.assert_close(own, scores.softmax(-1))
        elif variant not in ("self-adjust", "self-adjust-norm", "gelu"):  # which dip below 0
            order = scores[0, 1:].argsort(-1)  # of rows that see all keys
            assert (own[0, 1:].gather(-1, order).diff(dim=-1) >= -1e-6).all()


def test_variants_that_can_attend_to_nothing_are_those_off_the_simplex():
    assert [name for name in GUIDABLE if not VARIANTS[name].can_attend_to_nothing] == NEVER_NULL


class LinkedCorpus(Pairs):
    """Two pairs of 4 and 3 source and 3 and 2 target subwords, linked."""

    def __init__(self):
        sides = [[np.array([3, 4, 5, 6]), np.array([7, 8, 9])], [np.array([5, 6, 7]), np.array([8, 9])]]
        super().__init__([np.concatenate(side) for side in sides], [np.array([len(i) for i in side]) for side in sides])
        self.links = CellLinks(np.array([[0, 1], [2, 3], [2, 0], [1, 2]]), np.array([0, 3, 4]))


SYMBOLS = Symbols(source_pad=0, source_end=1, target_pad=0, target_start=2, target_end=1)


def test_batches_carry_links_where_the_subwords_are():
    small = collate(LinkedCorpus(), np.array([1, 0]), SYMBOLS, linked=True)
    large = collate(LinkedCorpus(), np.array([1, 0]), SYMBOLS, rows=3, length=8, linked=True)
    assert small.links.shape == (2, 4, 5)
    assert large.links.shape == (3, 8, 8), "one shape for every batch of this length, as captured updates need"
    for links in (small.links, large.links):
        assert links.nonzero().tolist() == [[0, 1, 2], [1, 0, 1], [1, 2, 0], [1, 2, 3]]
    assert collate(LinkedCorpus(), np.array([0]), SYMBOLS).links is None


def build(variant="softmax", **settings):
    config = Config(
        model=ModelConfig(
            hidden_size=16, num_heads=2, ffn_size=16, variant=variant, dropout=0, attention_dropout=0, ffn_dropout=0
        ),
        training=TrainingConfig(compile="no", guided_head=2, **settings),
    )
    torch.manual_seed(0)
    return Updater(Transformer(config.model, 11, 11).train(), config, torch.device("cpu"))


@pytest.mark.parametrize("mean", ["token", "sentence"])
def test_an_update_has_the_gradient_of_the_loss_by_hand(mean):
    """Of a softmax: minus the mean logarithm of the linked weights of head 2 at the steps that read the words."""
    batch = collate(LinkedCorpus(), np.array([0, 1]), SYMBOLS, rows=3, length=8, linked=True)
    plain, guided = build(loss_mean=mean), build(loss_mean=mean, guided_alignment=0.3)
    model = copy.deepcopy(guided.model)
    for updater in (plain, guided):
        updater.update(1, [batch])
    seen = []
    model.decoder[0].cross.observer = seen.append  # of two layers, the last but one
    model(batch.source, batch.source_lengths, batch.target_input)
    weights = seen[0].weights()[:, 1].log()
    first = weights[0, 1, 1] + (weights[0, 3, 0] + weights[0, 3, 3]) / 2
    second = weights[1, 2, 2]
    loss = -(first + second) / 7 if mean == "token" else -(first / 4 + second / 3) / 2
    found = torch.autograd.grad(0.3 * loss, list(model.parameters()), allow_unused=True)
    both = zip(found, model.parameters(), strict=True)
    gradient = torch.cat([(torch.zeros_like(own) if part is None else part).flatten() for part, own in both])
    torch.testing.assert_close(guided.flat_grad - plain.flat_grad, gradient)
    entropy = 2 * torch.tensor(0.5).log() / 2  # of the word with two links, subtracted
    even = entropy / 7 if mean == "token" else entropy / 4 / 2
    assert guided.read().penalty == pytest.approx(0.3 * (loss + even).item(), rel=1e-5)


def test_other_heads_get_no_gradient_and_no_scores(monkeypatch):
    """Only one head's queries and keys are multiplied, whatever the number of heads."""
    from rectiformer.train import guided as module

    shapes = []

    def noted(q, k, head, variant, **call):
        scores = head_scores(q, k, head, variant, **call)
        shapes.append(scores.shape)
        (gradient,) = torch.autograd.grad(scores.sum(), q, retain_graph=True)
        assert not gradient[:, 0].any()
        return scores

    monkeypatch.setattr(module, "head_scores", noted)
    batch = collate(LinkedCorpus(), np.array([0, 1]), SYMBOLS, linked=True)
    updater = build("rela-g", guided_alignment=0.3)
    updater.update(1, [batch])
    assert shapes == [(2, 4, 5)]
    assert updater.model.decoder[0].cross.observer is None


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """By variant and weight: the folder of a run of 150 updates, and its last validation loss."""
    folder, found = tmp_path_factory.mktemp("runs"), {}
    data = prepare(load_config(None, [*SETTINGS, *corpus]), folder / "data").folder
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(variant, weight):
        if (variant, weight) not in found:
            path = folder / f"{variant}-{weight}"
            changes = [f"model.variant={variant}", f"training.guided_alignment={weight}", "training.steps=150"]
            train(load_config(None, [*SETTINGS, *corpus, *changes, "validation.every=150"]), path, data=data)
            losses = [record["valid_loss"] for record in read_metrics(path / "metrics.jsonl") if "valid_loss" in record]
            found[variant, weight] = path, losses[-1]
        return found[variant, weight]

    yield run
    torch.set_num_threads(threads)


@pytest.mark.parametrize("variant", ["softmax", "rela-g"])
def test_a_guided_head_aligns_and_the_model_learns_to_translate_no_slower(variant, trained):
    """So few updates translate nothing, so BLEU says nothing yet; the loss on held-out text does."""
    pairs, gold = draw_gold(100)
    (plain, plain_loss), (guided, guided_loss) = trained(variant, 0), trained(variant, 0.2)
    best = align_direction(Translator.from_run(plain, device="cpu"), pairs, gold).best
    own = align_direction(Translator.from_run(guided, device="cpu"), pairs, gold).best
    assert (own.layer, own.head, own.induction) == (0, 0, "shifted")
    assert own.score.aer < 0.5 < best.score.aer, "even though the best of all heads is taken where none was guided"
    assert guided_loss < plain_loss


def test_align_and_translate_use_the_head_and_say_so(trained, tmp_path, capsys):
    run, _ = trained("rela-g", 0.2)
    (pair, *_), _ = draw_gold(1)
    for name, line in zip(("s", "t"), pair, strict=True):
        (tmp_path / name).write_text(f"{line}\n", encoding="utf-8")
    files = [str(tmp_path / name) for name in ("s", "t")]
    links = {}
    for head in ("", "1", "2"):
        asked = ["--layer", "1", "--head", head, "--induction", "shifted"] if head else []
        assert run_main("align", run, *files, "--device", "cpu", *asked) == 0
        found = capsys.readouterr()
        assert ("links by layer 1, head 1, shifted, trained to do so" in found.err) == (not head)
        links[head] = found.out
    assert links[""] == links["1"] != links["2"]
    assert run_main("translate", run, files[0], "--json", "--alignments", "auto", "--device", "cpu") == 0
    found = capsys.readouterr()
    assert '"alignment": "' in found.out
    assert "words are linked by layer 1, head 1, shifted, trained to do so" in found.err


def test_a_line_too_long_to_align_has_no_links_and_is_named(trained, tmp_path, capsys):
    run, _ = trained("rela-g", 0.2)
    for name in ("s", "t"):
        (tmp_path / name).write_text(f"Hund\n{'Hund ' * 1100}\nHund\n", encoding="utf-8")
    assert run_main("align", run, tmp_path / "s", tmp_path / "t", "--device", "cpu") == 0
    found = capsys.readouterr()
    first, second, third, _ = found.out.split("\n")
    assert (second, first) == ("", third)
    assert "warning: pair 2: a side has more than 1024 subwords, so its words are not linked" in found.err


def test_translating_with_markup(trained, tmp_path, capsys):
    """Every tag comes out, nested, whatever the model says; lines are as many, and mistakes are said."""
    run, _ = trained("rela-g", 0.2)
    lines = ["Der <b>alte <i>Hund</i></b> schläft.", "", "<br/>", "Der <b>Hund schläft.", "Der Hund schläft."]
    (tmp_path / "s").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    command = ("translate", run, tmp_path / "s", "--markup", "--device", "cpu")
    assert run_main(*command) == 0
    found = capsys.readouterr()
    marked, empty, alone, unpaired, plain, _ = found.out.split("\n")
    assert re.fullmatch(r"[^<]*<b>[^<]*<i>[^<]*</i>[^<]*</b>[^<]*", marked)
    assert (empty, alone) == ("", "<br/>")
    assert unpaired.count("&lt;b&gt;") == 1
    assert "line 4: <b> has no partner in this line, so it is kept as text" in found.err
    assert run_main(*command, "--json") == 0
    records = [json.loads(line) for line in capsys.readouterr().out.split("\n")[:-1]]
    translations = [marked, empty, alone, unpaired, plain]
    assert [(each["source"], each["translation"]) for each in records] == list(zip(lines, translations, strict=True))
    for wrong in (["--documents", "blank"], ["--nbest", "2"], ["--heads", "--json"]):
        assert run_main(*command, *wrong) == 2
        assert "--markup" in capsys.readouterr().err


def test_a_resumed_run_ends_as_one_that_was_not_stopped(corpus, tmp_path):
    settings = [*SETTINGS, *corpus, "training.guided_alignment=0.2", "model.dropout=0.1", "validation.every=100"]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    train(load_config(None, [*settings, "training.steps=8"]), straight)
    shutil.copytree(straight / "data", tmp_path / "data")
    for steps in (5, 8):
        config = load_config(None, [*settings, f"training.steps={steps}"])
        train(config, resumed, data=tmp_path / "data", resume=steps == 8)
    first, second = (newest_checkpoints(folder, 1, pytest.fail)[0] for folder in (straight, resumed))
    assert first.state()["batches"] == second.state()["batches"]
    for name in ("model", "optimizer"):
        own, other = first.tensors(name), second.tensors(name)
        assert own.keys() == other.keys()
        assert all(torch.equal(own[key], other[key]) for key in own)


def change_links(corpus, tmp_path, change):
    """The settings with a links file whose lines were changed."""
    path = corpus[-1].partition("=")[2]
    with open(path, encoding="utf-8") as file:
        lines = change(file.read().split("\n")[:-1])
    (tmp_path / "own.links").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return [*corpus[:-1], f"data.links={tmp_path / 'own.links'}"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[:-3], r"own\.links has 1,997 lines but .*train\.de has 2,000; line n of a links file"),
        (lambda lines: [*lines, ""], r"own\.links has 2,001 lines but .*train\.de has 2,000"),
        (
            lambda lines: [*lines[:6], "0-0 99-1", *lines[7:]],
            r"own\.links:7: link 99-1 is beyond the sentence",
        ),
        (lambda lines: ["0-0 1_1", *lines[1:]], r"own\.links:1:5: '1_1' is not a link; write i-j"),
    ],
    ids=["too few lines", "too many lines", "a word that is not there", "no link"],
)
def test_links_that_are_not_those_of_the_text_are_refused(change, message, corpus, tmp_path):
    settings = [*SETTINGS, *change_links(corpus, tmp_path, change), "training.guided_alignment=0.1"]
    with pytest.raises(DataError, match=message):
        train(load_config(None, settings), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.links=[]"], "training.guided_alignment = 0.1, but data.links names no files"),
        (["data.links=['a', 'b']"], "data.links names 2 files but data.source 1; name one for each"),
        (["training.guided_layer=2"], "training.guided_layer = 2, but the decoder has layers 1 to 1"),
        (["training.guided_head=3"], "training.guided_head = 3, but its attention has heads 1 to 2"),
        (["model.cross_variant=inhibitor"], "needs a weight for each score, but cross-attention is 'inhibitor'"),
        (["model.cross_variant=threshold-diff"], "cross-attention is 'threshold-diff', which"),
        (
            ["data.segment_length=50", "data.documents=blank"],
            "data.links are of sentence pairs, so they do not go with",
        ),
        (["data.max_length=70000"], "data.max_length = 70,000, but pairs with data.links have at most 65,535"),
        (
            ["data.stream=true", "data.source=[]", "data.links=[]"],
            "needs prepared text with data.links, but data.str",
        ),
    ],
)
def test_what_cannot_be_guided_is_refused_before_anything_is_made(changes, message, corpus, tmp_path):
    def run():
        train(load_config(None, [*SETTINGS, *corpus, "training.guided_alignment=0.1", *changes]), tmp_path / "run")

    with pytest.raises(ConfigError, match=message) as caught:
        run()
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_missing_links_file_is_named(corpus, tmp_path):
    settings = [*SETTINGS, *corpus, "training.guided_alignment=0.1", "data.links=/nowhere/links"]
    with pytest.raises(DataError, match=re.escape("cannot read /nowhere/links: No such file")):
        train(load_config(None, settings), tmp_path / "run")
