"""Drawing translations from the model. What is drawn depends on a sentence and its key, not on its batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rectiformer.translate.beam import NEVER, BeamState
from rectiformer.translate.options import SearchOptions, Specials


class SampleState(BeamState):
    """Independent samples of each sentence, in place of a beam: the k-th sample is always the k-th hypothesis.

    Args:
        keys: number of each sentence, part of what decides its samples.
        others: as for `BeamState`.
    """

    BATCHED: tuple[str, ...] = (*BeamState.BATCHED, "keys")

    def __init__(
        self,
        limits: Sequence[int],
        options: SearchOptions,
        specials: Specials,
        vocabulary: int,
        device: torch.device,
        *,
        keys: Sequence[int],
        prefixes: Sequence[Sequence[int]] | None = None,
        borders: Sequence[int] | None = None,
    ) -> None:
        super().__init__(limits, options, specials, vocabulary, device, prefixes=prefixes, borders=borders)
        self.keys = torch.tensor(keys, dtype=torch.long, device=device)

    def advance(self, logits: Tensor) -> Tensor:
        """Draw one token for each sample from logits [B * K, V]; every sample continues itself."""
        B, K = self.log_probs.shape
        log_probs = self.allowed(logits)
        noise = gumbel(self.options.seed, self.keys, K, self.position, self.vocabulary)
        tokens = (narrow(log_probs, self.options) + noise).argmax(-1)  # [B, K]
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
        places = self.position * (ended.shape[1] * self.vocabulary) + choices
        self.places.copy_(torch.where(ended, places, self.places))
        self.log_probs.copy_(torch.where(ended, NEVER, totals))


def narrow(log_probs: Tensor, options: SearchOptions) -> Tensor:
    """Log weights to draw from, up to a constant a row: tempered, -inf outside of `top_k` and then of `top_p`."""
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
    word = mix(mix(torch.full((1,), seed, device=device)) + position)  # [1]
    word = mix(word + keys)[:, None]
    word = mix(word + torch.arange(samples, device=device))[..., None]
    word = mix(word + torch.arange(vocabulary, device=device))
    uniform = (((word >> 12) & ((1 << 52) - 1)).double() + 0.5) / (1 << 52)  # the topmost 52 bits: never 0 nor 1
    return -(-uniform.log()).log()


def mix(word: Tensor) -> Tensor:
    """SplitMix64: a bijection of 64-bit words that turns counters into what passes for random."""
    # torch shifts signed words arithmetically; the masks make the shifts logical.
    word = word * -7046029254386353131 + -7046029254386353131  # 0x9E3779B97F4A7C15
    word = (word ^ ((word >> 30) & ((1 << 34) - 1))) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    word = (word ^ ((word >> 27) & ((1 << 37) - 1))) * -7723592293110705685  # 0x94D049BB133111EB
    return word ^ ((word >> 31) & ((1 << 33) - 1))
