"""The commands as a user runs them: signals and broken streams in processes of their own, the rest through `main`."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
import typer
from commands import lines, run_main
from rich.console import Console

from rectiformer import VARIANTS, __version__
from rectiformer import __main__ as entry
from rectiformer.cli import translating
from rectiformer.cli.options import app
from rectiformer.terminal import Terminal

TINY = """
[data]
sentences = 400
valid_sentences = 20
[vocabulary]
size = 300
[model]
hidden_size = 32
num_heads = 2
encoder_layers = 1
decoder_layers = 1
ffn_size = 32
[training]
steps = 30
batch_tokens = 300
learning_rate = 0.3
[validation]
every = 15
sentences = 5
[log]
every = 10
"""
HOSTILE = "Der Hund schläft.\n\n \t \nA\u2028B\u0085C\rD\n\0\n\u202eder\u0301\u0301 Hund\n\ufeff\nohne LF"


def start(*arguments, **streams):
    """A process of its own, with one thread: several on few cores wait for each other."""
    environment = {**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, "-m", "rectiformer", *map(str, arguments)],
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a job in the background ignores
        **pipes | streams,
    )


def in_process_of_its_own(*arguments):
    process = start(*arguments)
    out, err = process.communicate()
    return SimpleNamespace(code=process.returncode, out=out.decode(), err=err.decode())


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A trained run, a test set with words and links, and a set with one target line too many."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "tiny.toml").write_text(TINY, encoding="utf-8")
    trained = in_process_of_its_own("train", folder / "tiny.toml", "--out", folder / "run")
    assert trained.code == 0, trained.err
    assert run_main("data", "generate", folder / "test", "--sentences", 12, "--split", "test") == 0
    (folder / "longer.en").write_bytes((folder / "test.en").read_bytes() + b"One more.\n")
    (folder / "empty").write_bytes(b"")
    (folder / "hostile").write_bytes(HOSTILE.encode())
    (folder / "latin1").write_bytes(b"Gut.\nSch\xf6n.\n")
    return SimpleNamespace(folder=folder, run=folder / "run", trained=trained.out)


def test_variants_lists_the_whole_table(rectiformer):
    found = rectiformer("variants")
    assert found.code == 0
    for variant in VARIANTS.values():
        (line,) = [line for line in lines(found.out) if line.split(" ")[0] == variant.name]
        for part in (variant.formula, variant.paper, ", ".join(variant.implementations)):
            assert part in line


@pytest.mark.parametrize("name", ["rela-g", "entmax"])
def test_one_variant_in_full(rectiformer, name):
    found = rectiformer("variants", name)
    variant = VARIANTS[name]
    assert found.code == 0
    for part in (variant.formula, variant.paper, variant.use, variant.output_norm, *variant.options):
        assert part in found.out


COMMANDS = [
    "demo", "train", "convert", "translate", "score", "evaluate", "align", "analyze", "explore", "serve", "export",
    "study", "variants", "config",
]  # fmt: skip


@pytest.mark.parametrize(
    "command", [[name] for name in COMMANDS] + [["data", "generate"], ["data", "prepare"]], ids=" ".join
)
def test_help_of_every_command_explains_every_option(rectiformer, command):
    found = rectiformer(*command, "--help")
    assert found.code == 0
    assert re.search(f"Usage: .* {' '.join(command)} ", found.out)
    options = [line for line in lines(found.out) if line.startswith("│") and "--" in line[:8]]
    assert options
    assert all(len(line.strip("│ *").split("  ")[-1].strip()) > 5 for line in options)


def test_help_shows_examples_on_lines_of_their_own_and_all_words(rectiformer):
    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        examples = [line.strip() for line in lines(command.callback.__doc__) if line.startswith(" " * 8)]
        if examples:
            assert set(examples) <= {line.strip() for line in lines(rectiformer(name, "--help").out)}, name


@pytest.mark.parametrize("command", [*COMMANDS, "data generate", "data prepare"])
def test_help_keeps_every_word_of_every_option(rectiformer, monkeypatch, command):
    """Markdown takes `<d>` for markup, and drops it, unless it stands between backticks."""
    monkeypatch.setenv("COLUMNS", "1000")
    shown = rectiformer(*command.split(" "), "--help").out
    found = typer.main.get_command(app)
    for name in command.split(" "):
        found = found.commands[name]
    for each in found.params:
        assert each.help is None or " ".join(each.help.replace("`", "").split()) in shown, each.name


def test_help_names_every_command(rectiformer):
    text = rectiformer("--help").out
    assert all(f" {command} " in text for command in [*COMMANDS, "data"])


def test_the_installed_script_is_main_with_an_end_for_ranks():
    (script,) = entry_points(group="console_scripts", name="rectiformer")
    assert script.load() is entry.start


def test_version_is_the_packages(rectiformer):
    assert rectiformer("--version").out == f"rectiformer {__version__}\n"


def test_config_prints_toml_with_overrides(rectiformer):
    found = rectiformer("config", "--set", "training.steps=3")
    assert found.code == 0
    assert "[training]\n# Updates.\nsteps = 3\n" in found.out


def test_a_mistake_is_one_line_and_the_code_of_the_process():
    found = in_process_of_its_own("translate", "missing", "test.de")
    assert (found.code, found.out) == (4, "")
    assert found.err.startswith("rectiformer: there is no run folder missing")
    assert found.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("train --out new --set training.stepz=3", 2, "unknown key 'training.stepz'; did you mean 'steps'"),
        ("train --out new --set data.source=empty --set data.target=empty", 3, "no sentence pairs in empty"),
        ("train --out new --set data.source=missing --set data.target=empty", 3, "cannot read missing: No such file"),
        ("train tiny.toml --out run", 4, "run folder run exists; use --resume"),
        ("score run test.de longer.en", 3, "test.de has 12 lines but longer.en has 13; first suspect line: 13"),
        ("variants relu", 2, "unknown variant 'relu'; did you mean 'reluformer'"),
        ("config missing.toml", 2, "cannot read missing.toml: No such file or directory"),
        ("translate test.de", 4, "test.de is a file, but the first argument is a run folder"),
        ("translate run missing", 3, "cannot read missing: No such file"),
        ("translate run latin1", 3, "latin1:2:4: not UTF-8 (0xF6); repair it, or let `translate --bad-utf8`"),
        ("translate run test.de --out test.de", 2, "--out test.de is also read; it is untouched"),
        ("translate run test.de --out missing/out", 2, "cannot write missing/out: No such file or directory"),
        ("translate run test.de --bad-utf8 ignore", 2, "unknown value of --bad-utf8 'ignore'"),
        ("translate run test.de --top-k 3", 2, "top_k = 3 is about sampling"),
        ("translate run test.de --nbest 9", 2, "nbest = 9 is more than beam = 4"),
        ("translate run test.de --heads", 2, "--alignments and --heads are parts of JSON records"),
        ("translate run test.de --json --alignments 0", 2, "--alignments '0' is not of the form"),
        (
            "translate run test.de --json --alignments 7:1:normal",
            2,
            "layer 7 does not exist; the decoder has layers 1 to 1",
        ),
        (
            "translate run test.de --json --alignments 0:1:normal",
            2,
            "--alignments 0: layers and heads are counted from 1",
        ),
        ("translate run test.de --json --alignments best:1:normal", 2, "layer best does not exist; the decoder has"),
        ("translate run test.de --prefix empty", 3, "only 0 prefixes, but line 1 follows"),
        ("translate run test.de --checkpoint 7", 4, "run/checkpoints/step-"),
        ("train --resume --out missing", 4, "there is no run folder missing"),
        (
            "train --resume --out run --set model.hidden_size=64",
            4,
            "cannot resume run with model.hidden_size = 64 (was 32)",
        ),
        ("evaluate --reference test.en", 2, "name one RUN or one --hypothesis"),
        ("evaluate run --reference test.en", 2, "a run needs --source"),
        ("evaluate --hypothesis longer.en --reference test.en", 3, "hypotheses: 13 lines for 12 references"),
        ("evaluate run --source test.de --reference longer.en", 3, "sources: 12 lines for 13 references"),
        ("evaluate --hypothesis test.en --reference test.en --metrics blue", 2, "unknown metric 'blue'; did you mean"),
        ("evaluate --hypothesis empty --reference empty", 3, "hypotheses: 0 lines for 0 references"),
        ("align run test.de test.en --layer best", 2, "--table and the best layer, head or induction need --gold"),
        ("align run test.de test.en --head three", 2, "head three does not exist; there are heads 1 to 2 and average"),
        ("align run test.de test.en --head 3", 2, "head 3 does not exist; there are heads 1 to 2 and average"),
        ("align run test.de test.en --layer 2", 2, "layer 2 does not exist; the decoder has layers 1 to 1"),
        ("align run test.de test.en --layer 0", 2, "--layer 0: layers and heads are counted from 1; the first is 1"),
        ("align run test.de test.en --head 0", 2, "--head 0: layers and heads are counted from 1; the first is 1"),
        ("align run test.de test.en --gold test.en", 3, "test.en:1:1: "),
        ("data generate test --sentences 2", 3, "test.de exists; nothing was written"),
        ("data generate new", 2, "--sentences 0 and --documents 0"),
        ("data generate new --sentences 2 --split all", 2, "unknown split 'all'"),
        ("data prepare --out run", 3, "run exists"),
    ],
)
def test_errors_say_what_where_and_what_to_do(world, rectiformer, monkeypatch, arguments, code, words):
    monkeypatch.chdir(world.folder)
    before = sizes(world.folder)
    found = rectiformer(*arguments.split(" "))
    assert found.err.startswith(f"rectiformer: {words}")
    assert found.err.count("\n") == 1
    assert found.code == code
    assert sizes(world.folder) == before


@pytest.mark.parametrize(
    ("stream", "code", "words"),
    [("stdin", 3, "cannot read stdin: it is closed"), ("stdout", 2, "cannot use standard output: it is closed")],
)
def test_a_closed_stream_is_named(world, monkeypatch, capfd, stream, code, words):
    """As `<&-` and `>&-` of a shell leave them."""
    monkeypatch.setattr(sys, stream, None)
    assert run_main("translate", world.run, "-" if stream == "stdin" else world.folder / "test.de") == code
    assert capfd.readouterr().err.startswith(f"rectiformer: {words}")


def sizes(folder):
    """Of all files but locks, which may stay behind."""
    return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"}


def test_training_says_how_it_goes_and_how_to_go_on(world):
    said = lines(world.trained)
    assert [line.split(":")[0] for line in said if line.startswith("step")] == [
        "step 10 of 30",
        "step 15",
        "step 20 of 30",
        "step 30 of 30",
        "step 30",
    ]
    assert said[-1].startswith("trained 30 steps; best BLEU ")
    assert said[-1].endswith(f"translate with: rectiformer translate {world.run} FILE")


def test_resume_without_a_file_goes_on_with_the_runs_own(world, rectiformer, tmp_path):
    shutil.copytree(world.run, tmp_path / "run")
    found = rectiformer("train", "--resume", "--out", tmp_path / "run", "--set", "training.steps=32")
    assert found.code == 0, found.err
    assert "resumed at step 30" in lines(found.out)
    assert lines(found.out)[-1].startswith("trained 32 steps; ")
    assert [line.split(":")[0] for line in lines(found.out) if line.startswith("step")] == ["step 32 of 32"]


@pytest.mark.parametrize("left", ["data.tmp-123", "data", "config.toml"])
def test_what_was_killed_before_it_was_a_run_is_told_how_to_go_on(rectiformer, tmp_path, left):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("run.lock", left):
        (run / name).touch()
    found = rectiformer("train", "--resume", "--out", run)
    words = f"{run} was left before its configuration was saved; name its CONFIG with --resume, or remove {run} and"
    assert (found.code, found.err.startswith(f"rectiformer: {words}")) == (4, True)


def test_a_damaged_configuration_is_not_resumed_with(world, rectiformer, tmp_path):
    config = shutil.copytree(world.run, tmp_path / "run") / "config.toml"
    config.write_text(config.read_text().replace("beta1 = 0.9\n", "beta1 = 0.1\n"))
    for command in (["train", "--resume", "--out", tmp_path / "run"], ["translate", tmp_path / "run"]):
        found = rectiformer(*command)
        assert (found.code, len(lines(found.err))) == (4, 1)
        assert "config.toml is not as it was saved: training.beta1 = 0.1 (saved: 0.9)" in found.err
    config.unlink()
    found = rectiformer("train", "--resume", "--out", tmp_path / "run")
    assert found.code == 0, found.err
    assert config.read_text() == (world.run / "config.toml").read_text()


def test_prepared_data_is_described_and_trained_on(world, rectiformer, tmp_path):
    config = world.folder / "tiny.toml"
    found = rectiformer("data", "prepare", config, "--out", tmp_path / "ids")
    assert found.code == 0, found.err
    *_, train, valid, last = lines(found.out)
    assert train.startswith("train-0: 400 pairs in 1 documents; dropped 0 empty")
    assert valid.startswith("valid: 20 pairs")
    manifest = json.loads((tmp_path / "ids" / "manifest.json").read_text(encoding="utf-8"))
    assert last == f"vocabulary 300; data hash {manifest['hash'][:12]}; written to {tmp_path / 'ids'}"
    arguments = ["train", config, "--data", tmp_path / "ids", "--out", tmp_path / "run", "--set", "training.steps=1"]
    trained = rectiformer(*arguments)
    assert trained.code == 0
    assert lines(trained.out)[-1].startswith("trained 1 step; nothing was validated, so the latest weights are taken")
    assert not (tmp_path / "run" / "data").exists()


@pytest.mark.parametrize("documents", [False, True], ids=["sentences", "documents"])
def test_generated_links_fit_the_words(rectiformer, tmp_path, documents):
    found = rectiformer("data", "generate", tmp_path / "new", "--documents" if documents else "--sentences", 5)
    assert found.code == 0, found.err
    ends = ("de", "en", "tok.de", "tok.en", "align")
    text = {end: lines((tmp_path / f"new.{end}").read_bytes().decode()) for end in ends}
    for side in ("de", "en"):
        assert text[side].count("<d>") == (5 if documents else 0)
        sentences = [line for line in text[side] if line != "<d>"]
        assert [line.replace(" ", "") for line in sentences] == [line.replace(" ", "") for line in text[f"tok.{side}"]]
    for source, target, links in zip(text["tok.de"], text["tok.en"], text["align"], strict=True):
        pairs = [link.replace("p", "-").split("-") for link in links.split(" ")]
        assert max(int(i) for i, _ in pairs) < len(source.split(" "))
        assert max(int(j) for _, j in pairs) < len(target.split(" "))


@pytest.mark.parametrize("options", [[], ["--beam", 1], ["--sample", "--top-k", 5], ["--max-length", 3]], ids=str)
def test_as_many_lines_come_out_as_go_in(world, rectiformer, options):
    found = rectiformer("translate", world.run, world.folder / "hostile", *options)
    assert found.code == 0, found.err
    assert found.out.count("\n") == len(lines(HOSTILE))
    assert lines(found.out)[1:3] == ["", ""]


def test_streams_and_files_give_the_same(world, rectiformer, tmp_path):
    source = world.folder / "test.de"
    piped = rectiformer("translate", world.run, stdin=source.read_bytes())
    assert rectiformer("translate", world.run, source, "--out", tmp_path / "out").out == ""
    assert (tmp_path / "out").read_bytes().decode() == piped.out
    assert rectiformer("translate", world.run, source, "--batch-sentences", 1).out == piped.out


def test_a_bar_moves_with_every_batch(world, rectiformer, monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(translating, "counting_bar", lambda *_: nullcontext(told.append))
    how = ["--batch-sentences", 5, "--out", tmp_path / "out"]
    assert rectiformer("translate", world.run, world.folder / "test.de", *how).code == 0
    assert told == [5, 10, 12, 12]


def test_who_types_the_lines_is_told_how_to_end(world):
    keyboard, terminal = os.openpty()
    process = start("translate", world.run, stdin=terminal, stderr=terminal)
    os.write(keyboard, b"Der Hund.\n\x04")
    out, _ = process.communicate(timeout=120)
    assert (process.returncode, out.count(b"\n")) == (0, 1)
    assert b"type lines to translate; Ctrl-D ends" in os.read(keyboard, 4096)
    os.close(keyboard)
    os.close(terminal)


def test_lines_that_are_not_utf8_are_skipped_with_a_warning(world, rectiformer):
    found = rectiformer("translate", world.run, world.folder / "latin1", "--bad-utf8", "skip")
    assert found.code == 0
    assert len(lines(found.out)) == 2
    assert lines(found.out)[1] == ""
    assert found.err == "rectiformer: warning: line 2: not UTF-8, so its translation is empty\n"


def test_json_holds_what_text_says_and_more(world, rectiformer):
    source = world.folder / "test.de"
    text = lines(rectiformer("translate", world.run, source, "--nbest", 2).out)
    found = rectiformer(
        "translate", world.run, source, "--nbest", 2, "--json", "--alignments", "1:2:shifted", "--heads"
    )
    records = [json.loads(line) for line in lines(found.out)]
    assert [record["source"] for record in records] == lines(source.read_text(encoding="utf-8"))
    assert text == [
        f"{number} ||| {each['translation']} ||| {each['score']:.6f}"
        for number, record in enumerate(records, 1)
        for each in record["nbest"]
    ]
    assert len(text) == 24
    weights = records[0]["heads"]["weights"]
    assert (len(weights), len(weights[0])) == (1, 2)
    assert all("alignment" in record for record in records)


def test_translations_begin_with_their_prefixes(world, rectiformer, tmp_path):
    (tmp_path / "prefix").write_text("The dog\n" * 12, encoding="utf-8")
    found = rectiformer("translate", world.run, world.folder / "test.de", "--prefix", tmp_path / "prefix")
    assert all(line.startswith("The dog") for line in lines(found.out))


def test_scores_are_sums_and_means_over_subwords(world, rectiformer):
    arguments = ["score", world.run, world.folder / "test.de", world.folder / "test.en"]
    rows = [line.split("\t") for line in lines(rectiformer(*arguments).out)]
    records = [json.loads(line) for line in lines(rectiformer(*arguments, "--json").out)]
    assert len(rows) == 12
    for (total, mean), record in zip(rows, records, strict=True):
        assert len(record["tokens"]) == len(record["token_scores"])
        assert float(total) == pytest.approx(sum(record["token_scores"]), abs=1e-6)
        assert float(mean) == pytest.approx(float(total) / len(record["tokens"]), abs=1e-6)


def test_evaluation_of_a_run_is_that_of_its_translations(world, rectiformer, tmp_path):
    source, reference = world.folder / "test.de", world.folder / "test.en"
    rectiformer("translate", world.run, source, "--out", tmp_path / "out")
    common = ["evaluate", "--reference", reference, "--metrics", "chrf,ter", "--json"]
    found = [
        [json.loads(line) for line in lines(rectiformer(*common, *system).out)]
        for system in (["--source", source, world.run], ["--hypothesis", tmp_path / "out"])
    ]
    for ours, theirs in zip(*found, strict=True):
        assert (ours["value"], ours["signature"]) == (theirs["value"], theirs["signature"])
        assert ours["version"] == __version__


def test_evaluation_prints_scores_with_intervals_and_signatures(world, rectiformer):
    reference = world.folder / "test.en"
    arguments = ["--hypothesis", reference, "--reference", reference, "--samples", 10, "--metrics", "bleu"]
    header, row, signature, footer = lines(rectiformer("evaluate", *arguments).out)
    assert header.split() == ["metric", "score", "95", "%", "interval"]
    assert row.split() == ["BLEU", "100.00", "100.00", "to", "100.00"]
    assert signature.startswith("BLEU is nrefs:1|bs:10|seed:12345|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert footer == f"rectiformer {__version__}; 12 lines"


def test_comparison_names_the_baseline_and_the_chance(world, rectiformer):
    reference = world.folder / "test.en"
    arguments = ["--hypothesis", reference, "--baseline-hypothesis", world.folder / "test.de", "--reference", reference]
    found = rectiformer("evaluate", *arguments, "--samples", 100, "--json", "--metrics", "bleu")
    baseline, system = (json.loads(line) for line in lines(found.out))
    assert baseline["system"] == f"{world.folder / 'test.de'} (baseline)"
    assert baseline["p_value"] is None
    assert system["value"] == pytest.approx(100)
    assert system["p_value"] < 0.05


def test_alignment_takes_the_best_row_of_its_table(world, rectiformer, tmp_path):
    paths = [
        world.folder / "test.tok.de",
        world.folder / "test.tok.en",
        "--tokenized",
        "--gold",
        world.folder / "test.align",
    ]
    table = rectiformer("align", world.run, *paths, "--table", "--out", tmp_path / "links")
    header, *rows, summary = lines(table.out)
    assert header.split() == ["layer", "head", "induction", "AER", "precision", "recall"]
    assert [row.split()[:3] for row in rows] == [
        ["1", head, induction] for head in ("1", "2", "average") for induction in ("normal", "shifted")
    ]
    best = min(rows, key=lambda row: float(row.split()[3])).split()
    assert summary.startswith(f"layer 1, head {best[1]}, {best[2]}: AER {best[3]} (95 % ")
    links = (tmp_path / "links").read_text(encoding="utf-8")
    assert links.count("\n") == 12
    named = ["--layer", 1, "--head", best[1], "--induction", best[2]]
    plain = rectiformer("align", world.run, *paths[:3], *named)
    assert (plain.out, plain.err) == (links, "")
    assert rectiformer("align", world.run, *paths, *named).err == f"{summary}\n"


def test_a_line_is_answered_at_once_and_interrupting_is_quiet(world):
    process = start("translate", world.run, "--batch-sentences", "1")
    process.stdin.write(b"Der Hund schl\xc3\xa4ft.\n")
    process.stdin.flush()
    assert process.stdout.readline().endswith(b"\n")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert (process.returncode, err) == (130, b"")


def test_a_reader_that_leaves_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    process = start("config", stdout=writing)
    os.close(writing)
    assert process.communicate()[1] == b""


def test_a_full_disk_is_one_line_and_code_6():
    with open("/dev/full", "wb") as full:
        process = start("config", stdout=full)
        err = process.communicate()[1]
    assert (process.returncode, err) == (6, b"rectiformer: cannot use standard output: No space left on device\n")


@pytest.mark.parametrize("width", [80, 120])
def test_the_bar_fits_the_terminal(width):
    terminal, screen = Terminal(), io.StringIO()
    terminal.console = Console(file=screen, force_terminal=True, width=width, color_system=None, highlight=False)
    with terminal:
        terminal.preparing("vocabulary", 0)
        terminal.preparing("train-0", 4_096)
        terminal.begin(123_450, 300_000)
        terminal.validated(
            {"step": 123_450, "valid_loss": 1.5, "valid_bleu": 26.31, "valid_chrf": 55.0, "valid_seconds": 9}
        )
        terminal.logged({"step": 123_456, "loss": 2.125, "learning_rate": 1.2e-4, "tokens_per_second": 123_456.0})
        terminal.advance(123_456)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).replace("\r", "\n").split("\n")
    (bar,) = {line for line in shown if "123456/300000" in line}
    assert all(part in bar for part in ("loss 2.125  BLEU 26.3  lr 1.2e-04  123k tok/s", "━"))
    assert len(bar) <= width
    assert "step 123,450: validation loss 1.500, BLEU 26.31, chrF 55.00, took 9.0 s" in shown


def test_the_time_left_does_not_count_the_start(monkeypatch, capsys):
    """A minute of compiling, then ten steps a second, then five."""
    clock = iter([60.0, 65.0, *(75.0 + 10 * turn for turn in range(20))])
    monkeypatch.setattr("rectiformer.terminal.time.monotonic", lambda: next(clock))
    with Terminal() as terminal:
        terminal.begin(0, 2_000)
        for step in range(50, 1_150, 50):
            terminal.logged({"step": step, "loss": 2.0, "learning_rate": 1e-3, "tokens_per_second": 100.0})
    first, second, *_, last = capsys.readouterr().out.splitlines()
    assert first == "step 50 of 2,000: loss 2.000, rate 1.0e-03, 100 target tokens/s"
    assert second.endswith("target tokens/s, 0:03:10 left")
    assert last.endswith("target tokens/s, 0:03:00 left")


MEASURED = [
    ["base-softmax", "cross", "1", "12.4%", "0 of 4", "mean of heads, normal"],
    ["base-softmax", "encoder", "2", "0.0%", "0 of 4", ""],
    ["base-rela-g", "cross", "1", "57.7%", "0 of 4", "head 2, normal"],
]


def tabulated(width, rows):
    """The lines of a table on a terminal of this width."""
    terminal, screen = Terminal(), io.StringIO()
    terminal.console = Console(file=screen, width=width, color_system=None, highlight=False)
    columns = ("model", "attention", "layer", "null rows", "dead heads", "aligned by")
    terminal.table(columns, rows, numbers=columns[2:5])
    return [line.rstrip() for line in screen.getvalue().split("\n")]


@pytest.mark.parametrize("width", [30, 40, 59, 80, 120])
def test_a_table_cuts_no_word(width):
    shown = tabulated(width, MEASURED)
    assert max(map(len, shown)) <= width
    words = " ".join(shown).split()
    for cell in ("base-softmax", "encoder", "attention", "57.7%", "normal"):
        assert cell in words
    assert " ".join(shown).count("0 of 4") == 3


def test_a_table_that_does_not_fit_gets_headings_then_becomes_lists():
    assert [line.split()[0] for line in tabulated(80, MEASURED)[:-1]] == ["model", *(row[0] for row in MEASURED)]
    assert tabulated(46, MEASURED)[:8] == [
        "base-softmax",
        "                     null     dead  aligned",
        "attention  layer     rows    heads  by",
        "cross          1    12.4%   0 of 4  mean of",
        "                                    heads,",
        "                                    normal",
        "encoder        2     0.0%   0 of 4",
        "",
    ]
    assert tabulated(30, MEASURED)[8:14] == [
        "base-softmax",
        "  attention   encoder",
        "  layer       2",
        "  null rows   0.0%",
        "  dead heads  0 of 4",
        "",
    ]
    once_each = [MEASURED[0], MEASURED[2]]  # where headings would not save a line
    assert tabulated(46, once_each)[:2] == ["base-softmax", "  attention   cross"]
