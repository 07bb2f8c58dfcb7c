"""What a run's text is like: its languages and some of its validation pairs."""

import re
from itertools import islice
from pathlib import Path

from rectiformer.config import DataConfig
from rectiformer.errors import RectiformerError
from rectiformer.text.corpus import Counts, files_of, read_pairs

BUILT_IN = ("de", "en")
"""The languages of the built-in grammar."""
READ = 300
"""Validation pairs that are read to choose from."""
LONGEST = 160
"""Most characters of a side that is easily taken in."""
CODE = r"[a-z]{2,3}(?:[-_][A-Za-z]{2,4})?"
PACKED = re.compile(r"[.](?:gz|xz|bz2|zst)$")
ONE_SIDE = re.compile(rf"[.]({CODE})(?:[.]txt)?$")


def languages(config: DataConfig) -> tuple[str, str]:
    """Codes of source and target language, such as "de" from train.de.xz; empty where file names do not tell."""
    if not (config.source or config.stream or config.valid_source):
        return BUILT_IN
    sources, targets = files_of(config, "train" if config.source else "valid")
    return code_of(sources[:1]), code_of(targets[:1])


def code_of(files: tuple[str, ...]) -> str:
    found = ONE_SIDE.search(PACKED.sub("", Path(files[0]).name)) if files else None
    return "" if found is None or found[1] in ("txt", "tsv", "csv") else found[1]


def sample_pairs(config: DataConfig, count: int) -> list[tuple[str, str]]:
    """Validation pairs of different length, the shortest first; none where the files are not there any more."""
    sources, targets = files_of(config, "valid")
    if not all(Path(file).is_file() for file in (*sources, *targets)):
        return []
    try:
        pairs = [(pair.source, pair.target) for pair in islice(read_pairs(config, "valid", Counts()), READ)]
    except RectiformerError:
        return []
    fit = sorted({pair for pair in pairs if max(map(len, pair)) <= LONGEST}, key=lambda pair: (len(pair[0]), pair))
    return fit[:: max(1, len(fit) // count)][:count] if count else []
