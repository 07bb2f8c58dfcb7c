"""What `translate` is to do, in chunks: by this process alone, by several that share the chunks, or by all at once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rectiformer.cli.documents import document_chunks
from rectiformer.cli.inputs import require_place, warn
from rectiformer.errors import ArgumentError, CheckpointError

if TYPE_CHECKING:
    from rectiformer.runs.team import Team
    from rectiformer.translate.chunks import Chunk
    from rectiformer.translate.lines import LineChunk, Translation
    from rectiformer.translate.options import SearchOptions
    from rectiformer.translate.translator import Translator


@dataclass(frozen=True)
class Job:
    """A file, and how its lines are translated and written."""

    file: str
    bad_utf8: str
    options: SearchOptions
    as_json: bool
    at_once: bool
    """Whether each line is answered before the next is read."""
    how: dict[str, Any]
    """As in `Translator.translate`; of documents, as in `translate_documents`."""
    documents: str = "none"
    prefixes: list[str] | None = None
    place: tuple[Any, Any, str] | None = None
    """Layer and head to align by, from 0, and the induction."""
    heads: bool = False

    def chunks(self, translator: Translator, lines: Iterable[str | None]) -> Iterator[Chunk]:
        """What is to be done, a chunk at a time; nothing is translated before a chunk is called."""
        from rectiformer.translate.lines import cut_lines

        buffer = 1 if self.at_once else 1000
        if self.documents != "none":
            return document_chunks(translator, lines, self.options, self.documents, self.as_json, buffer, **self.how)
        work = partial(self.write_chunk, translator)
        return (partial(work, chunk) for chunk in cut_lines(lines, buffer, self.prefixes))

    def write_chunk(self, translator: Translator, chunk: LineChunk) -> Iterator[str]:
        """A text for each line."""
        from rectiformer.cli.writing import to_json
        from rectiformer.translate.align import to_records
        from rectiformer.translate.lines import translate_chunk

        found = translate_chunk(translator, chunk, self.options, warn=warn, **self.how)
        if not self.as_json:
            return (format_candidates(each, self.options.nbest) for each in found)
        size = 1 if self.at_once else 64
        return map(to_json, to_records(translator, found, align=self.place, heads=self.heads, buffer=size))

    def key(self, translator: Translator, file: str) -> str:
        """The same for the same content of the file, weights and options."""
        import rectiformer

        text = hash_lines(file, self.bad_utf8)
        kept = {**asdict(self), "file": text, "longest": translator.longest, "device": translator.device.type}
        kept |= {"rectiformer": rectiformer.__version__, "weights": translator.fingerprint()}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def hash_lines(file: str, bad_utf8: str) -> str:
    """The same for the same lines, whether they are of a file or of a dataset."""
    from rectiformer.text.lines import read_lines

    found = hashlib.sha256()
    for line in read_lines(file, bad_utf8):
        found.update(json.dumps(line).encode() + b"\n")
    return found.hexdigest()


def format_candidates(translation: Translation, nbest: int) -> str:
    """The translation of a line; with `nbest` > 1 a line for each candidate: number of the line, text, score."""
    if nbest == 1:
        return translation.text
    return "\n".join(f"{translation.line} ||| {each.text} ||| {each.score:.6f}" for each in translation.candidates)


def run_job(
    job: Job, translator: Translator, team: Team, out: Path | None, inputs: list[str], shard_source: bool
) -> None:
    """Translate and write, by this process alone or by the team; `out` must be none of `inputs`."""
    if job.place is not None:
        require_place(translator, *job.place[:2])
    if shard_source:
        run_together(job, translator, team, out, inputs)
    elif team.size > 1:
        run_shared(job, translator, team, out, inputs)
    else:
        run_alone(job, translator, out, inputs)


def run_alone(job: Job, translator: Translator, out: Path | None, inputs: list[str]) -> None:
    """Translate and write as lines come."""
    from rectiformer.cli.writing import write_all
    from rectiformer.terminal import count_lines, with_progress
    from rectiformer.text.lines import read_lines

    texts = chain.from_iterable(chunk() for chunk in job.chunks(translator, read_lines(job.file, job.bad_utf8)))
    total = count_lines(job.file, out) if job.documents == "none" else None
    write_all(with_progress(texts, "translating", total), out, inputs)


def run_shared(job: Job, translator: Translator, team: Team, out: Path | None, inputs: list[str]) -> None:
    """Chunks are shared by the processes of a team through a folder beside `out`; rank 0 writes them in order."""
    from rectiformer.cli.writing import write_all
    from rectiformer.text.lines import read_lines
    from rectiformer.translate.chunks import WorkFolder, do_chunks, finish_job, gather_chunks, hold_folder, open_job

    path = Path("rectiformer-translate.work") if out is None else out.with_name(f"{out.name}.work")
    with ExitStack() as held:

        def prepare() -> dict[str, Any]:
            held.enter_context(hold_folder(path))
            file = spool_once(job.file, path)
            open_job(path, job.key(translator, file), warn)
            return {"file": file, "chunks": sum(1 for _ in job.chunks(translator, read_lines(file, job.bad_utf8)))}

        told = team.lead(prepare)
        require_same_weights(team, translator)
        folder = WorkFolder(path, told["chunks"])

        def chunks() -> Iterator[Chunk]:
            return job.chunks(translator, read_lines(told["file"], job.bad_utf8))

        if team.leads:
            write_all(gather_chunks(folder, chunks), out, inputs)
            finish_job(folder)
        else:
            for _ in do_chunks(folder, chunks):
                pass


def spool_once(file: str, folder: Path) -> str:
    """A file that every process can read: a copy in `folder` where this can be read once only."""
    from rectiformer.runs.durable import remove
    from rectiformer.text.lines import can_be_read_once_only, spool

    if not can_be_read_once_only(file):
        return file
    remove(folder / "input")
    (folder / "input").mkdir()
    return spool(file, folder / "input")


def require_same_weights(team: Team, translator: Translator) -> None:
    """CheckpointError where some process has loaded others: a training may go on in the folder."""
    weights = team.gather(translator.fingerprint)
    for rank, found in enumerate(weights):
        if found != weights[0]:
            raise CheckpointError(
                f"rank {rank} loaded weights {found[:12]}, but rank 0 {weights[0][:12]}; name a step by --checkpoint"
            )


def run_together(job: Job, translator: Translator, team: Team, out: Path | None, inputs: list[str]) -> None:
    """All processes translate the same, each a part of every source; rank 0 reads and writes."""
    from rectiformer.cli.writing import write_all
    from rectiformer.model.sharded import sharded_source
    from rectiformer.text.lines import read_lines
    from rectiformer.translate.ranks import stream_lines

    if team.size == 1:
        raise ArgumentError("--shard-source has several processes share each source, but this is one; use torchrun")
    require_same_weights(team, translator)
    lines = stream_lines(team, read_lines(job.file, job.bad_utf8), 1 if job.at_once else 1000)
    with sharded_source(translator.model), team.watching():
        texts = chain.from_iterable(chunk() for chunk in job.chunks(translator, lines))
        if team.leads:
            write_all(texts, out, inputs)
        else:
            for _ in texts:
                pass
