"""Beam search and sampling of a batch, as tensors of fixed size that are updated in place.

No operation waits for the device. What was chosen is written once, as (parent, token) in one number per position, and
read back at the end; only the few tensors that the next choice needs are reordered. So one step serves the CPU and a
captured CUDA graph alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rectiformer.errors import DivergedError
from rectiformer.model.transformer import Transformer
from rectiformer.translate.options import Hypothesis, SearchBatch, SearchOptions

BLOCK = 8
"""Longest block of tokens whose repetition is limited."""

NEVER = -torch.inf


Ending = tuple[int, int, float, float, float | None]
"""Beam and position of an end, its score, its log probability, and that of eos where there is one."""


class BeamState:
    """The state of beam search over B sentences with K hypotheses each.

    Args:
        vocabulary: columns of the logits.
        device: where the logits will be.
        size: sentences that the tensors hold; default: those of the batch. Those beyond are done from the start.
        capacity: positions that they hold, more than the longest prefix; default: enough for all limits.
    """

    BATCHED: tuple[str, ...] = (
        "last", "log_probs", "choices", "token_scores", "finished", "end_choices", "limits", "limit_penalties", "done",
        "recent", "runs", "forced", "separators_left",
    )  # fmt: skip
    """Tensors whose first axis is the sentences; the last four are None where they are not needed."""

    def __init__(
        self,
        batch: SearchBatch,
        vocabulary: int,
        device: torch.device,
        *,
        size: int | None = None,
        capacity: int | None = None,
    ) -> None:
        options, specials, limits = batch.options, batch.specials, batch.limits()
        self.options, self.specials, self.vocabulary = options, specials, vocabulary
        B = len(limits) if size is None else size
        T = max(limits) if capacity is None else capacity
        K = options.hypotheses()
        padded = [*limits, *[1] * (B - len(limits))]
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.last = torch.full((B, K), specials.bos, device=device)
        self.log_probs = torch.full((B, K), NEVER, device=device)
        self.log_probs[:, : K if options.sample else 1] = 0  # equal hypotheses would stay equal
        self.choices = torch.zeros(B, K, T, dtype=torch.long, device=device)  # parent * V + token
        self.token_scores = torch.zeros(B, K, T, device=device)
        self.finished = torch.full((B, K, 3), NEVER, device=device)  # score, log probability, that of eos; best first
        self.end_choices = torch.zeros(B, K, dtype=torch.long, device=device)  # position * K * V + choice of that eos
        self.limits = torch.tensor(padded, device=device)
        self.limit_penalties = torch.tensor([options.penalty(limit) for limit in padded], device=device)
        self.done = torch.arange(B, device=device) >= len(limits)
        self.penalties = self._penalties(T)
        self.banned = torch.tensor([specials.pad, specials.unk, specials.bos], device=device)
        self.longest_runs = torch.arange(1, BLOCK + 1, device=device) * options.max_repeats - 1
        guarded = (B, K, BLOCK) if options.max_repeats else None
        # The latest tokens, latest first, and for how many tokens in a row each equalled the one n before it.
        self.recent = None if guarded is None else torch.full(guarded, specials.pad, device=device)
        self.runs = None if guarded is None else torch.zeros(guarded, dtype=torch.long, device=device)
        self.forced = None if batch.prefixes is None else self._begin_forced(batch.prefixes, B, T)
        counts = batch.separator_counts
        self.separators_left = None if counts is None else self._begin_separators(counts, B, K)

    @property
    def device(self) -> torch.device:
        return self.position.device

    def advance(self, logits: Tensor) -> Tensor:
        """Choose from logits [B * K, V]; return the row [B * K] that each hypothesis continues. `last` is its token."""
        B, K = self.log_probs.shape
        log_probs = self.allowed(logits)  # [B, K, V]
        totals, choices = (log_probs + self.log_probs[..., None]).flatten(1).topk(2 * K if K > 1 else 1)
        token_scores = log_probs.flatten(1).gather(1, choices)
        ended = choices % self.vocabulary == self.specials.eos
        self._finish(torch.where(ended, totals, NEVER), totals, choices, token_scores)
        totals, order = torch.where(ended, NEVER, totals).topk(K)
        choices = choices.gather(1, order)
        parents = choices // self.vocabulary
        self.log_probs.copy_(torch.where(self.done[:, None], self.log_probs, totals))
        self._write(parents, choices, token_scores.gather(1, order))
        # The nbest are decided once no live hypothesis can still reach them; the rest of the beam need not be.
        wanted = self.finished[:, min(self.options.nbest, K) - 1, 0]
        self._stop(wanted >= self.log_probs[:, 0] / self.limit_penalties)
        return (parents + torch.arange(0, B * K, K, device=self.device)[:, None]).flatten()

    def allowed(self, logits: Tensor) -> Tensor:
        """Log probabilities [B, K, V] in float32, -inf where a token may not come next."""
        B, K = self.log_probs.shape
        log_probs = logits.view(B, K, -1).log_softmax(-1, dtype=torch.float32)
        if self.forced is not None:
            forced = self.forced.index_select(1, self.position)[..., None]  # [B, 1, 1], -1 where the choice is free
            index = forced.clamp_min(0).expand(B, K, 1)
            unbarred = log_probs.gather(2, index)
        log_probs.index_fill_(2, self.banned, NEVER)
        log_probs[..., self.specials.eos].masked_fill_(self.position == 0, NEVER)
        if self.separators_left is not None and self.specials.separator is not None:
            # Left to itself a beam ends after a few sentences: to stop costs less than all that should follow.
            empty = (self.last == self.specials.separator) | (self.last == self.specials.bos)
            log_probs[..., self.specials.eos].masked_fill_(empty | (self.separators_left > 0), NEVER)
            log_probs[..., self.specials.separator].masked_fill_(empty | (self.separators_left <= 0), NEVER)
        if self.recent is not None and self.runs is not None:
            # Token x would complete one block of n too many if x = recent[n] and so it has been for long enough. Where
            # that is not so, what is barred is the padding, which is barred anyway.
            log_probs.scatter_(2, torch.where(self.runs >= self.longest_runs, self.recent, self.specials.pad), NEVER)
        if self.forced is not None:
            only = torch.full_like(log_probs, NEVER).scatter_(2, index, unbarred)
            log_probs = torch.where(forced >= 0, only, log_probs)
        return log_probs

    def keep(self, sentences: Tensor) -> None:
        """Go on with these sentences only."""
        for name in self.BATCHED:
            held = getattr(self, name)
            setattr(self, name, None if held is None else held[sentences])

    def copy_from(self, other: BeamState, sentences: Tensor) -> None:
        """Become `other` with these sentences, in place; this state may be larger; the rest is then padding."""
        self.options = other.options
        self.done.fill_(True)
        if self.forced is not None:
            self.forced.fill_(-1)
        for name in self.BATCHED:
            held = getattr(other, name)
            if held is not None:
                taken = held[sentences]
                getattr(self, name)[tuple(slice(size) for size in taken.shape)].copy_(taken)
        self.position.copy_(other.position)
        self.penalties.copy_(self._penalties(len(self.penalties)))

    def hypotheses(self, sentences: Sequence[int]) -> list[list[Hypothesis]]:
        """The `nbest` found of each of these sentences, ended ones first, best first among each; fewer if that is all.

        Raises DivergedError where the model's scores were not finite numbers.
        """
        index = torch.tensor(sentences, dtype=torch.long, device=self.device)
        names = ("finished", "end_choices", "log_probs", "limits", "choices", "token_scores")
        held = {name: getattr(self, name)[index].cpu().numpy() for name in names}
        endings = [
            (row, *ending)
            for row, parts in enumerate(zip(*(held[name].tolist() for name in names[:4]), strict=True))
            for ending in self._endings(*parts)
        ]
        traces = trace(held["choices"], held["token_scores"], [ending[:3] for ending in endings], self.vocabulary)
        found: list[list[Hypothesis]] = [[] for _ in sentences]
        for (row, _, _, score, log_probability, eos), (ids, scores) in zip(endings, traces, strict=True):
            all_scores = scores if eos is None else [*scores, eos]
            found[row].append(Hypothesis(ids, score, log_probability, all_scores, ended=eos is not None))
        if not all(found) or any(each.score != each.score for row in found for each in row):
            raise DivergedError(
                "the model's scores are not finite numbers, so no translation can be chosen; its weights are damaged "
                "or training diverged: take an earlier checkpoint"
            )
        return found

    def _endings(
        self, finished: list[list[float]], end_choices: list[int], log_probs: list[float], limit: int
    ) -> list[Ending]:
        """The hypotheses to give of one sentence."""
        ended: list[Ending] = []
        for (score, log_probability, eos), end_choice in zip(finished, end_choices, strict=True):
            if score != NEVER:
                position, choice = divmod(end_choice, len(end_choices) * self.vocabulary)
                ended.append((choice // self.vocabulary, position, score, log_probability, eos))
        ended.sort(key=lambda ending: -ending[2])
        unended: list[Ending] = []
        if len(ended) < self.options.nbest:
            penalty = self.options.penalty(limit)
            alive = [(beam, total) for beam, total in enumerate(log_probs) if total != NEVER]
            unended = [(beam, limit, total / penalty, total, None) for beam, total in alive]
        unended.sort(key=lambda ending: -ending[2])
        return [*ended, *unended][: self.options.nbest]

    def _finish(self, ended: Tensor, totals: Tensor, choices: Tensor, token_scores: Tensor) -> None:
        """Merge new endings [B, C], -inf where there is none, into the finished ones; the K best stay."""
        K = self.finished.shape[1]
        scores = torch.where(self.done[:, None], NEVER, ended / self.penalties.index_select(0, self.position))
        merged = torch.cat([self.finished, torch.stack([scores, totals, token_scores], -1)], 1)
        end_choices = torch.cat([self.end_choices, self.position * (K * self.vocabulary) + choices], 1)
        # Stable, so that equals keep their order however often a done sentence is merged with nothing.
        order = merged[..., 0].argsort(dim=1, descending=True, stable=True)[:, :K]
        self.finished.copy_(merged.gather(1, order[..., None].expand(-1, -1, 3)))
        self.end_choices.copy_(end_choices.gather(1, order))

    def _write(self, parents: Tensor, choices: Tensor, token_scores: Tensor) -> None:
        """Note what [B, K] was chosen at this position. What a done sentence notes is never read."""
        tokens = choices % self.vocabulary
        self.last.copy_(tokens)
        if self.separators_left is not None and self.specials.separator is not None:
            self.separators_left.copy_(
                self.separators_left.gather(1, parents) - (tokens == self.specials.separator).long()
            )
        self.choices.index_copy_(2, self.position, choices[..., None])
        self.token_scores.index_copy_(2, self.position, token_scores[..., None])
        if self.recent is not None and self.runs is not None:
            index = parents[..., None].expand(-1, -1, BLOCK)
            recent, runs = self.recent.gather(1, index), self.runs.gather(1, index)
            self.runs.copy_((runs + 1) * (recent == tokens[..., None]))
            self.recent.copy_(torch.cat([tokens[..., None], recent[..., :-1]], -1))

    def _stop(self, decided: Tensor) -> None:
        """Be done with sentences [B] that are decided or at their limit, and move on by one position."""
        self.position += 1
        self.done |= decided | (self.position >= self.limits)

    def _penalties(self, capacity: int) -> Tensor:
        """Length penalty of a hypothesis that ends at each position."""
        return torch.tensor([self.options.penalty(position + 1) for position in range(capacity)], device=self.device)

    def _begin_forced(self, prefixes: Sequence[Sequence[int]], B: int, T: int) -> Tensor:
        """The token [B, T] that must be at each position, -1 where any may."""
        forced = torch.full((B, T), -1)
        for row, prefix in zip(forced, prefixes, strict=False):
            row[: len(prefix)] = torch.tensor(prefix, dtype=torch.long)
        return forced.to(self.device)

    def _begin_separators(self, counts: Sequence[int], B: int, K: int) -> Tensor:
        """How many separators [B, K] each hypothesis has yet to generate."""
        padded = torch.tensor([*counts, *[0] * (B - len(counts))], dtype=torch.long, device=self.device)
        return padded[:, None].repeat(1, K)


def trace(
    choices: np.ndarray, token_scores: np.ndarray, endings: Sequence[tuple[int, int, int]], vocabulary: int
) -> list[tuple[list[int], list[float]]]:
    """The tokens, and their scores, that led to each ending (sentence, beam, position): all before that position."""
    if not endings:
        return []
    row, beam, length = np.array(endings).T
    ids = np.zeros((len(endings), max(1, length.max())), dtype=np.int64)
    scores = np.zeros(ids.shape, dtype=token_scores.dtype)
    for position in reversed(range(length.max())):
        choice = choices[row, beam, position]
        ids[:, position], scores[:, position] = choice % vocabulary, token_scores[row, beam, position]
        beam = np.where(position < length, choice // vocabulary, beam)
    return [(i[:n].tolist(), s[:n].tolist()) for i, s, n in zip(ids, scores, length, strict=True)]


class SampleState(BeamState):
    """Independent samples of each sentence instead of a beam: the k-th sample is always the k-th hypothesis."""

    BATCHED: tuple[str, ...] = (*BeamState.BATCHED, "keys")

    def __init__(self, batch: SearchBatch, vocabulary: int, device: torch.device) -> None:
        super().__init__(batch, vocabulary, device)
        keys = range(len(batch.sources)) if batch.keys is None else batch.keys
        self.keys = torch.tensor(keys, dtype=torch.long, device=device)

    def advance(self, logits: Tensor) -> Tensor:
        """Draw one token for each sample from logits [B * K, V]; every sample continues itself."""
        B, K = self.log_probs.shape
        log_probs = self.allowed(logits)
        noise = gumbel(self.options.seed, self.keys, K, self.position, self.vocabulary)
        tokens = (filter_logits(log_probs, self.options) + noise).argmax(-1)  # [B, K]
        token_scores = log_probs.gather(2, tokens[..., None]).squeeze(2)
        totals = self.log_probs + token_scores
        parents = torch.arange(K, device=self.device).expand(B, K)
        choices = parents * self.vocabulary + tokens
        self._end(tokens == self.specials.eos, totals, choices, token_scores)
        self._write(parents, choices, token_scores)
        self._stop((self.log_probs == NEVER).all(1))
        return torch.arange(B * K, device=self.device)

    def _end(self, ended: Tensor, totals: Tensor, choices: Tensor, token_scores: Tensor) -> None:
        """Move samples that drew eos, and had not before, to where they wait as finished."""
        ended = ended & (self.log_probs != NEVER)
        scores = totals / self.penalties.index_select(0, self.position)
        self.finished.copy_(
            torch.where(ended[..., None], torch.stack([scores, totals, token_scores], -1), self.finished)
        )
        end_choices = self.position * (ended.shape[1] * self.vocabulary) + choices
        self.end_choices.copy_(torch.where(ended, end_choices, self.end_choices))
        self.log_probs.copy_(torch.where(ended, NEVER, totals))


def begin_beams(model: Transformer, batch: SearchBatch, capacity: int | None = None) -> BeamState:
    """The state before the first token of a batch: of beam search, or of sampling if the options ask for that."""
    if batch.options.sample:
        return SampleState(batch, len(model.output), model.output.device)
    return BeamState(batch, len(model.output), model.output.device, capacity=capacity)


def filter_logits(log_probs: Tensor, options: SearchOptions) -> Tensor:
    """Log weights to draw from, up to a constant per row: tempered, -inf outside of `top_k` and then of `top_p`."""
    weights = log_probs.double() / options.temperature
    if 0 < options.top_k < weights.shape[-1]:
        weights = torch.where(weights >= weights.topk(options.top_k).values[..., -1:], weights, NEVER)
    if options.top_p < 1:
        ordered, order = weights.softmax(-1).sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        outside = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= options.top_p)
        weights = weights.masked_fill(outside, NEVER)
    return weights


def gumbel(seed: int, keys: Tensor, samples: int, position: Tensor, vocabulary: int) -> Tensor:
    """Noise [B, samples, V]: a hash of seed, key [B], sample, position [1] and token, alike on every device."""
    device = keys.device
    word = splitmix64(splitmix64(torch.full((1,), seed, device=device)) + position)  # [1]
    word = splitmix64(word + keys)[:, None]
    word = splitmix64(word + torch.arange(samples, device=device))[..., None]
    word = splitmix64(word + torch.arange(vocabulary, device=device))
    uniform = (((word >> 12) & ((1 << 52) - 1)).double() + 0.5) / (1 << 52)  # the topmost 52 bits: never 0 nor 1
    return -(-uniform.log()).log()


def splitmix64(word: Tensor) -> Tensor:
    """SplitMix64: a bijection of 64-bit words that turns counters into what passes for random."""
    # torch shifts signed words arithmetically; the masks make the shifts logical.
    word = word * -7046029254386353131 + -7046029254386353131  # 0x9E3779B97F4A7C15
    word = (word ^ ((word >> 30) & ((1 << 34) - 1))) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    word = (word ^ ((word >> 27) & ((1 << 37) - 1))) * -7723592293110705685  # 0x94D049BB133111EB
    return word ^ ((word >> 31) & ((1 << 33) - 1))
