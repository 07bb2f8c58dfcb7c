"""Word alignments from cross-attention: every layer, every head, both ways to read the decoder's steps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rectiformer.errors import ArgumentError, DataError
from rectiformer.measure import alignment
from rectiformer.measure.alignment import AlignmentScore, Link, Links
from rectiformer.measure.words import given_spans, merge_links, pieces_to_words, word_spans
from rectiformer.model.attention import Observation
from rectiformer.model.transformer import Site, Transformer
from rectiformer.ops.variants import find_variant
from rectiformer.ops.weights import weight_blocks
from rectiformer.text.batches import collate
from rectiformer.text.vocabulary import Piece
from rectiformer.translate.evaluate import EncodedPairs, decode_forced, symbols_of
from rectiformer.translate.translator import Translator, cut_batches

AVERAGE = "average"
NO_STEPS = np.empty((0, 0), dtype=np.int64)


@dataclass(frozen=True)
class PairAttention:
    """Cross-attention while a given translation is decoded."""

    source: str
    target: str
    source_pieces: list[Piece]
    target_pieces: list[Piece]
    peaks: list[np.ndarray]
    """Per layer [H + 1, M]: the source piece with the largest weight at each step, -1 if none; the last row is that of
    the heads' mean. M counts the target pieces and the step that predicts the end."""
    weights: list[np.ndarray]
    """Per layer [H, M, N], N counting the source pieces and their end; none unless asked for."""


@dataclass(frozen=True)
class AlignmentRow:
    """How well one layer's head, or the mean of its heads, aligns."""

    layer: int
    """Counted from 0."""
    head: int | str
    """Counted from 0, or "average"."""
    induction: str
    score: AlignmentScore


@contextmanager
def observed(sites: Sequence[Site]) -> Iterator[dict[int, Observation]]:
    """The last observation of each layer of `sites`, filled in while the model runs inside."""
    seen: dict[int, Observation] = {}
    before = [site.attention.observer for site in sites]
    for site in sites:
        site.attention.observer = partial(seen.__setitem__, site.layer)
    try:
        yield seen
    finally:
        for site, observer in zip(sites, before, strict=True):
            site.attention.observer = observer


def cross_sites(model: Transformer) -> list[Site]:
    """Every cross-attention, first layer first; ArgumentError if one has no weights."""
    sites = [site for site in model.sites() if site.kind == "cross"]
    for site in sites:
        if not find_variant(site.attention.variant).has_weights:
            raise ArgumentError(
                f"cross-attention is {site.attention.variant!r} in layer {site.layer + 1} of {len(sites)}, which "
                "has no weights to align by; use a model with another model.cross_variant"
            )
    return sites


def cross_attention(
    translator: Translator,
    pairs: Sequence[tuple[str, str]],
    batch_tokens: int = 4096,
    *,
    layer: int | None = None,
    weights: bool = False,
) -> Iterator[PairAttention]:
    """The cross-attention of each (source, target) pair, in order.

    Args:
        batch_tokens: padded tokens of the longer side in a batch.
        layer: the only layer to look at, from 0; the others then have no steps. Default: all.
        weights: whether to give the weights too; those of one batch are held at a time. Without them the peaks are
            computed from a few rows of weights at a time.
    """
    sites, symbols = cross_sites(translator.model), symbols_of(translator)
    encoded = EncodedPairs(translator, pairs)
    for indices in cut_batches(range(len(pairs)), encoded.padded_lengths, batch_tokens):
        batch = collate(encoded, np.array(indices), symbols)
        with translator.inference(), observed(sites) as seen:
            decode_forced(translator, batch)
            layers = [
                read_attention(seen[site.layer], encoded.source_lengths[indices], weights)
                if layer in (None, site.layer)
                else (NO_STEPS, None)
                for site in sites
            ]
        for row, index in enumerate(indices):
            source, target = pairs[index]
            pieces = translator.source.pieces(source), translator.target.pieces(target)
            N, M = (len(each) + 1 for each in pieces)
            peaks = [found[row, :, :M] if found.size else found for found, _ in layers]
            cut = [found[row, :, :M, :N].copy() for _, found in layers if found is not None]
            yield PairAttention(source, target, *pieces, peaks, cut)


def read_attention(seen: Observation, source_pieces: np.ndarray, keep: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """Peaks [B, H + 1, M] of a batch among the first `source_pieces` [B] keys; if `keep`, its weights [B, H, M, N]."""
    blocks = (block for _, block in weight_blocks(seen.q, seen.k, seen.variant, **seen.call))
    peaks = []
    for block in [seen.weights()] if keep else blocks:
        weights = block.float().cpu().numpy()
        peaks.append(np.stack([find_peaks(each, pieces) for each, pieces in zip(weights, source_pieces, strict=True)]))
    return np.concatenate(peaks, -1), weights if keep else None


def find_peaks(weights: np.ndarray, source_pieces: int) -> np.ndarray:
    """The strongest of the first keys in each row of weights [H, M, N] and, last, of their mean: [H + 1, M]."""
    weights = weights[..., :source_pieces]
    return np.concatenate([alignment.strongest(weights), alignment.strongest(weights.mean(0, keepdims=True))])


class WordLinker:
    """Links the words of one pair by the peaks of its pieces.

    Args:
        tokenized: whether words are separated by spaces only; otherwise punctuation is split off.
    """

    def __init__(self, pair: PairAttention, tokenized: bool = False) -> None:
        spans = given_spans if tokenized else word_spans
        self.peaks = pair.peaks
        self.source_words, self.target_words = (
            pieces_to_words([(piece.start, piece.end) for piece in pieces], spans(line))
            for pieces, line in ((pair.source_pieces, pair.source), (pair.target_pieces, pair.target))
        )

    def links(self, layer: int, head: int | str, induction: str) -> set[Link]:
        """Links (source word, target word): each target piece votes for the source piece it weighs most."""
        steps = self.peaks[layer][-1 if isinstance(head, str) else head][alignment.steps_of(induction)]
        return merge_links(alignment.links_from_steps(steps), self.source_words, self.target_words)


def align_pairs(
    translator: Translator,
    pairs: Sequence[tuple[str, str]],
    *,
    layer: int,
    head: int | str = AVERAGE,
    induction: str = "normal",
    tokenized: bool = False,
    batch_tokens: int = 4096,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[set[Link]]:
    """The word links of each (source, target) pair; none where a side is empty.

    Args:
        layer: of the decoder, counted from 0.
        head: counted from 0, or "average" for the mean of the heads' weights.
        induction: "normal" or "shifted", as in `measure.alignment.rows_for`.
        tokenized: whether words are separated by spaces only.
        progress: told how many pairs are done, and of how many.
    """
    check_head(translator.model, layer, head)
    links = []
    for pair in cross_attention(translator, pairs, batch_tokens, layer=layer):
        links.append(WordLinker(pair, tokenized).links(layer, head, induction))
        progress(len(links), len(pairs))
    return links


def alignment_table(
    translator: Translator,
    pairs: Sequence[tuple[str, str]],
    gold: Sequence[Links],
    *,
    tokenized: bool = False,
    batch_tokens: int = 4096,
) -> list[AlignmentRow]:
    """The alignment error of every layer, head, average of heads and induction, in one pass over the pairs."""
    if len(pairs) != len(gold) or not gold:
        raise DataError(f"{len(pairs)} sentence pairs for {len(gold)} gold alignments; each pair needs one")
    config = translator.model.config
    aligners = [
        (layer, head, induction)
        for layer in range(config.decoder_layers)
        for head in (*range(config.num_heads), AVERAGE)
        for induction in alignment.INDUCTIONS
    ]
    counts = np.zeros((len(aligners), 5), dtype=np.int64)
    lengths = EncodedPairs(translator, pairs).padded_lengths
    for batch in translator.ranks.own_share(list(cut_batches(range(len(pairs)), lengths, batch_tokens))):
        found = cross_attention(translator, [pairs[index] for index in batch], batch_tokens)
        for index, pair in zip(batch, found, strict=True):
            linker = WordLinker(pair, tokenized)
            links = [linker.links(*aligner) for aligner in aligners]
            counts += alignment.count_links(links, [gold[index]] * len(aligners))
    totals = np.sum(translator.ranks.all_gather_object(counts.tolist), axis=0)
    return [AlignmentRow(*aligner, alignment.score_counts(row)) for aligner, row in zip(aligners, totals, strict=True)]


def choose(
    rows: Sequence[AlignmentRow], *, layer: int | str = "best", head: int | str = "best", induction: str = "best"
) -> AlignmentRow:
    """The row with the least alignment error, the first if several have it, among those that fit what is given."""
    wanted = (layer, head, induction)
    fitting = [
        row
        for row in rows
        if all(asked in ("best", has) for asked, has in zip(wanted, (row.layer, row.head, row.induction), strict=True))
    ]
    if not fitting:
        raise ArgumentError(f"no alignment of layer {layer}, head {head}, induction {induction} is in the table")
    return min(fitting, key=lambda row: row.score.aer)


def check_head(model: Transformer, layer: int, head: int | str) -> None:
    """ArgumentError for a layer or head, both counted from 0, that the decoder does not have."""
    layers, heads = model.config.decoder_layers, model.config.num_heads
    if layer not in range(layers):
        raise ArgumentError(f"no decoder layer has index {layer!r}; there are {layers}, indices 0 to {layers - 1}")
    if head != AVERAGE and head not in range(heads):
        raise ArgumentError(f'no head has index {head!r}; there are {heads}, indices 0 to {heads - 1}, and "{AVERAGE}"')


def ordinal(index: int | str) -> str:
    """A layer or head, an index from 0, as people count it: from 1, as in the papers; words stay as they are."""
    return index if isinstance(index, str) else str(index + 1)


def describe_head(layer: int | str, head: int | str, induction: str) -> str:
    """What messages call a way to link words, its indices counted from 0."""
    return f"layer {ordinal(layer)}, head {ordinal(head)}, {induction}"


@dataclass(frozen=True)
class Direction:
    """What one model links, as (source word, target word) of the pairs it was given."""

    links: list[set[Link]]
    rows: list[AlignmentRow]
    """The errors of every layer, head and induction; none without gold links."""
    best: AlignmentRow | None
    """The one of them that made the links."""


def align_direction(
    translator: Translator,
    pairs: Sequence[tuple[str, str]],
    gold: Sequence[Links] | None = None,
    *,
    layer: int | str = "",
    head: int | str = "",
    induction: str = "",
    tokenized: bool = False,
    batch_tokens: int = 4096,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Direction:
    """Links of each (source, target) pair.

    Args:
        gold: with gold links, whatever is "" or "best" is chosen for the least alignment error. Without them the
            defaults are the last layer, the average of its heads, and normal induction.
        layer, head, induction: as in `align_pairs`; where all are "", those of a head that learned links, if one did.
    """
    rows: list[AlignmentRow] = []
    best: AlignmentRow | None = None
    if reads_guided(translator, layer, head, induction):
        layer, head, induction = default_head(translator)
    if gold is not None:
        rows = alignment_table(translator, pairs, gold, tokenized=tokenized, batch_tokens=batch_tokens)
        best = choose(rows, layer=or_else(layer, "best"), head=or_else(head, "best"), induction=induction or "best")
        layer, head, induction = best.layer, best.head, best.induction
    aligner: dict[str, Any] = {
        "layer": or_else(layer, translator.model.config.decoder_layers - 1),
        "head": or_else(head, AVERAGE),
        "induction": induction or "normal",
    }
    links = align_pairs(translator, pairs, **aligner, tokenized=tokenized, batch_tokens=batch_tokens, progress=progress)
    return Direction(links, rows, best)


def default_head(translator: Translator) -> tuple[int, int | str, str]:
    """Layer and head, from 0, and induction that link words unless others are asked for.

    Those of the head that learned links in training, if one did; else the last layer, the average of its heads, normal.
    """
    return translator.guided or (translator.model.config.decoder_layers - 1, AVERAGE, "normal")


def reads_guided(translator: Translator, *asked: int | str) -> bool:
    """Whether words are linked by the head that learned links, since nothing else is asked for."""
    return translator.guided is not None and not any(each != "" for each in asked)


def align_backward(
    translator: Translator, pairs: Sequence[tuple[str, str]], gold: Sequence[Links] | None = None, **options: Any
) -> Direction:
    """`align_direction` by a model from target to source; pairs, gold and the links found are source to target."""
    reversed_pairs = [(target, source) for source, target in pairs]
    if gold is not None:
        gold = [Links(frozenset(alignment.flip(each.sure)), frozenset(alignment.flip(each.possible))) for each in gold]
    found = align_direction(translator, reversed_pairs, gold, **options)
    return Direction([alignment.flip(links) for links in found.links], found.rows, found.best)


def or_else(asked: int | str, default: int | str) -> int | str:
    return default if asked == "" else asked
