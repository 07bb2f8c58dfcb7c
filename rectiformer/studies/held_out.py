"""The test sets of each scale: of the built-in grammar, of single sentences, of documents."""

from __future__ import annotations

from pathlib import Path

from rectiformer.config import DataConfig
from rectiformer.errors import DataError
from rectiformer.studies.plan import Scale
from rectiformer.text.corpus import Counts, read_pairs, read_two_files
from rectiformer.text.grammar import draw_documents, draw_sentences

Pair = tuple[str, str]
SENTENCE_TESTS = {"small": ("test_2016_flickr.de", "test_2016_flickr.en"), "paper": ("test.de", "test.en")}
DOCUMENT_TESTS = {"small": ("test.en.xz", "test.de.xz"), "paper": ("test.en", "test.de")}
SMOKE_TESTS, SMOKE_DOCUMENTS, TEST_SEED = 100, 6, 7


def held_out(scale: Scale) -> list[Pair]:
    """The test set of the studies on single sentences."""
    if scale.data is None:
        return [(pair.source, pair.target) for pair in draw_sentences(SMOKE_TESTS, TEST_SEED, "test")]
    source, target = (str(scale.data / name) for name in SENTENCE_TESTS[scale.name])
    return [(left or "", right or "") for left, right, _ in read_two_files(source, target, DataConfig())]


def held_out_documents(scale: Scale) -> list[list[Pair]]:
    """The test set of the studies on documents."""
    if scale.data is None:
        drawn = draw_documents(SMOKE_DOCUMENTS, TEST_SEED, "test")
        return [[(pair.source, pair.target) for pair in document] for document in drawn]
    names = tuple(str(scale.data / name) for name in DOCUMENT_TESTS[scale.name])
    config = DataConfig(valid_source=(names[0],), valid_target=(names[1],), documents="marker")
    found: list[list[Pair]] = []
    for pair in read_pairs(config, "valid", Counts()):
        if pair.document_start:
            found.append([])
        found[-1].append((pair.source, pair.target))
    return found


def require_folder(scale: Scale) -> None:
    """DataError where the corpus of a scale is not there."""
    if scale.data is not None and not Path(scale.data).is_dir():
        raise DataError(f"--scale {scale.name} reads its text in {scale.data}, which is no folder; name it with --data")
