"""The demonstration: two small attentions learn to look words up, and only one of them can look at nothing.

In a sentence, each word asks: the last time I stood here, which word came after me? A word that appears for the first
time has no answer. A softmax must look somewhere all the same; a rectified head switches off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rectiformer.config import Config
from rectiformer.model.attention import MultiHeadAttention, Observation
from rectiformer.ops.weights import AttentionStats

WORDS = ("the", "cat", "dog", "bird", "fish", "sees", "hears", "calls", "likes", "and")
WORDS += ("or", "then", "red", "old", "small", "big", "here", "there", "now", "again")
NOTHING = len(WORDS)  # the class of words seen for the first time


class Lookup(nn.Module):
    """One attention layer: queries are words, keys are the words *before* each position, values the words there."""

    def __init__(self, config: Config, variant: str) -> None:
        super().__init__()
        width = config.attention.width
        self.words = nn.Embedding(len(WORDS), width)
        self.before = nn.Embedding(len(WORDS) + 1, width)  # one more for "no word before"
        self.attention = MultiHeadAttention(
            width, config.attention.heads, variant, cross=True, dropout=config.attention.dropout
        )
        self.classify = nn.Linear(width, len(WORDS) + 1)

    def forward(self, sentence: Tensor) -> Tensor:
        """Scores [B, N, words + 1] of the word that followed each word's last appearance."""
        previous = F.pad(sentence[:, :-1], (1, 0), value=NOTHING)
        queries = self.words(sentence)
        return self.classify(self.attention(queries, queries + self.before(previous), causal=True))


@dataclass(frozen=True)
class Outcome:
    """What one trained model does on sentences it has not seen."""

    variant: str
    accuracy: float
    loss: float
    sentence: list[str]
    answers: list[str]
    expected: list[str]
    weights: Tensor  # [H, N, N] for the sentence
    stats: AttentionStats
    null_when_unknown: float
    """Share of first appearances at which every head is null."""
    null_when_known: float
    """Share of repeated words at which every head is null."""


def draw_sentences(config: Config, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random sentences [count, N] in which a word stands once or twice, and the answer at every position."""
    length = config.demo.sentence
    words = torch.rand(count, len(WORDS), generator=generator).argsort(-1)
    twice = length // 3
    pool = torch.cat([words[:, :twice], words[:, : length - twice]], 1)
    sentences = pool.gather(1, torch.rand(count, length, generator=generator).argsort(-1))
    earlier = (sentences[:, :, None] == sentences[:, None, :]).tril(-1)  # [count, N, N], at most one a row
    followed_by = sentences.roll(-1, 1)
    answers = torch.where(earlier.any(-1), (earlier * followed_by[:, None]).sum(-1), NOTHING)
    return sentences, answers


def train_lookup(config: Config, variant: str, advance: Callable[[float], None]) -> Outcome:
    """Train one model of `variant`, calling `advance(loss)` after each step, and observe it on fresh sentences."""
    torch.manual_seed(config.demo.seed)
    generator = torch.Generator().manual_seed(config.demo.seed)
    model = Lookup(config, variant)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.demo.learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=config.demo.steps)
    for _ in range(config.demo.steps):
        sentences, answers = draw_sentences(config, config.demo.batch, generator)
        loss = F.cross_entropy(model(sentences).flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        advance(loss.item())
    return examine(config, model.eval(), variant)


@torch.no_grad()
def examine(config: Config, model: Lookup, variant: str) -> Outcome:
    seen: list[Observation] = []
    model.attention.observer = seen.append
    sentences, answers = draw_sentences(config, 512, torch.Generator().manual_seed(config.demo.seed + 1))
    scores = model(sentences)
    guesses = scores.argmax(-1)
    stats = seen[0].stats()
    all_null = stats.null.all(1)  # [B, N]
    unknown = answers == NOTHING
    names = [*WORDS, "nothing"]
    return Outcome(
        variant=variant,
        accuracy=(guesses == answers).float().mean().item(),
        loss=F.cross_entropy(scores.flatten(0, 1), answers.flatten()).item(),
        sentence=[names[word] for word in sentences[0]],
        answers=[names[word] for word in guesses[0]],
        expected=[names[word] for word in answers[0]],
        weights=seen[0].weights()[0],
        stats=stats,
        null_when_unknown=all_null[unknown].float().mean().item(),
        null_when_known=all_null[~unknown].float().mean().item(),
    )
