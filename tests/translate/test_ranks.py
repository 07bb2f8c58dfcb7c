"""`translate` by several processes: the bytes of one, in order, and a kill loses nothing that was finished."""

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rectiformer.cli import main
from rectiformer.config import Config, DataConfig, ModelConfig, VocabularyConfig
from rectiformer.errors import ArgumentError
from rectiformer.model.transformer import Transformer
from rectiformer.runs.checkpoint import save_checkpoint
from rectiformer.runs.folder import create_run, weights_of
from rectiformer.text.vocabulary import Vocabulary
from rectiformer.translate.chunks import WorkFolder, do_chunks, finish_job, gather_chunks, hold_folder, open_job

MODEL = ModelConfig(
    hidden_size=32,
    num_heads=2,
    encoder_layers=1,
    decoder_layers=1,
    ffn_size=32,
    variant="reluformer",
    tie_embeddings="none",
)
LINES = "Der Hund schläft.\n\nA\u2028B\u0085C\rD\n\0\n<d>\nDie Katze sieht den Hund.\n" + "Das Haus. " * 20 + "\nEnde"
TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A run of documents, its model drawn at random and made to end soon, and text."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("world")
    call(folder, "data", "generate", folder / "test", "--split", "test", "--documents", 2)
    call(folder, "data", "generate", folder / "pairs", "--split", "test", "--sentences", 20)
    (folder / "lines.de").write_text(LINES, "utf-8")
    text = (folder / "pairs.de").read_text("utf-8").split("\n")
    words = Vocabulary.train(text, VocabularyConfig(size=120), separator=True)
    run = create_run(
        folder / "run", Config(model=MODEL, data=DataConfig(segment_length=64)), words, words, data_hash=""
    )
    torch.manual_seed(0)
    model = Transformer(MODEL, words.size, words.size, bos=words.bos)
    with torch.no_grad():
        model.output.mul_(4)
        row = model.output[words.eos]
        model.decoder[-1].around_memory.norm.bias.copy_(4 * row / row.square().sum())  # its logit grows by 4
    save_checkpoint(run.path, 5, {"model": weights_of(model)}, {}, run.identity, best=True)
    return folder


def call(folder, *arguments, stdin=""):
    """Standard output of a command of this process alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["rectiformer", *map(str, arguments)])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        patch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
        with pytest.raises(SystemExit) as exit:
            main()
        assert exit.value.code == 0
        sys.stdout.flush()
        return sys.stdout.buffer.getvalue()


def commands(world, name):
    """What is asked of ranks and, with another name for what is written, of one process."""
    lines, pairs = world / "lines.de", ["--source", world / "pairs.de", "--target", world / "pairs.en"]
    out = world / name
    translate = ["translate", world / "run", "--device", "cpu", "--beam", 2]
    each = ["--batch-sentences", 1]  # a line, or document, is a chunk of its own
    records = ["--json", "--nbest", 2, "--alignments", "1:average:normal"]
    found = {
        "killed": [*translate, lines, *each, "--out", f"{out}.killed"],
        "records": [*translate, lines, *each, *records, "--out", f"{out}.records"],
        "standard": translate,
        "documents": [*translate, world / "test.de", "--documents", "marker", "--json", *each],
        "sharded": [*translate, world / "test.de", "--documents", "marker", "--json", *each, "--shard-source"],
        "measured": [
            "analyze", world / "run", *pairs, "--gold", world / "pairs.align", "--device", "cpu", "--out",
            f"{out}.measured", "--examples", 2, "--record", f"{out}.record",
        ],
        "measured-documents": [
            "analyze", world / "run", "--source", world / "test.de", "--target", world / "test.en", "--documents",
            "marker", "--device", "cpu", "--out", f"{out}.measured-documents",
        ],
        "missing": [*translate, world / "nothing.de"],
    }  # fmt: skip
    return {key: [*map(str, words)] for key, words in found.items()}


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def killed(world):
    """A run of torchrun of which a rank is killed as it is about to save its second chunk."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    env = {**os.environ, "RECTIFORMER_FAILPOINT": "chunk-translated:2", "OMP_NUM_THREADS": "1"}
    asked = [*command, "rectiformer", *commands(world, "ranks")["killed"]]
    ended = subprocess.run(asked, capture_output=True, text=True, cwd=world, env=env, timeout=120)
    finished = {path.name: path.stat().st_ino for path in (world / "ranks.killed.work").glob("*.txt")}
    return ended, finished


@pytest.fixture(scope="module")
def ranks(world, killed):
    """Two processes through all commands: what each printed and how it ended."""
    asked = commands(world, "ranks")
    jobs = [
        {"port": free_port(), "arguments": words, "stdin": LINES, "out": str(world / f"job-{name}")}
        for name, words in asked.items()
    ]
    (world / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, str(TESTS / "ranked.py")]
    started = [subprocess.Popen([*command, str(rank), "2", str(world / "jobs.json")], cwd=world) for rank in range(2)]
    try:
        assert [process.wait(timeout=240) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    return {
        name: [
            {kind: (world / f"job-{name}.{rank}.{kind}").read_bytes() for kind in ("out", "err", "code")}
            for rank in range(2)
        ]
        for name in asked
    }


def test_a_killed_rank_loses_nothing_that_was_finished(world, killed, ranks):
    ended, finished = killed
    assert ended.returncode != 0
    assert 1 <= len(finished) < LINES.count("\n") + 1
    assert f"{len(finished)} finished chunks of this input are kept" in ranks["killed"][0]["err"].decode()
    expected = commands(world, "one")["killed"]
    call(world, *expected)
    assert (world / "ranks.killed").read_bytes() == (world / "one.killed").read_bytes()
    assert (world / "ranks.killed").read_bytes().count(b"\n") == LINES.count("\n") + 1
    assert not (world / "ranks.killed.work").exists()


def test_ranks_write_the_bytes_of_one_process(world, ranks):
    asked = commands(world, "one")
    call(world, *asked["records"])
    assert (world / "ranks.records").read_bytes() == (world / "one.records").read_bytes()
    documents = call(world, *asked["documents"])
    expected = {"standard": call(world, *asked["standard"], stdin=LINES), "documents": documents, "sharded": documents}
    for name, text in expected.items():
        assert [each["out"] for each in ranks[name]] == [text, b""]
    assert not list(world.glob("*.work"))


def test_every_rank_ends_well(ranks):
    codes = {name: [int(each["code"]) for each in found] for name, found in ranks.items()}
    assert codes == {name: [3, 3] if name == "missing" else [0, 0] for name in codes}
    assert "nothing.de" in ranks["missing"][0]["err"].decode()


def test_measures_of_ranks_are_those_of_one_process(world, ranks):
    for name in ("measured", "measured-documents"):
        call(world, *commands(world, "one")[name])
        ours, theirs = (json.loads((world / f"{who}.{name}").read_text()) for who in ("one", "ranks"))
        assert_close(theirs, ours, name)
        assert ranks[name][1]["out"] == b""
    assert json.loads((world / "ranks.record").read_text()) == json.loads((world / "one.record").read_text())


def test_sharing_a_source_needs_several_processes(world, capfd):
    with pytest.raises(AssertionError):
        call(world, *commands(world, "one")["sharded"])
    assert "this is one; use torchrun" in capfd.readouterr().err


def assert_close(found, expected, where):
    """Equal; but sums of float64 that were added in another order to 12 digits."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_close(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_close(found[index], value, f"{where}[{index}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-13), where
    else:
        assert found == expected, where


def listed(folder, chunks, done):
    """Chunks that note their number when they are done."""

    def work(index):
        done.append(index)
        return [f"line {index}"]

    return WorkFolder(folder, chunks), lambda: ((lambda index=index: work(index)) for index in range(chunks))


def test_a_chunk_that_another_is_at_is_left_to_it(tmp_path):
    done = []
    folder, chunks = listed(tmp_path, 3, done)
    with folder.claim(1) as ours:
        assert ours
        with folder.claim(1) as twice:
            assert not twice
        list(do_chunks(folder, chunks))
        assert done == [0, 2]
    assert list(gather_chunks(folder, chunks)) == ["line 0", "line 1", "line 2"]
    assert done == [0, 2, 1]


def test_a_rank_that_comes_late_finds_nothing_to_do(tmp_path):
    done = []
    folder, chunks = listed(tmp_path / "out.work", 2, done)
    with hold_folder(folder.path):
        assert len(list(gather_chunks(folder, chunks))) == 2
        late = do_chunks(*listed(folder.path, 3, done))  # it knows of one more, which it does
        next(late)
        finish_job(folder)
        assert list(late) == []
        with folder.claim(0) as ours:
            assert not ours
    assert done == [0, 1, 2]
    assert not list(tmp_path.iterdir())


def test_other_input_or_options_start_anew(tmp_path):
    warned = []
    folder, chunks = listed(tmp_path, 2, [])
    open_job(tmp_path, "one", warned.append)
    list(do_chunks(folder, chunks))
    open_job(tmp_path, "one", warned.append)
    assert all(folder.is_done(index) for index in range(2))
    open_job(tmp_path, "another", warned.append)
    assert not any(folder.is_done(index) for index in range(2))
    assert [note.partition(": ")[2][:37] for note in warned] == [
        "2 finished chunks of this input are k", "2 finished chunks are of other input,"
    ]  # fmt: skip


def test_one_command_at_a_time_works_in_a_folder(tmp_path):
    with hold_folder(tmp_path / "out.work"), pytest.raises(ArgumentError, match="another command is at work in"):
        hold_folder(tmp_path / "out.work").__enter__()
    with hold_folder(tmp_path / "out.work"):
        pass
    with pytest.raises(ArgumentError, match="No such file or directory"), hold_folder(tmp_path / "no" / "out.work"):
        pass
