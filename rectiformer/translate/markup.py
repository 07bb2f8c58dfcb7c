"""Inline markup: tags are taken out of a line, and put into its translation where the word links say.

What comes out is well formed, with every tag of the line once, whatever the line and the links are:

- A tag that has no partner in its line, such as a lone `<b>`, is text: it is written with `&lt;` and `&gt;`, at the
  place where a tag would be, and no model sees it. A `<` that begins no tag is text like any other.
- Entities are read as characters. Of the translation's own characters `&`, `<` and `>` are written as entities.
- A tag inside a word is about the whole word.

translate/placement.py says where tags are put.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from html.entities import html5

# No `<` inside of a comment or of the value of an attribute, so that nothing is read twice, however hostile a line is.
TAG = re.compile(
    "<!--(?:[^<-]|-(?!->))*+-->"
    r"""|<(?P<close>/)?(?P<name>[A-Za-z_][\w:.-]*+)(?:\s(?:[^<>"'/]|/(?!>)|"[^"<]*+"|'[^'<]*+')*+)?(?P<alone>/)?>"""
)
ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9A-Fa-f]{1,6}|[A-Za-z][A-Za-z0-9]{0,31});")
VOID = frozenset(["area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"])
"""Elements of HTML that never have a closing tag."""


@dataclass(eq=False)
class Element:
    """A pair of tags, a tag by itself, a tag that counts as text, or the whole line, which is the root."""

    index: int
    """Elements are numbered as they begin; the root is 0."""
    opening: str
    start: int
    """Of the text without tags: the character before which it begins."""
    follows: bool = False
    """Whether something other than a space is right before it."""
    parent: Element | None = None
    closing: str = ""
    last: int = 0
    """The index of the last element inside of it, or its own."""
    children: list[Element] = field(default_factory=list)

    def holds(self, other: Element) -> bool:
        """Whether the other one is inside of it, or it itself."""
        return self.index <= other.index <= self.last


@dataclass(frozen=True)
class MarkedText:
    """A line without its tags, and what they were."""

    text: str
    elements: list[Element]
    """The root, then the others as they begin."""
    pieces: list[tuple[int, int, Element]]
    """Stretches of the text, and the innermost element that each is in."""
    unpaired: list[str]
    """Tags without a partner, which count as text."""


def read_markup(line: str) -> MarkedText:
    """The tags of a line, and what is left without them."""
    found = list(TAG.finditer(line))
    roles = [find_role(tag) for tag in found]
    pair_tags(found, roles)
    inside = Element(0, "", 0)
    elements, pieces, parts = [inside], [], [""]
    length, position, breaks = 0, 0, False
    for tag, role in [*zip(found, roles, strict=True), (None, "end")]:
        piece = ENTITY.sub(read_entity, line[position : tag.start() if tag else len(line)])
        if piece:
            if breaks and piece[0].isalnum():  # the tag was all there was between two words
                parts.append(" ")
                length += 1
            parts.append(piece)
            pieces.append((length, length + len(piece), inside))
            length, breaks = length + len(piece), False
        if tag is None:
            break
        position = tag.end()
        if role == "close":
            inside.closing, inside.last = tag[0], len(elements) - 1
            assert inside.parent is not None
            inside = inside.parent
            continue
        follows = not (parts[-1][-1:] or " ").isspace()
        opening = escape(tag[0]) if role == "text" else tag[0]
        element = Element(len(elements), opening, length, follows, inside, last=len(elements))
        elements.append(element)
        inside.children.append(element)
        if role == "open":
            inside = element
        else:
            breaks = breaks or (tag["name"] not in (None, "wbr") and parts[-1][-1:].isalnum())
    inside.last = len(elements) - 1
    unpaired = [tag[0] for tag, role in zip(found, roles, strict=True) if role == "text"]
    return MarkedText("".join(parts), elements, pieces, unpaired)


def find_role(tag: re.Match[str]) -> str:
    if tag["close"]:
        return "close"
    return "alone" if tag["name"] is None or tag["alone"] or tag["name"].lower() in VOID else "open"


def pair_tags(found: Sequence[re.Match[str]], roles: list[str]) -> None:
    """Make "text" of the roles of tags that open or close nothing; tags that cross others have no partner."""
    waiting: list[int] = []
    names: Counter[str] = Counter()
    for number, tag in enumerate(found):
        name = tag["name"]
        if roles[number] == "open":
            waiting.append(number)
            names[name] += 1
        elif roles[number] == "close" and (not names[name] or tag["alone"]):
            roles[number] = "text"
        elif roles[number] == "close":
            while (opened := found[waiting[-1]]["name"]) != name:
                roles[waiting.pop()] = "text"
                names[opened] -= 1
            waiting.pop()
            names[name] -= 1
    for number in waiting:
        roles[number] = "text"


def read_entity(found: re.Match[str]) -> str:
    name = found[0][1:]
    return html.unescape(found[0]) if name[0] == "#" or name in html5 else found[0]


def escape(text: str) -> str:
    """The text with entities for what would be markup."""
    return html.escape(text, quote=False)
