"""Subwords by sentencepiece: trained on text, or loaded from a file of unknown origin; lines to ids and back.

Text is changed as little as possible: NUL and lone surrogates become U+FFFD; tab, LF, CR and U+2581 (sentencepiece's
own mark of a space) become a space; runs of spaces become one, and spaces at the ends are dropped. There is no Unicode
normalization, except what a model from elsewhere does by itself.
"""

from __future__ import annotations

import hashlib
import io
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from rectiformer.config import VocabularyConfig
from rectiformer.errors import ConfigError, DataError
from rectiformer.files import replace_file
from rectiformer.text.lines import one_line

TRAINING_CHARACTERS = 1_000  # of a line: sentencepiece drops lines over 4,192 bytes and is quadratic in a word's length
SEPARATOR = "<sep>"  # its name in sentencepiece's models

UNSAFE = re.compile("[\0\ud800-\udfff]")
SPACES = re.compile("[\t\n\r\u2581]")
CHANGED = re.compile("[\0\t\n\r\u2581\ud800-\udfff]")  # UNSAFE or SPACES

MAX_PIECE = 2_048  # bytes: 512 characters, the longest piece that sentencepiece would choose
PIECE, TRAINER, NORMALIZER = 1, 2, 3  # fields of sentencepiece's ModelProto, in the order of the file


class Piece(NamedTuple):
    """A subword, and the characters of the line that it covers: line[start:end]."""

    id: int
    text: str
    start: int
    end: int


class Vocabulary:
    """The subwords of one language, or of both.

    Models from elsewhere may lack ids for padding and for the start of a sentence, or number them differently, so use
    `pad`, `unk`, `bos`, `eos` and `size` of the vocabulary at hand; missing ids come after the last subword.
    `separator` stands between the sentences of a segment, or is None. No text is ever encoded as it.
    """

    PAD, UNK, BOS, EOS = range(4)  # of the models trained here

    def __init__(self, model: bytes) -> None:
        from sentencepiece import SentencePieceProcessor

        self.model = model  # the file that `save` writes; `sha256` is its hash
        self._processor = SentencePieceProcessor(model_proto=model)
        self.sha256 = hashlib.sha256(model).hexdigest()
        self._pieces = self.size = len(self._processor)
        self.unk, self.eos = self._processor.unk_id(), self._processor.eos_id()
        if self.eos < 0:
            raise DataError("it has no end-of-sentence piece (eos_id is -1)")
        self.pad = self._id_or_new(self._processor.pad_id())
        self.bos = self._id_or_new(self._processor.bos_id())
        separator = self._processor.piece_to_id(SEPARATOR)
        self.separator = separator if self._processor.is_control(separator) else None

    def _id_or_new(self, id: int) -> int:
        if id >= 0:
            return id
        self.size += 1
        return self.size - 1

    def __repr__(self) -> str:
        return f"Vocabulary({self.size} subwords, {self.sha256[:12]})"

    @classmethod
    def train(cls, lines: Iterable[str], config: VocabularyConfig, separator: bool = False) -> Vocabulary:
        """Train subwords on the first `TRAINING_CHARACTERS` of every line; the same lines give the same subwords.

        There may be fewer than `config.size` of them if the text is small. Equal lines count once. `separator` reserves
        a symbol that stands between the sentences of a segment.
        """
        from sentencepiece import SentencePieceTrainer

        model = io.BytesIO()
        distinct = dict.fromkeys(clean(line[:TRAINING_CHARACTERS]) for line in lines)  # 1,000 equal lines take 30 s
        try:
            SentencePieceTrainer.train(
                sentence_iterator=iter(distinct),
                model_writer=model,
                model_type=config.kind,
                vocab_size=config.size,
                hard_vocab_limit=False,
                byte_fallback=config.byte_fallback,
                character_coverage=0.9995 if config.byte_fallback else 1.0,
                normalization_rule_name="identity",
                control_symbols=[SEPARATOR] if separator else [],  # unlike a user-defined symbol, text cannot spell it
                pad_id=cls.PAD,
                unk_id=cls.UNK,
                bos_id=cls.BOS,
                eos_id=cls.EOS,
                num_threads=2,  # stored in the model, so it must not depend on the machine
                minloglevel=2,
            )
        except RuntimeError as error:
            raise explain_training_error(str(error), config) from error
        return cls(model.getvalue())

    @classmethod
    def load(cls, path: Path, sha256: str | None = None) -> Vocabulary:
        """Read a sentencepiece model, after trying it in a child process unless its hash is known.

        A crafted model can crash sentencepiece itself, so a file of unknown origin has to survive there first.
        """
        if not path.is_file():
            raise DataError(f"cannot read vocabulary {path}: {'not a file' if path.exists() else 'no such file'}")
        try:
            model = path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read vocabulary {path}: {error.strerror}") from error
        if sha256 is None:
            reject_unsafe_model(model, path)
        elif (found := hashlib.sha256(model).hexdigest()) != sha256:
            raise DataError(f"vocabulary {path} has hash {found}, expected {sha256}; it was changed or damaged")
        try:
            return cls(model)
        except (RuntimeError, DataError) as error:
            raise DataError(f"tokenizer rejected: {path}: {one_line(str(error))}") from error

    def save(self, path: Path) -> None:
        """Write the model; even after a crash, `path` is the old file or the whole new one."""
        replace_file(path, self.model)

    @property
    def id_type(self) -> str:
        """The numpy type of ids on disk: two bytes each if they fit."""
        return "<u2" if self.size <= 1 << 16 else "<u4"

    def encode(self, line: str) -> list[int]:
        """Subword ids of a line, without special ones; none for a blank line."""
        return self._processor.encode(clean(line))

    def sample(self, line: str, alpha: float, **settings: Any) -> Any:
        """A random segmentation of a line into subwords, drawn anew at each call.

        Args:
            alpha: for unigram models, how strongly likely segmentations are preferred, from 0 (not at all); for BPE,
                the probability of skipping a merge.
            settings: those of sentencepiece, to get more than ids.
        """
        return self._processor.encode(clean(line), enable_sampling=True, nbest_size=-1, alpha=alpha, **settings)

    def encode_all(self, lines: list[str], alpha: float = 0.0, seed: str = "") -> list[list[int]]:
        """`encode` of every line, on all cores; with alpha > 0, `sample` of every line.

        The same seed gives the same samples within this process, but not in another one.
        """
        return self._encode_all(lines, alpha, seed)

    def pieces_all(self, lines: list[str], alpha: float = 0.0, seed: str = "") -> list[list[Piece]]:
        """`pieces` of every line; with alpha > 0 those of a sample, the one that `encode_all` draws."""
        return [self._locate(found) for found in self._encode_all(lines, alpha, seed, return_type="offset_mapping")]

    def _encode_all(self, lines: list[str], alpha: float, seed: str, **settings: Any) -> list[Any]:
        if not alpha:
            return self._processor.encode([clean(line) for line in lines], **settings)
        from sentencepiece import set_random_generator_seed

        set_random_generator_seed(random.Random(seed).getrandbits(31))
        with ThreadPoolExecutor(max_workers=1) as fresh:  # a thread's generator is seeded at its first use only
            return fresh.submit(lambda: [self.sample(line, alpha, **settings) for line in lines]).result()

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, one line, without special and invalid ids; an unknown subword is " ⁇ "."""
        special = (self.pad, self.bos, self.eos)
        text = self._processor.decode([int(id) for id in ids if 0 <= id < self._pieces and id not in special])
        return text.replace("\n", " ")  # a model may spell a LF in bytes, even though it never saw one

    def pieces(self, line: str) -> list[Piece]:
        """The subwords of `encode(line)` with their character offsets in `line`.

        All bytes that spell one character have the offsets of that character. A subword that covers no character, such
        as the mark of the first word's start, has an empty span.
        """
        return self._locate(self._processor.encode(clean(line), return_type="offset_mapping"))

    def _locate(self, found: Mapping[str, Any]) -> list[Piece]:
        rows = zip(found["ids"], found["pieces"], found["offsets"], strict=True)
        pieces = [Piece(id, text, start, end) for id, text, (start, end) in rows]
        for index in reversed(range(len(pieces) - 1)):  # sentencepiece assigns a spelled character to its last byte
            piece, following = pieces[index], pieces[index + 1]
            if piece.start == piece.end == following.start and self._processor.is_byte(piece.id):
                pieces[index] = piece._replace(end=following.end)
        return pieces


def choose_vocabularies(
    config: VocabularyConfig, sample: Callable[[], tuple[list[str], list[str]]], separator: bool, required: bool
) -> tuple[Vocabulary, Vocabulary]:
    """Source and target vocabulary: loaded if a model is configured, else trained on the lines that `sample` returns.

    Args:
        separator: whether trained vocabularies get a separator.
        required: whether loaded vocabularies need one.
    """
    source, target = load_named(config, required)
    if source is not None and target is not None:
        return source, target
    sources, targets = sample()
    if config.shared:
        source = target = Vocabulary.train(chain(sources, targets), config, separator)
    return (
        source or Vocabulary.train(sources, config, separator),
        target or Vocabulary.train(targets, config, separator),
    )


def load_named(config: VocabularyConfig, separated: bool) -> tuple[Vocabulary | None, Vocabulary | None]:
    """Source and target vocabulary of the configured models, or None; one object if they are shared.

    A ConfigError if they have no separator, though `separated` says that they need one.
    """
    if config.shared and config.target_model:
        raise ConfigError("vocabulary.target_model is given, but it needs vocabulary.shared = false")
    names = (config.source_model,) if config.shared else (config.source_model, config.target_model)
    found = [Vocabulary.load(Path(name)) if name else None for name in names]
    for name, vocabulary in zip(names, found, strict=True):
        if separated and vocabulary is not None and vocabulary.separator is None:
            raise ConfigError(
                f"vocabulary {name} has no control symbol {SEPARATOR}, but data.segment_length needs one between "
                f"sentences; train it with --control_symbols={SEPARATOR}, or let rectiformer train one"
            )
    return found[0], found[-1]


def clean(line: str) -> str:
    """The line without what sentencepiece cannot take, replaced character by character, so that offsets still hold."""
    if CHANGED.search(line) is None:
        return line
    return SPACES.sub(" ", UNSAFE.sub("\ufffd", line))


def explain_training_error(message: str, config: VocabularyConfig) -> ConfigError | DataError:
    """What sentencepiece's error means for the user."""
    if too_small := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return ConfigError(
            f"vocabulary.size = {config.size}, but the characters of the text need at least {too_small[1]} subwords"
        )
    if "empty()" in message:
        return DataError("no text to train subwords on: every line is blank")
    return DataError(f"sentencepiece could not train subwords: {one_line(message)}")


PROBE = """
import sys, sentencepiece
model = sentencepiece.SentencePieceProcessor(model_proto=sys.stdin.buffer.read())
model.decode(model.encode("A probe: \\u00e9, e\\u0301, \\u65e5\\u672c, \\U0001f600 " + "x" * 1000))
model.decode(list(range(len(model))))
print("OK")
"""


def reject_unsafe_model(model: bytes, path: Path) -> None:
    """Raise a DataError unless `model` is complete, has no overlong piece, and works in a child process."""
    fields = list(read_fields(model))
    if not {PIECE, TRAINER, NORMALIZER} <= {number for number, _ in fields}:
        raise DataError(f"tokenizer rejected: {path} ({len(model):,} bytes) is cut short or not a sentencepiece model")
    longest = max(length for number, length in fields if number == PIECE)
    if longest > MAX_PIECE + 16:  # its score and type take some bytes
        raise DataError(
            f"tokenizer rejected: {path} has a piece of {longest:,} bytes; at most {MAX_PIECE:,} make sense"
        )
    try:
        child = subprocess.run([sys.executable, "-P", "-c", PROBE], input=model, capture_output=True, timeout=60)
    except subprocess.TimeoutExpired as error:
        raise DataError(f"tokenizer rejected: {path} took over 60 s to load") from error
    if child.returncode != 0 or child.stdout.strip() != b"OK":
        reason = child.stderr.decode("utf-8", errors="replace").strip().split("\n")[-1]
        raise DataError(f"tokenizer rejected: {path} fails to load (exit {child.returncode}): {one_line(reason)}")


def read_fields(model: bytes) -> Iterator[tuple[int, int]]:
    """Number and length of each field of a serialized message, up to the first that is not length-delimited."""
    offset = 0
    while offset < len(model):
        tag, offset = read_varint(model, offset)
        length, offset = read_varint(model, offset)
        offset += length
        if tag & 7 != 2 or offset > len(model):
            return
        yield tag >> 3, length


def read_varint(model: bytes, offset: int) -> tuple[int, int]:
    """A protobuf varint and the offset after it, which is past the end of `model` if the varint is cut."""
    value = 0
    for index, byte in enumerate(model[offset : offset + 10]):
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value, offset + index + 1
    return value, len(model) + 1
