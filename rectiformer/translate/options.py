"""What decoding is told, and what it gives back."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from rectiformer.errors import ArgumentError


@dataclass(frozen=True)
class Specials:
    """Ids of the target vocabulary that decoding treats apart."""

    pad: int
    unk: int
    bos: int
    eos: int
    separator: int | None = None
    """Separates the sentences of a segment; None where there are single sentences only."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How to decode: beam search, or sampling if `sample`."""

    beam: int = 4
    """Hypotheses kept per sentence; 1 is greedy. Sampling does not use it."""
    length_penalty: float = 0.6
    """Scores are log probabilities divided by ((5 + length) / 6) to this power, the length counting eos."""
    extra_length: int = 50
    """Most tokens generated, eos included, beyond those of the source without its eos."""
    nbest: int = 1
    """Hypotheses returned per sentence, at most `beam`; with `sample`, the number of samples."""
    sample: bool = False
    """Draw from the model instead of beam search."""
    temperature: float = 1.0
    """Divides the logits before drawing."""
    top_k: int = 0
    """Draw from this many likeliest tokens; 0 from all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens that hold at least this probability together."""
    seed: int = 1
    """Decides what is drawn, together with a sentence's key, the index of the sample and the position."""
    max_repeats: int = 4
    """Most occurrences of a block of 1 to 8 tokens one right after the other; 0 does not limit them."""

    def __post_init__(self) -> None:
        for name, least in (("beam", 1), ("nbest", 1), ("extra_length", 0), ("top_k", 0), ("seed", 0)):
            _require(getattr(self, name) >= least, f"{name} = {getattr(self, name)}, but it must be at least {least}")
        for name, holds, allowed in (
            ("seed", self.seed < 1 << 63, "must be below 2^63"),
            ("max_repeats", self.max_repeats >= 0, "is at least 1, or 0 for no limit"),
            ("length_penalty", 0 <= self.length_penalty <= 5, "must be from 0 to 5"),
            ("temperature", 0 < self.temperature < math.inf, "must be finite and above 0"),
            ("top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1"),
        ):
            _require(holds, f"{name} = {getattr(self, name)}, but it {allowed}")
        if self.sample:
            return
        beam, nbest = self.beam, self.nbest
        _require(nbest <= beam, f"nbest = {nbest} is more than beam = {beam}; lower one or raise the other")
        for name, unused in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0)):
            value = getattr(self, name)
            _require(value == unused, f"{name} = {value} is about sampling; set sample as well, or leave it out")

    def hypotheses(self) -> int:
        """How many hypotheses a sentence has while it is decoded."""
        return self.nbest if self.sample else self.beam

    def penalty(self, length: int) -> float:
        """What the log probability of `length` tokens, eos counted, is divided by."""
        return float(((5 + length) / 6) ** self.length_penalty)


@dataclass(frozen=True)
class Hypothesis:
    """One translation found."""

    ids: list[int]
    """Tokens without eos."""
    score: float
    """Log probability divided by the length penalty."""
    log_probability: float
    token_scores: list[float]
    """Log probability of each token, that of eos last where `ended`."""
    ended: bool
    """False where the length limit came before eos."""


ABANDONED = Hypothesis(ids=[], score=-math.inf, log_probability=-math.inf, token_scores=[], ended=False)
"""The only hypothesis of a sentence that was given up because nobody wants it any more."""


@dataclass(frozen=True)
class SearchBatch:
    """One batch to decode."""

    sources: Sequence[Sequence[int]]
    """Ids, each ending with eos."""
    options: SearchOptions
    specials: Specials
    """Ids that are treated apart; pad, bos and unk are never generated."""
    prefixes: Sequence[Sequence[int]] | None = None
    """Ids that each translation must begin with, [] for none; they may hold unk and may end with eos. A prefix that the
    length limit does not admit raises the limit to one token more than the prefix."""
    keys: Sequence[int] | None = None
    """A number for each sentence that decides its samples; default: its index in the batch."""
    separator_counts: Sequence[int] | None = None
    """How many of `specials.separator` each translation holds, none of them right after another, first or last;
    default: as many as the model generates. A prefix is taken as it is."""
    precision: torch.dtype | None = None
    """Of matrix products, torch.bfloat16 for instance; float32 and None leave them to the model."""
    is_wanted: Callable[[int], bool] | None = None
    """Whether the translation of the n-th source is still wanted, asked again and again: after each token, or every few
    where steps are captured. One that is not is given up and has `ABANDONED` as its only hypothesis; the others go
    on."""

    def wants(self, index: int) -> bool:
        """Whether anybody still waits for the translation of this source."""
        return self.is_wanted is None or self.is_wanted(index)

    def limits(self) -> list[int]:
        """Most tokens of each translation, eos included: never so few that it could not end after its prefix."""
        longest = [len(source) - 1 + self.options.extra_length for source in self.sources]
        prefixes: Sequence[Sequence[int]] = self.prefixes or [()] * len(longest)
        return [max(limit, len(prefix) + 1) for limit, prefix in zip(longest, prefixes, strict=True)]

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Matrix products in `precision`. Nothing is remembered between them, so that a step can be captured."""
        if self.precision is None:
            return nullcontext()
        return torch.autocast(device.type, self.precision, cache_enabled=False)

    def padded(self, rows: int = 0, length: int = 0) -> tuple[Tensor, Tensor]:
        """Sources [B, N] and lengths [B], padded to at least `rows` sources of one token and to `length`."""
        lengths = [len(source) for source in self.sources]
        lengths += [1] * (rows - len(lengths))
        ids = torch.zeros(len(lengths), max(length, *lengths), dtype=torch.long)
        for row, source in zip(ids, self.sources, strict=False):
            row[: len(source)] = torch.tensor(source)
        return ids, torch.tensor(lengths)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ArgumentError(message)
