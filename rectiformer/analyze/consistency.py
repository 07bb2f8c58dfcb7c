"""Whether the parts of an example fit together: links and words inside the sentence, sparse rows that are such."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rectiformer.errors import DataError
from rectiformer.measure.alignment import check_links

if TYPE_CHECKING:
    from rectiformer.analyze.record import Example, Side, SiteRecord


def check_example(example: Example, where: str) -> None:
    """DataError, beginning with `where`, if something in `example` points to what is not there."""
    source, target = example.source, example.target
    check_side(source, f"{where}.source")
    if target is not None:
        check_side(target, f"{where}.target")
    if example.gold is not None:
        check_links(example.gold, len(source.words), 0 if target is None else len(target.words), f"{where}.gold")
    pieces = {"source": len(source.pieces), "target": None if target is None else len(target.pieces)}
    for index, site in enumerate(example.sites):
        place = f"{where}.sites[{index}]"
        own = pieces["source" if site.kind == "encoder" else "target"]
        axes = (own, pieces["source"] if site.kind == "cross" else own)
        if (site.queries, site.keys) != axes:
            raise DataError(
                f"{place}: {site.kind} layer {site.layer} has {site.queries} queries and {site.keys} keys, but the "
                f"example has {pieces['source']} source and {pieces['target'] or 'no'} target pieces"
            )
        check_rows(site, place)


def check_side(side: Side, where: str) -> None:
    for index, piece in enumerate(side.pieces):
        if not 0 <= piece.start <= piece.stop <= len(side.text):
            raise DataError(
                f"{where}.pieces[{index}] covers characters {piece.start} to {piece.stop} of a text of {len(side.text)}"
            )
    for index, (first, last, start, stop) in enumerate(side.words):
        if not (0 <= first <= last <= len(side.pieces) and 0 <= start <= stop <= len(side.text)):
            raise DataError(
                f"{where}.words[{index}] has pieces {first} to {last} of {len(side.pieces)} and characters {start} to "
                f"{stop} of {len(side.text)}"
            )
    for index, (first, last) in enumerate(side.sentences):
        before = side.sentences[index - 1][1] if index else 0
        if not before <= first <= last <= len(side.pieces):
            raise DataError(
                f"{where}.sentences[{index}] has pieces {first} to {last}, but they must rise from {before} to at most "
                f"{len(side.pieces)}"
            )


def check_rows(site: SiteRecord, where: str) -> None:
    """DataError unless the arrays of a site are compressed sparse rows, and say so of themselves."""
    rows, nonzeros = site.heads * site.queries, len(site.columns)
    sizes = {"row_starts": rows + 1, "weights": nonzeros, "mass": rows, "null": rows, "visible": rows}
    for name, size in sizes.items():
        if len(getattr(site, name)) != size:
            raise DataError(f"{where}.{name} has {len(getattr(site, name))} numbers, but it needs {size}")
    starts = site.row_starts.astype(np.int64)
    counts = np.diff(starts)
    if starts[0] != 0 or starts[-1] != nonzeros or (counts < 0).any():
        raise DataError(f"{where}.row_starts does not rise from 0 to {nonzeros}, the number of columns")
    if nonzeros and site.columns.max() >= site.keys:
        raise DataError(f"{where}.columns has {site.columns.max()}, but there are {site.keys} keys, counted from 0")
    within = np.ones(max(0, nonzeros - 1), dtype=bool)
    within[starts[(starts > 0) & (starts < nonzeros)] - 1] = False  # from the last of a row to the first of the next
    if (within & (site.columns[1:] <= site.columns[:-1])).any():
        raise DataError(f"{where}.columns does not rise within a row")
    if not np.isfinite(site.weights).all() or (site.weights == 0).any():
        raise DataError(f"{where}.weights has a 0, NaN or infinity; only finite weights other than 0 are stored")
    if (counts > site.visible).any() or (site.visible > site.keys).any():
        raise DataError(f"{where}.visible does not lie between a row's weights and the {site.keys} keys")
    if (site.null != ((counts == 0) & (site.visible > 0))).any():
        raise DataError(f"{where}.null does not mark exactly the rows that see keys and weigh none")
