"""The table of studies, which commands, documents and tests read."""

from rectiformer.errors import ArgumentError, unknown_name
from rectiformer.studies.ablations import ABLATIONS
from rectiformer.studies.alignment import ALIGNMENT
from rectiformer.studies.document_length import DOCUMENT_LENGTH
from rectiformer.studies.efficiency import EFFICIENCY
from rectiformer.studies.learning_rate import LEARNING_RATE
from rectiformer.studies.learning_speed import LEARNING_SPEED
from rectiformer.studies.memories import MEMORY_DIAGNOSTICS, MEMORY_SWAP, SLOT_SWEEP
from rectiformer.studies.plan import Study
from rectiformer.studies.reluformer_search import RELUFORMER_SEARCH
from rectiformer.studies.sparsity import SKIPPING, SPARSITY
from rectiformer.studies.translation_quality import TRANSLATION_QUALITY
from rectiformer.studies.variant_search import VARIANT_SEARCH

ORDER = (
    TRANSLATION_QUALITY, LEARNING_RATE, LEARNING_SPEED, ALIGNMENT, SPARSITY, ABLATIONS, RELUFORMER_SEARCH,
    DOCUMENT_LENGTH, SKIPPING, MEMORY_SWAP, SLOT_SWEEP, MEMORY_DIAGNOSTICS, EFFICIENCY, VARIANT_SEARCH,
)  # fmt: skip
STUDIES: dict[str, Study] = {study.name: study for study in ORDER}
"""In the order of the report; a study that shows another one's results comes after it."""


def find_study(name: str) -> Study:
    """The study of this name; ArgumentError with the nearest name where there is none."""
    if name not in STUDIES:
        raise ArgumentError(unknown_name("study", name, STUDIES))
    return STUDIES[name]
