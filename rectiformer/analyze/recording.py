"""Attention records of a translator: sentence pairs and documents under forced decoding, one batch at a time."""

import hashlib
import json
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import torch

from rectiformer.analyze.meters import BLOCK_CELLS
from rectiformer.analyze.record import SITES, AttentionRecord, Example, ModelCard, PieceSpan, Side, SiteRecord
from rectiformer.analyze.segments import Document, JoinedPairs, two_sides
from rectiformer.analyze.survey import forced_batches, observing, weighing_sites
from rectiformer.errors import ArgumentError, DataError, unknown_name
from rectiformer.measure.alignment import Links, check_links
from rectiformer.measure.words import given_spans, pieces_to_words, word_spans
from rectiformer.model.attention import Observation
from rectiformer.model.transformer import Site, Transformer
from rectiformer.ops.weights import weight_blocks
from rectiformer.text.batches import Batch, collate, shuffled
from rectiformer.text.vocabulary import Vocabulary
from rectiformer.translate.documents import translate_segments
from rectiformer.translate.evaluate import decode_forced, symbols_of
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator, piece_text


def record_pairs(
    translator: Translator,
    pairs: Sequence[tuple[str, str]],
    gold: Sequence[Links | None] | None = None,
    sites: Collection[str] = SITES,
    layers: Collection[int] | None = None,
    *,
    name: str = "",
    tokenized: bool = False,
    translate: bool = False,
    warn: Callable[[str], None] = warnings.warn,
) -> AttentionRecord:
    """What the heads do while the model generates the target of each (source, target) pair, and which model it was.

    Args:
        gold: links of words for each pair; None for a pair that has none.
        sites: where to record: cross, encoder, decoder; sites of variants without weights are left out.
        layers: layers to record, from 0; all unless given.
        name: what to call the model, in place of its variant.
        tokenized: whether words are what stands between spaces; otherwise punctuation is split off.
        translate: whether to add the model's own translations.
        warn: told of each line that is too long to be translated as a whole.
    """
    examples = capture_examples(translator, pairs, gold, sites, layers, tokenized=tokenized)
    if translate:
        own = translator.translate([source for source, _ in pairs], SearchOptions(), warn=warn)
        examples = [replace(example, translation=each.text) for example, each in zip(examples, own, strict=True)]
    return AttentionRecord(model_card(translator.model, name), examples)


def capture_examples(
    translator: Translator,
    pairs: Sequence[tuple[str, str]],
    gold: Sequence[Links | None] | None = None,
    sites: Collection[str] = SITES,
    layers: Collection[int] | None = None,
    *,
    tokenized: bool = False,
) -> list[Example]:
    """The examples of `record_pairs`, without the card of the model, for which all its weights are read."""
    chosen = choose_sites(translator.model, sites, layers)
    if gold is not None and len(gold) != len(pairs):
        raise DataError(f"{len(pairs)} sentence pairs for {len(gold)} gold alignments; each pair needs one, or None")
    examples = []
    for index, texts in enumerate(pairs):
        source, target = (
            split_side(vocabulary, text, tokenized)
            for vocabulary, text in zip((translator.source, translator.target), texts, strict=True)
        )
        links = gold[index] if gold is not None else None
        if links is not None:
            check_links(links, len(source.words), len(target.words), f"pair {index + 1}")
        examples.append(Example(source, target, forced=True, translation=None, gold=links, sites=[]))
    for batch in forced_batches(translator, pairs):
        record_batch(translator, batch, chosen, [examples[index] for index in batch.pairs])
    return examples


def choose_sites(model: Transformer, sites: Collection[str], layers: Collection[int] | None) -> list[Site]:
    """The attention modules to record; ArgumentError for an unknown site, or a layer that none of the sites has."""
    for name in sites:
        if name not in SITES:
            raise ArgumentError(unknown_name("attention site", name, SITES))
    for layer in layers or ():
        if not any(site.layer == layer and site.kind in sites for site in model.sites()):
            config = model.config
            raise ArgumentError(
                f"no layer of {' or '.join(sites)} attention has index {layer}; indices count from 0, and the encoder "
                f"has {config.encoder_layers} layers, the decoder {config.decoder_layers}"
            )
    return [site for site in weighing_sites(model) if site.kind in sites and (layers is None or site.layer in layers)]


def split_side(vocabulary: Vocabulary, text: str, tokenized: bool) -> Side:
    """A sentence, its pieces (the end included), and which of them make up each word."""
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
    """Add the attention at `sites` to the examples of a batch."""

    def see(seen: Observation, site: Site) -> None:
        source, target = batch.source_lengths.tolist(), batch.target_lengths.tolist()
        queries = source if site.kind == "encoder" else target
        keys = target if site.kind == "decoder" else source
        for example, record in zip(examples, site_records(seen, site.kind, site.layer, queries, keys), strict=True):
            example.sites.append(record)

    with ExitStack() as stack:
        stack.enter_context(translator.inference())
        for site in sites:
            stack.enter_context(observing(site.attention, partial(see, site=site)))
        decode_forced(translator, batch)


def model_card(model: Transformer, name: str = "") -> ModelCard:
    """The description of a model in a record; its name is its variant unless given."""
    config = model.config
    digest = hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode())
    for parameter_name, parameter in model.named_parameters():
        digest.update(f"{parameter_name} {parameter.dtype} {list(parameter.shape)}".encode())
        digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    variants = {kind: config.variant_at(kind) for kind in ("encoder", "decoder", "cross")}
    return ModelCard(
        name or "/".join(dict.fromkeys(variants.values())),
        digest.hexdigest(),
        variants,
        {"encoder": config.encoder_layers, "decoder": config.decoder_layers},
        config.num_heads,
    )


def site_records(
    seen: Observation, kind: str, layer: int, queries: Sequence[int], keys: Sequence[int]
) -> list[SiteRecord]:
    """The record of an attention for each sequence of a batch: its first `queries` and `keys`, without padding.

    The weights are computed a few queries at a time: no dense matrix of them is ever held.
    """
    heads = seen.q.shape[1]
    visible = seen.visible().expand(seen.q.shape[:3]).cpu().numpy()  # [B, H, M]
    none = (np.zeros(0, np.uint32), np.zeros(0, np.uint32), np.zeros(0, np.float32))
    entries = [[none] for _ in queries]  # rows, columns and weights of each block
    with torch.no_grad():
        for rows, block in weight_blocks(seen.q, seen.k, seen.variant, cells=BLOCK_CELLS, **seen.call):
            weights = block.float().cpu().numpy()  # [B, H, m, N]
            for found, dense, length, width in zip(entries, weights, queries, keys, strict=True):
                part = dense[:, : max(0, length - rows.start), :width]
                head, query, column = part.nonzero()
                row = head * length + rows.start + query
                found.append((row.astype(np.uint32), column.astype(np.uint32), part[head, query, column]))
    records = []
    for found, length, width, seen_keys in zip(entries, queries, keys, visible, strict=True):
        row, column, values = (np.concatenate(each) for each in zip(*found, strict=True))
        shape = (heads, length, width)
        records.append(SiteRecord.from_entries(kind, layer, shape, row, column, values, seen_keys[:, :length]))
    return records


def sample(count: int, total: int, seed: int) -> list[int]:
    """`count` random indices below `total`, or all if there are fewer, in order; the seed decides which."""
    return sorted(shuffled(total, "examples", seed)[:count].tolist())


def record_documents(
    translator: Translator,
    documents: Sequence[Document],
    sites: Collection[str] = SITES,
    layers: Collection[int] | None = None,
    *,
    name: str = "",
    tokenized: bool = False,
    translate: bool = False,
) -> AttentionRecord:
    """What the heads do while the model generates a whole document in one sequence; the report sums it by sentence.

    Args:
        sites, layers, name, tokenized, translate: as in `record_pairs`.
    """
    chosen, joined = choose_sites(translator.model, sites, layers), JoinedPairs(translator, two_sides(documents))
    examples = []
    for index, document in enumerate(documents):
        source, target = (
            join_sides(vocabulary, [pair[side] for pair in document], tokenized)
            for side, vocabulary in enumerate((translator.source, translator.target))
        )
        examples.append(Example(source, target, forced=True, translation=None, gold=None, sites=[]))
        batch = collate(joined, np.array([index]), symbols_of(translator))
        record_batch(translator, batch, chosen, examples[-1:])
    if translate:
        own = translate_segments(translator, [sources for sources, _ in two_sides(documents)], SearchOptions())
        examples = [replace(each, translation=" ".join(parts)) for each, parts in zip(examples, own, strict=True)]
    return AttentionRecord(model_card(translator.model, name), examples)


def join_sides(vocabulary: Vocabulary, sentences: Sequence[str], tokenized: bool) -> Side:
    """A document and its pieces, separators and the end included; the texts are joined by spaces."""
    whole = Side("", [], [])
    for number, sentence in enumerate(sentences):
        side = split_side(vocabulary, sentence, tokenized)
        if number:
            at = len(whole.text)
            whole = replace(whole, text=whole.text + " ")
            if vocabulary.separator is not None:
                whole.pieces.append(PieceSpan(piece_text(vocabulary, vocabulary.separator), at, at))
        shift, first = len(whole.text), len(whole.pieces)
        whole.pieces.extend(PieceSpan(each.text, each.start + shift, each.stop + shift) for each in side.pieces[:-1])
        whole.words.extend((a + first, b + first, start + shift, stop + shift) for a, b, start, stop in side.words)
        whole.sentences.append((first, len(whole.pieces)))
        whole = replace(whole, text=whole.text + sentence)
    end = PieceSpan(piece_text(vocabulary, vocabulary.eos), len(whole.text), len(whole.text))
    return replace(whole, pieces=[*whole.pieces, end])
