"""Attention records out of a translator: sentence pairs under forced decoding, one batch in memory at a time."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from rectiformer.analyze.observe import Seen, observe
from rectiformer.analyze.record import KINDS, AttentionRecord, Example, ModelCard, PieceSpan, Side
from rectiformer.analyze.sites import site_records
from rectiformer.analyze.survey import forced_batches, observing, weighing_sites
from rectiformer.errors import ArgumentError, DataError, unknown_name
from rectiformer.measure.alignment import Links, check_links
from rectiformer.measure.words import given_spans, pieces_to_words, word_spans
from rectiformer.model.observation import Observation
from rectiformer.model.transformer import Site, Transformer
from rectiformer.text.batches import Batch
from rectiformer.text.vocabulary import Vocabulary
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.score import EncodedPairs, decode_forced
from rectiformer.translate.translator import Translator, piece_text

__all__ = ["Seen", "model_card", "observe", "record_pairs", "watch_pairs"]


def record_pairs(
    translator: Translator,
    pairs: Sequence[tuple[str, str | None]],
    gold: Sequence[Links | None] | None = None,
    kinds: Collection[str] = KINDS,
    layers: Collection[int] | None = None,
    *,
    tokenized: bool = False,
) -> AttentionRecord:
    """What the heads do while they write the target of each (source, target) pair, and which model it was.

    Args:
        pairs: a target of None is translated first, and then forced like any other.
        gold: links of words for each pair; None for a pair that has none.
        kinds: attentions to record; those of variants without weights are left out.
        layers: layers to record, from 0; all unless given.
        tokenized: whether words are what stands between spaces; otherwise punctuation is split off.
    """
    examples = watch_pairs(translator, pairs, gold, kinds, layers, tokenized=tokenized)
    return AttentionRecord(model_card(translator.model), examples)


def watch_pairs(
    translator: Translator,
    pairs: Sequence[tuple[str, str | None]],
    gold: Sequence[Links | None] | None = None,
    kinds: Collection[str] = KINDS,
    layers: Collection[int] | None = None,
    *,
    tokenized: bool = False,
) -> list[Example]:
    """The examples of `record_pairs`, without the card of the model, for which all its weights are read."""
    sites = choose_sites(translator.model, kinds, layers)
    if gold is not None and len(gold) != len(pairs):
        raise DataError(f"{len(pairs)} sentence pairs for {len(gold)} gold alignments; each pair needs one, or None")
    targets = write_targets(translator, pairs)
    forced = [(source, target) for (source, _), target in zip(pairs, targets, strict=True)]
    examples = []
    for index, (source, target) in enumerate(forced):
        own = pairs[index][1] is None
        example = Example(
            split_side(translator.source, source, tokenized),
            split_side(translator.target, target, tokenized),
            forced=not own,
            translation=target if own else None,
            gold=gold[index] if gold is not None else None,
            sites=[],
        )
        check_gold(example, f"pair {index + 1}")
        examples.append(example)
    for batch in forced_batches(translator, forced):
        record_batch(translator, batch, sites, [examples[index] for index in batch.pairs])
    return examples


def choose_sites(model: Transformer, kinds: Collection[str], layers: Collection[int] | None) -> list[Site]:
    """The attentions to record; ArgumentError for a kind there is not, or a layer that none of these kinds has."""
    for kind in kinds:
        if kind not in KINDS:
            raise ArgumentError(unknown_name("kind of attention", kind, KINDS))
    for layer in layers or ():
        if not any(site.layer == layer and site.kind in kinds for site in model.sites()):
            config = model.config
            raise ArgumentError(
                f"no layer of {' or '.join(kinds)} attention has index {layer}; indices count from 0, and the encoder "
                f"has {config.encoder_layers} layers, the decoder {config.decoder_layers}"
            )
    return [site for site in weighing_sites(model) if site.kind in kinds and (layers is None or site.layer in layers)]


def write_targets(translator: Translator, pairs: Sequence[tuple[str, str | None]]) -> list[str]:
    """The target of each pair, or the translator's own where there is none."""
    EncodedPairs(translator, [(source, target or "") for source, target in pairs])  # refuses what is too long
    own = iter(translator.translate([source for source, target in pairs if target is None], SearchOptions()))
    return [next(own).text if target is None else target for _, target in pairs]


def check_gold(example: Example, where: str) -> None:
    if example.gold is None or example.target is None:
        return
    if not example.forced:
        raise DataError(f"{where} has gold links but no target that they could be about; give it one, or no links")
    check_links(example.gold, len(example.source.words), len(example.target.words), where)


def split_side(vocabulary: Vocabulary, text: str, tokenized: bool) -> Side:
    """A sentence with its pieces, the end included, in groups that make up its words."""
    pieces = [PieceSpan(piece.text, piece.start, piece.end) for piece in vocabulary.pieces(text)]
    spans = given_spans(text) if tokenized else word_spans(text)
    groups: list[list[int]] = [[] for _ in spans]
    for piece, inside in enumerate(pieces_to_words([(piece.start, piece.stop) for piece in pieces], spans)):
        for word in inside:
            groups[word].append(piece)
    words: list[tuple[int, int, int, int]] = []
    after = 0
    for (start, stop), group in zip(spans, groups, strict=True):
        first, after = (group[0], group[-1] + 1) if group else (after, after)  # a word may have lost all its pieces
        words.append((first, after, start, stop))
    end = PieceSpan(piece_text(vocabulary, vocabulary.eos), len(text), len(text))
    return Side(text, [*pieces, end], words)


def record_batch(translator: Translator, batch: Batch, sites: Sequence[Site], examples: Sequence[Example]) -> None:
    """Add what `sites` do with a batch to the examples of its rows."""

    def see(seen: Observation, site: Site) -> None:
        source, target = batch.source_lengths.tolist(), batch.target_lengths.tolist()
        queries = source if site.kind == "encoder" else target
        keys = target if site.kind == "decoder" else source
        for example, record in zip(examples, site_records(seen, site.kind, site.layer, queries, keys), strict=True):
            example.sites.append(record)

    with ExitStack() as stack:
        stack.enter_context(translator.inference())
        for site in sites:
            stack.enter_context(observing(site, partial(see, site=site)))
        decode_forced(translator, batch)


def model_card(model: Transformer, name: str = "") -> ModelCard:
    """What a record says of its model, which is called by its variant unless it has a name."""
    config = model.config
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(config), sort_keys=True).encode())
    for parameter_name, parameter in model.named_parameters():
        digest.update(f"{parameter_name} {parameter.dtype} {list(parameter.shape)}".encode())
        digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    variants = {kind: config.variant_of(kind) for kind in ("encoder", "decoder", "cross")}
    return ModelCard(
        name or "/".join(dict.fromkeys(variants.values())),
        digest.hexdigest(),
        variants,
        {"encoder": config.encoder_layers, "decoder": config.decoder_layers},
        config.num_heads,
    )
