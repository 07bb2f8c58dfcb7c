"""Strings in, translations out: N lines give N translations in the same order, whatever is in them."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from rectiformer.distributed.ranks import SINGLE_PROCESS, Ranks
from rectiformer.errors import ArgumentError, DataError, unknown_name
from rectiformer.model.transformer import Transformer
from rectiformer.runs.folder import load_model, open_run
from rectiformer.text.vocabulary import Piece, Vocabulary
from rectiformer.translate.options import Hypothesis, SearchBatch, SearchOptions, Specials
from rectiformer.translate.search import search

TOO_LONG = ("split", "cut", "error")
MAX_LENGTH = 1024
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
FINAL = tuple(".!?…؟।")
UNSPACED_FINAL = ("\u3002", "\uff01", "\uff1f", "\uff61")  # final marks of scripts that put no space after them
CLOSING = "\"'»”\u2019\u203a)]}\u300d\u300f\uff09"  # quotes and brackets that may follow the end of a sentence


@dataclass(frozen=True)
class Candidate:
    """One of the n best translations of a line."""

    text: str
    tokens: list[str]
    """Its subwords, and the end symbol if it ended."""
    score: float
    """Log probability over length penalty; of a line in several parts, the sum of theirs."""
    log_probability: float
    token_scores: list[float]
    """Log probability of each of `tokens`."""
    ended: bool
    """False if the length limit came first."""


@dataclass(frozen=True)
class Translation:
    """What became of one line; `candidates` has at least one, best first."""

    line: int
    source: str
    candidates: list[Candidate]
    warnings: list[str]

    @property
    def text(self) -> str:
        """The best candidate."""
        return self.candidates[0].text

    @property
    def score(self) -> float:
        """The score of the best candidate."""
        return self.candidates[0].score


@dataclass(frozen=True)
class Part:
    """A piece of a line that goes through the model by itself."""

    line: int
    ids: list[int]
    prefix: list[int]
    key: int


class Translator:
    """A model with its vocabularies, on a device.

    Args:
        device: where the model is moved to; "auto" takes a GPU if there is one.
        precision: "fp32", or "bf16" for matrix products.
        max_length: most subwords of a source that goes through the model at once.
        segment_length: most subwords of several sentences of a document at once; 0 where each is translated by itself.
    """

    ranks: Ranks = SINGLE_PROCESS
    """Processes that share all batches; each must ask for the same, and gets all of it."""
    guided: tuple[int, int, str] | None = None
    """The head that learned word links, as `Config.guided` has it; None if none did."""

    def __init__(
        self,
        model: Transformer,
        source: Vocabulary,
        target: Vocabulary,
        *,
        device: str | torch.device = "cpu",
        precision: str = "fp32",
        max_length: int = MAX_LENGTH,
        segment_length: int = 0,
    ) -> None:
        if precision not in PRECISIONS:
            raise ArgumentError(unknown_name("precision", precision, PRECISIONS))
        if max_length < 1:
            raise ArgumentError(f"max_length = {max_length}, but it must be at least 1")
        self.device = find_device(device)
        self.model = model.to(self.device)
        self.source, self.target = source, target
        self.precision = PRECISIONS[precision]
        self.max_length, self.segment_length = max_length, segment_length

    @classmethod
    def from_run(
        cls,
        folder: str | Path,
        checkpoint: str = "best",
        device: str = "auto",
        precision: str = "fp32",
        notice: Callable[[str], None] = warnings.warn,
    ) -> Translator:
        """The translator of a run folder, its weights held in `precision`; `checkpoint` as in `load_model`."""
        run = open_run(Path(folder))
        model, _ = load_model(run, checkpoint, notice=notice)
        segment_length = run.config.data.segment_length
        translator = cls(
            model, run.source, run.target,
            device=device, precision=precision,
            max_length=max(MAX_LENGTH, segment_length), segment_length=segment_length,
        )  # fmt: skip
        translator.guided = run.config.guided
        if translator.precision is not None:  # held so from now on, where weights otherwise are cast at each use
            cast_weights(translator.model, translator.precision)
            translator.precision = None
        return translator

    def fingerprint(self) -> str:
        """A hash of the weights and vocabularies."""
        digest = hashlib.sha256((self.source.sha256 + self.target.sha256).encode())
        for parameter in self.model.parameters():
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Inside, the model drops nothing out and records no gradients; afterwards it trains on if it did before."""
        training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode():
                yield
        finally:
            self.model.train(training)

    def translate(
        self,
        lines: Sequence[str],
        options: SearchOptions,
        *,
        batch_tokens: int = 4096,
        batch_sentences: int = 0,
        prefixes: Sequence[str] | None = None,
        first_line: int = 1,
        warn: Callable[[str], None] = warnings.warn,
        too_long: str = "split",
        progress: Callable[[int, int], None] | None = None,
        is_wanted: Callable[[int], bool] | None = None,
    ) -> list[Translation]:
        """Translate every line; a blank one is empty, and never reaches the model.

        Args:
            batch_tokens: padded source tokens in a batch; a longer line makes a batch of its own.
            batch_sentences: sentences in a batch, instead of `batch_tokens`; 0 goes by tokens.
            prefixes: how each translation has to begin; "" leaves it free.
            first_line: the number of lines[0], for messages and for the seeds of sampling.
            warn: told of each line that did not go through the model as a whole.
            too_long: what to do with more than `max_length` subwords. "split" translates parts, cut after a sentence if
                possible and else at white space, and joins them with spaces; "cut" drops the rest.
            progress: told how many sentences are done, and of how many, after each batch.
            is_wanted: whether lines[n] is still wanted, as in `search`; one that is not is left empty and not ended.
        """
        if too_long not in TOO_LONG:
            raise ArgumentError(unknown_name("value of too_long", too_long, TOO_LONG))
        if prefixes is not None and len(prefixes) != len(lines):
            raise DataError(
                f"{len(prefixes)} prefixes for {len(lines)} lines; give each line one, if only an empty one"
            )
        notes: list[list[str]] = [[] for _ in lines]
        parts: list[Part] = []
        for index, ids in enumerate(self.source.encode_all(list(lines))):
            if not lines[index].strip() or not ids:
                continue
            groups = self.fit(lines[index], ids, first_line + index, too_long, notes[index])
            prefix = self._prefix(prefixes[index], first_line + index) if prefixes is not None else []
            for number, group in enumerate(groups):
                key = first_line + index + (number << 32)  # each part draws its own samples
                parts.append(Part(index, group, [] if number else prefix, key))
            for note in notes[index]:
                warn(f"line {first_line + index}: {note}")
        found = self.search_all(parts, options, batch_tokens, batch_sentences, progress, is_wanted)
        gathered: list[list[list[Hypothesis]]] = [[] for _ in lines]
        for part, hypotheses in zip(parts, found, strict=True):
            gathered[part.line].append(hypotheses)
        return [
            self._assemble(first_line + index, line, gathered[index], notes[index], options)
            for index, line in enumerate(lines)
        ]

    def fit(self, line: str, ids: list[int], number: int, too_long: str, notes: list[str]) -> list[list[int]]:
        """The ids of a line in groups of at most `max_length`, with a note if that changes anything."""
        if len(ids) <= self.max_length:
            return [ids]
        if too_long == "error":
            raise DataError(
                f"line {number}: {len(ids)} subwords, but at most {self.max_length} are translated at once; shorten "
                'it, or choose "split" or "cut" for lines that are too long'
            )
        if too_long == "cut":
            notes.append(f"{len(ids)} subwords, cut to the first {self.max_length}")
            return [ids[: self.max_length]]
        groups = split_pieces(line, self.source.pieces(line), self.max_length)
        notes.append(f"{len(ids)} subwords, more than {self.max_length}; translated in {len(groups)} parts")
        return groups

    def _prefix(self, text: str, number: int) -> list[int]:
        ids = self.target.encode(text)
        if len(ids) > self.max_length:
            raise DataError(
                f"line {number}: its prefix has {len(ids)} subwords, but at most {self.max_length} are forced"
            )
        return ids

    def search_all(
        self,
        parts: Sequence[Part],
        options: SearchOptions,
        batch_tokens: int = 4096,
        batch_sentences: int = 0,
        progress: Callable[[int, int], None] | None = None,
        is_wanted: Callable[[int], bool] | None = None,
    ) -> list[list[Hypothesis]]:
        """The n best of each part, in batches of similar length, the longest first: it shows at once if it fits.

        Where there are separators, a translation holds as many as its source. `is_wanted` is asked by `Part.line`.
        """
        target, separator = self.target, self.source.separator
        specials = Specials(target.pad, target.unk, target.bos, target.eos, target.separator)
        lengths = [len(part.ids) + 1 for part in parts]
        order = sorted(range(len(parts)), key=lambda index: -lengths[index])
        own = self.ranks.own_share(list(cut_batches(order, lengths, batch_tokens, batch_sentences)))
        results: dict[int, list[Hypothesis]] = {}
        for indices in own:
            own_parts = [parts[index] for index in indices]
            batch = SearchBatch(
                [[*part.ids, self.source.eos] for part in own_parts],
                options,
                specials,
                prefixes=[part.prefix for part in own_parts],
                keys=[part.key for part in own_parts],
                separator_counts=None if separator is None else [part.ids.count(separator) for part in own_parts],
                precision=self.precision,
                is_wanted=ask_by_line(is_wanted, [part.line for part in own_parts]),
            )
            with self.inference():
                results |= zip(indices, search(self.model, batch), strict=True)
            if progress is not None:
                progress(len(results), sum(map(len, own)))
        if self.ranks.world_size > 1:
            plain = [(index, [astuple(each) for each in best]) for index, best in results.items()]
            for of_rank in self.ranks.all_gather_object(lambda: plain):
                results |= {index: [Hypothesis(*each) for each in best] for index, best in of_rank}
        return [results[index] for index in range(len(parts))]

    def _assemble(
        self, number: int, line: str, parts: list[list[Hypothesis]], notes: list[str], options: SearchOptions
    ) -> Translation:
        if not parts:
            return Translation(number, line, [Candidate("", [], 0.0, 0.0, [], True)], notes)
        # The k-th candidate of a line in parts joins the k-th of each.
        candidates = [self._candidate(joined) for joined in zip(*parts, strict=False)]
        if not candidates[0].ended:
            notes = [*notes, "the translation met its length limit before it ended"]
        times = options.max_repeats
        if times > 1 and any(is_repetitive(hypotheses[0].ids, times) for hypotheses in parts):
            notes = [*notes, f"the translation says something {times} times in a row"]
        return Translation(number, line, candidates, notes)

    def _candidate(self, hypotheses: Sequence[Hypothesis]) -> Candidate:
        texts = [self.target.decode(hypothesis.ids) for hypothesis in hypotheses]
        ends = [[self.target.eos] if hypothesis.ended else [] for hypothesis in hypotheses]
        return Candidate(
            text=" ".join(text for text in texts if text),
            tokens=[
                piece_text(self.target, token)
                for hypothesis, end in zip(hypotheses, ends, strict=True)
                for token in [*hypothesis.ids, *end]
            ],
            score=math.fsum(hypothesis.score for hypothesis in hypotheses),
            log_probability=math.fsum(hypothesis.log_probability for hypothesis in hypotheses),
            token_scores=[score for hypothesis in hypotheses for score in hypothesis.token_scores],
            ended=all(hypothesis.ended for hypothesis in hypotheses),
        )


def ask_by_line(is_wanted: Callable[[int], bool] | None, lines: Sequence[int]) -> Callable[[int], bool] | None:
    """`is_wanted` for the rows of a batch, where lines[row] is what it knows; None asks nothing."""
    return None if is_wanted is None else lambda row: is_wanted(lines[row])


def cut_batches(
    order: Sequence[int], lengths: Sequence[int], batch_tokens: int, batch_sentences: int = 0
) -> Iterator[list[int]]:
    """Cut `order` into batches of at most `batch_tokens` padded tokens, or of `batch_sentences` if that is not 0.

    Args:
        lengths: tokens of each sentence, by its index; one beyond `batch_tokens` makes a batch of its own.
    """
    if batch_tokens < 1 or batch_sentences < 0:
        raise ArgumentError(f"batch_tokens = {batch_tokens} and batch_sentences = {batch_sentences} hold no sentence")
    batch: list[int] = []
    longest = 0
    for index in order:
        padded = max(longest, lengths[index])
        full = len(batch) == batch_sentences if batch_sentences else (len(batch) + 1) * padded > batch_tokens
        if batch and full:
            yield batch
            batch, padded = [], lengths[index]
        batch.append(index)
        longest = padded
    if batch:
        yield batch


def is_repetitive(ids: Sequence[int], times: int) -> bool:
    """Whether a block of up to 8 tokens occurs `times` times in a row."""
    for size in range(1, 9):
        run = 0
        for token, earlier in zip(ids[size:], ids, strict=False):
            run = run + 1 if token == earlier else 0
            if run >= size * (times - 1):
                return True
    return False


def piece_text(vocabulary: Vocabulary, id: int) -> str:
    """A subword as sentencepiece writes it."""
    return vocabulary._processor.id_to_piece(id)


def split_pieces(line: str, pieces: Sequence[Piece], max_length: int) -> list[list[int]]:
    """The ids of `line` in groups of at most `max_length`.

    Cut behind the last sentence that fits, else at the last white space, else between characters.
    """
    groups = []
    start = 0
    while len(pieces) - start > max_length:
        cuts = range(start + max_length, start, -1)
        preferred = (ends_sentence, is_spaced, is_between_characters)
        fitting = (cut for fits in preferred for cut in cuts if fits(line, pieces[cut - 1], pieces[cut]))
        stop = next(fitting, cuts[0])  # a character spelled in more than `max_length` bytes is cut too
        groups.append([piece.id for piece in pieces[start:stop]])
        start = stop
    groups.append([piece.id for piece in pieces[start:]])
    return groups


def is_between_characters(line: str, left: Piece, right: Piece) -> bool:
    """Whether no character is spelled partly in `left` and partly in `right`."""
    return left.end <= right.start


def is_spaced(line: str, left: Piece, right: Piece) -> bool:
    """Whether white space begins `right`, or ends `left` in a vocabulary that has it there."""
    ended = line[left.start : left.end]
    suffixed = ended[-1:].isspace() and not ended.isspace()
    return is_between_characters(line, left, right) and (line[right.start : right.start + 1].isspace() or suffixed)


def ends_sentence(line: str, left: Piece, right: Piece) -> bool:
    """Whether a final mark precedes the cut, with white space at it if the script has any."""
    mark = line[max(0, right.start - 16) : right.start].rstrip().rstrip(CLOSING)[-1:]
    if mark in UNSPACED_FINAL:
        return is_between_characters(line, left, right)
    return mark in FINAL and is_spaced(line, left, right)


def cast_weights(model: Transformer, dtype: torch.dtype) -> None:
    """Hold every parameter in `dtype`, tied ones still tied; position signals stay as they are, exact.

    For a model that learns no more: score biases and learned scales are folded into the projection weights.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for site in model.sites():
        site.attention.fold_projections()


def find_device(device: str | torch.device) -> torch.device:
    """The device itself, "auto" being a GPU if there is one; ArgumentError where it is not there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f"unknown device {device!r}; use auto, cpu or cuda") from error
    if found.type not in ("cpu", "cuda"):
        raise ArgumentError(f"device {str(device)!r} is not supported; use auto, cpu or cuda")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(f"device {str(device)!r}, but torch finds no GPU here; use auto or cpu")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(f"device {str(device)!r}, but torch finds {torch.cuda.device_count()} GPUs, from cuda:0")
    return found
