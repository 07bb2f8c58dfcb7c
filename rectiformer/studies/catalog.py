"""THE table of studies. Commands, documents and tests read it."""

from __future__ import annotations

from rectiformer.errors import ArgumentError, unknown_name
from rectiformer.studies.documents import DOCUMENT_LENGTH
from rectiformer.studies.memory import MEMORY_DIAGNOSTICS, MEMORY_SWAP, SLOT_SWEEP
from rectiformer.studies.plan import Study
from rectiformer.studies.search import RELUFORMER_SEARCH

STUDIES: dict[str, Study] = {
    study.name: study for study in (MEMORY_SWAP, SLOT_SWEEP, MEMORY_DIAGNOSTICS, DOCUMENT_LENGTH, RELUFORMER_SEARCH)
}


def find_study(name: str) -> Study:
    """The study of this name; ArgumentError, with the nearest names, where there is none."""
    if name not in STUDIES:
        raise ArgumentError(unknown_name("study", name, STUDIES))
    return STUDIES[name]
