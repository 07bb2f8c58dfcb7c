"""Pages of keys and the balls that hold them: what proves that a whole page weighs nothing under a ReLU.

For keys within `radius` of `center`, no score q.k is above q.center + |q| radius. Where that is at most 0, decoding
need not read the page at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rectiformer.errors import ArgumentError, ShapeError

SMALLEST_PAGE = 64
"""Most keys that a kernel holds at once: whatever is skipped, the rest is added up in the same order."""


@dataclass(frozen=True)
class PageBounds:
    """A ball around the keys of each whole page, in float32."""

    centers: Tensor  # [rows, K, pages, D]
    radii: Tensor  # [rows, K, pages]
    page: int


@dataclass(frozen=True)
class PageReport:
    """Pages counted once for every row and key head: all that are whole, those proven zero, those truly zero."""

    pages: int
    proven: int
    empty: int


def page_bounds(keys: Tensor, page: int = 64) -> PageBounds:
    """Balls around every `page` keys of [rows, K, room, D]; a last page that is not whole has none.

    A radius is wider than the ball by more than what rounding can add to a score or to a bound, so that a page is
    proven zero only if each computed score is. Pages that hold NaN, such as room not yet written, are never proven.
    """
    if page < SMALLEST_PAGE or page & (page - 1):
        raise ArgumentError(f"page = {page}, but a page holds a power of two of keys, at least {SMALLEST_PAGE}")
    pages, D = keys.shape[2] // page, keys.shape[3]
    held = keys[:, :, : pages * page].unflatten(2, (pages, page)).double()  # [rows, K, pages, page, D]
    centers = held.mean(3).float()
    spread = torch.linalg.vector_norm(held - centers.double()[:, :, :, None], dim=-1).amax(-1)
    longest = torch.linalg.vector_norm(held, dim=-1).amax(-1)
    # A sum of D products errs by less than D roundings of |q||k|; the bound's own sum by as much of |q||center|.
    slack = 4 * (D + 4) * torch.finfo(torch.float32).eps * (longest + spread)
    return PageBounds(centers.contiguous(), (spread + slack).float().contiguous(), page)


def check_bounds(bounds: PageBounds, keys: Tensor) -> None:
    """Refuse bounds that are not of these keys' shape."""
    needed = [*keys.shape[:2], keys.shape[2] // bounds.page]
    if list(bounds.radii.shape) != needed:
        raise ShapeError(f"bounds are of {list(bounds.radii.shape)} pages, but keys {list(keys.shape)} need {needed}")


def page_report(q: Tensor, keys: Tensor, bounds: PageBounds, lengths: Tensor) -> PageReport:
    """How many whole pages of `lengths` [R or 1] keys are proven zero, and are zero, for queries [R, H, Q, D].

    A page counts as zero where no query of any head that reads it has a score above 0.
    """
    check_bounds(bounds, keys)
    (R, K, pages), page = bounds.radii.shape, bounds.page
    rows = q.float().unflatten(1, (K, -1)).flatten(2, 3)  # [R, K, queries, D]
    whole = torch.arange(1, pages + 1, device=q.device) * page <= lengths[:, None]  # [R or 1, pages]
    whole = whole[:, None].expand(R, K, pages)
    limit = rows @ bounds.centers.mT + rows.norm(dim=-1, keepdim=True) * bounds.radii[:, :, None]
    proven = (limit <= 0).all(2) & whole
    scores = rows @ keys[:, :, : pages * page].float().mT  # [R, K, queries, keys]
    empty = (scores <= 0).unflatten(3, (pages, page)).all(4).all(2) & whole
    return PageReport(int(whole.sum()), int(proven.sum()), int(empty.sum()))
