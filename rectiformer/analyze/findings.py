"""Everything that is measured of a model on a test set, and its JSON file."""

import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rectiformer.analyze import meters, survey
from rectiformer.analyze.record import SITES, ModelCard
from rectiformer.analyze.recording import model_card
from rectiformer.analyze.segments import Document, JoinedPairs, cut_documents, take, two_sides
from rectiformer.analyze.survey import HeadObserver, MemoryObserver, Pair, SiteObserver
from rectiformer.errors import DataError
from rectiformer.files import replacing
from rectiformer.measure.alignment import Links
from rectiformer.measure.bleu import score
from rectiformer.ops.variants import find_variant
from rectiformer.translate.align import alignment_table
from rectiformer.translate.documents import translate_documents
from rectiformer.translate.evaluate import EncodedPairs, evaluate
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator

FORMAT, VERSION = "rectiformer-findings", 1


@dataclass(frozen=True)
class DataCard:
    """What the model was measured on; tokens are subwords, ends included."""

    name: str
    sentences: int
    source_tokens: int
    target_tokens: int
    documents: int = 0
    """Documents the sentences were read in; 0 if each was read by itself."""
    segments: int = 0
    """Segments the documents were cut into, each read at once."""


@dataclass(frozen=True, kw_only=True)
class SiteFindings(meters.HeadSummary):
    """One attention site; lists have one value per head, in the order of heads."""

    kind: str
    layer: int
    """Counted from 0, as in all findings."""
    heads: int
    diversity: meters.Diversity


@dataclass(frozen=True, kw_only=True)
class LengthFindings(meters.LengthSummary):
    """One attention site by length of the source."""

    kind: str
    layer: int


@dataclass(frozen=True)
class AlignmentFindings:
    """How well one head, or the "average" of a layer's heads, aligns words; layers and heads count from 0."""

    layer: int
    head: int | str
    induction: str
    aer: float
    precision: float
    recall: float


@dataclass(frozen=True)
class CrossFindings:
    """Cross-attention, all heads of a layer together: one value per layer."""

    null_rate: list[float]
    mass: list[float]


@dataclass(frozen=True)
class ShuffleFindings:
    """The same targets with their own sources and with those of other pairs."""

    gold: CrossFindings
    shuffled: CrossFindings


@dataclass(frozen=True, kw_only=True)
class MemoryFindings(meters.MemorySummary):
    """One memory."""

    side: str
    layer: int


@dataclass(frozen=True, kw_only=True)
class DistanceFindings(meters.DistanceSummary):
    """The cross-attention of one layer."""

    layer: int


@dataclass(frozen=True)
class Quality:
    """BLEU of the model's own translations."""

    bleu: float
    signature: str


@dataclass(frozen=True)
class Findings:
    """Everything about one model on one test set; what could not be measured is None or missing from its list."""

    model: ModelCard
    data: DataCard
    sites: list[SiteFindings]
    by_length: list[LengthFindings]
    alignment: list[AlignmentFindings] | None
    shuffled: ShuffleFindings | None
    memories: list[MemoryFindings]
    quality: Quality | None
    distances: list[DistanceFindings] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; DataError if a number is not finite, which JSON cannot express."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self), "model": self.model.to_json()}
        if (location := find_nonfinite(content)) is not None:
            raise DataError(
                f"model {self.model.name!r} measures {location}; its weights overflow; take another checkpoint"
            )
        return content

    def write(self, path: str | Path) -> None:
        """Write a JSON file; an old one stays until the new one is complete."""
        text = json.dumps(self.to_json(), indent=1, allow_nan=False)
        with replacing(Path(path)) as file:
            file.write(f"{text}\n".encode("ascii"))


def analyze(
    translator: Translator,
    pairs: Sequence[Pair],
    *,
    gold: Sequence[Links] | None = None,
    name: str = "",
    quality: bool = True,
    progress: Callable[[int, int], None] | None = None,
    model_name: str = "",
    tokenized: bool = False,
    warn: Callable[[str], None] = warnings.warn,
) -> Findings:
    """Measure every attention, head and memory of a model on (source, target) pairs, under forced decoding.

    Args:
        gold: the right word links of each pair, for the alignment error.
        name: of the data.
        quality: whether to translate the sources too, by beam search, and score that.
        progress: told how many sentences went through the model, and of how many, after each batch of the measures.
        model_name: what to call the model, in place of its variant.
        tokenized: whether words, which `gold` counts, are what stands between spaces.
        warn: told of each attention that is left out because its variant has no weights.
    """
    survey.check_pairs(pairs, gold, tokenized)
    others = EncodedPairs(translator, survey.shuffle_sources(pairs)) if len(pairs) > 1 else None
    found = survey_model(
        translator, EncodedPairs(translator, pairs), others, progress=progress, model_name=model_name, warn=warn
    )
    weighing = any(site.kind == "cross" for site in found.sites)
    return replace(
        found,
        data=replace(found.data, name=name),
        alignment=align(translator, pairs, gold, tokenized) if gold is not None and weighing else None,
        quality=score_sentences(translator, pairs, warn) if quality else None,
    )


def analyze_documents(
    translator: Translator,
    documents: Sequence[Document],
    segments: Sequence[tuple[int, int]] | None = None,
    *,
    name: str = "",
    quality: bool = True,
    progress: Callable[[int, int], None] | None = None,
    model_name: str = "",
    warn: Callable[[str], None] = warnings.warn,
) -> Findings:
    """Measure what `analyze` does, on segments of documents, and how far cross-attention reaches in them.

    Args:
        segments: first and last, exclusive, of the sentences that are read at once, as `cut_documents` gives them; as
            the model was trained unless given.
        name, progress, model_name, warn: as in `analyze`; progress counts segments.
        quality: whether to translate the documents too, and score that sentence by sentence.
    """
    if not any(documents):
        raise DataError("0 sentence pairs; there is nothing to analyze")
    parts = two_sides(take(documents, cut_documents([translator], documents) if segments is None else segments))
    joined = JoinedPairs(translator, parts)
    others = JoinedPairs(translator, survey.shuffle_sources(parts)) if len(parts) > 1 else None
    found = survey_model(translator, joined, others, progress=progress, model_name=model_name, warn=warn)
    sentences = sum(map(len, documents))
    return replace(
        found,
        data=replace(found.data, name=name, sentences=sentences, documents=len(documents), segments=len(parts)),
        quality=score_documents(translator, documents, warn) if quality else None,
    )


def survey_model(
    translator: Translator,
    own: EncodedPairs,
    others: EncodedPairs | None,
    *,
    progress: Callable[[int, int], None] | None,
    model_name: str,
    warn: Callable[[str], None],
) -> Findings:
    """Run all meters; alignment and quality stay None.

    Args:
        own, others: targets with their sources, and, where there are any, with those of other pairs.
    """
    model = translator.model
    for kind in SITES:
        if not find_variant(model.config.variant_at(kind)).has_weights:
            warn(f"{kind} attention is {model.config.variant_at(kind)!r}, which has no weights; it is left out")
    documents, edges = own if isinstance(own, JoinedPairs) else None, meters.length_edges(own.source_lengths + 1)
    sites = [SiteObserver(site, edges, documents) for site in survey.weighing_sites(model)]
    memories = [MemoryObserver(*each) for each in survey.memory_layers(model)]
    cross = [each for each in sites if each.site.kind == "cross"]
    shuffled = [HeadObserver(each.site) for each in cross] if others is not None else []
    done, total = 0, own.pairs * (2 if shuffled else 1)

    def advance(sentences: int) -> None:
        nonlocal done
        done += sentences
        if progress is not None:
            progress(done, total)

    survey.run_survey([*sites, *memories], translator, own, advance)
    if shuffled and others is not None:
        survey.run_survey(shuffled, translator, others, advance)
    return Findings(
        model=model_card(model, model_name),
        data=DataCard("", own.pairs, int((own.source_lengths + 1).sum()), int((own.target_lengths + 1).sum())),
        sites=[describe_site(each) for each in sites],
        by_length=[
            LengthFindings(kind=each.site.kind, layer=each.site.layer, **vars(each.lengths.result())) for each in sites
        ],
        alignment=None,
        shuffled=ShuffleFindings(describe_cross(cross), describe_cross(shuffled)) if shuffled else None,
        memories=[MemoryFindings(side=each.side, layer=each.index, **vars(each.memory.result())) for each in memories],
        quality=None,
        distances=[DistanceFindings(layer=each.site.layer, **vars(each.distances.result())) for each in cross]
        if documents is not None
        else None,
    )


def describe_site(observer: SiteObserver) -> SiteFindings:
    site = observer.site
    return SiteFindings(
        kind=site.kind, layer=site.layer, heads=site.attention.num_heads, diversity=observer.diversity.result(),
        **vars(observer.heads.result()),
    )  # fmt: skip


def describe_cross(observers: Sequence[HeadObserver]) -> CrossFindings:
    layers = [each.heads.pooled().result() for each in observers]
    return CrossFindings([layer.null_rate[0] for layer in layers], [layer.mass[0] for layer in layers])


def align(
    translator: Translator, pairs: Sequence[Pair], gold: Sequence[Links], tokenized: bool
) -> list[AlignmentFindings]:
    """The alignment error of every layer, head (and the average of the heads) and induction."""
    return [
        AlignmentFindings(row.layer, row.head, row.induction, row.score.aer, row.score.precision, row.score.recall)
        for row in alignment_table(translator, pairs, gold, tokenized=tokenized)
    ]


def score_sentences(translator: Translator, pairs: Sequence[Pair], warn: Callable[[str], None]) -> Quality:
    """BLEU of beam search."""
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    bleu = evaluate(translator, sources, targets, SearchOptions(), ("bleu",), warn=warn).scores["bleu"]
    return Quality(bleu.value, bleu.signature)


def score_documents(translator: Translator, documents: Sequence[Document], warn: Callable[[str], None]) -> Quality:
    """BLEU over the sentences of documents translated as a whole; `warn` is told once about all fallbacks."""
    sources, targets = zip(*two_sides(documents), strict=True)
    found = list(translate_documents(translator, sources, SearchOptions(), warn=lambda _: None))
    if fallbacks := sum(each.fallbacks for each in found):
        segments = sum(each.segments for each in found)
        warn(
            f"for BLEU, {fallbacks:,} of {segments:,} segments did not come back sentence by sentence, and were "
            "translated in smaller ones"
        )
    lines = [text for each in found for text in each.sentences]
    bleu = score(lines, list(chain.from_iterable(targets)), ("bleu",))["bleu"]
    return Quality(bleu.value, bleu.signature)


def find_nonfinite(value: Any, where: str = "") -> str | None:
    """The path and value of the first NaN or infinity in a JSON value; None if all numbers are finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{where.lstrip('.')} = {value}"
    parts: list[tuple[Any, str]] = []
    if isinstance(value, dict):
        parts = [(part, f"{where}.{name}") for name, part in value.items()]
    elif isinstance(value, list):
        parts = [(part, f"{where}[{index}]") for index, part in enumerate(value)]
    return next((found for part, inside in parts if (found := find_nonfinite(part, inside)) is not None), None)
