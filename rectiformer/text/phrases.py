"""Words with links, and the phrases of the built-in grammar, written in German and English at once.

Every word carries keys; two words of the two languages that share one translate each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rectiformer.text.inflection import (
    ARTICLES,
    MERGED,
    Pronoun,
    adjective_form,
    determiner_form,
    indefinite_article,
    noun_form,
)
from rectiformer.text.lexicon import Adjective, Determiner, Noun, Preposition


class Word(NamedTuple):
    """A word, the keys of its sure links, and the keys of its possible ones."""

    text: str
    keys: tuple[int, ...] = ()
    maybe: tuple[int, ...] = ()


Words = list[Word]
COMMA = Word(",")
LINKED_COMMA = Word(",", (-1,))

# Keys inside a noun phrase, counted from its own.
ADJECTIVE, NOUN = 1, 2


@dataclass(frozen=True)
class NounPhrase:
    """A noun with what stands around it; a name where there is no determiner."""

    key: int
    noun: Noun
    determiner: Determiner | None = None
    plural: bool = False
    adjective: Adjective | None = None
    relative: tuple[Sequence[Word], Sequence[Word]] = ((), ())  # a clause about it, in both languages

    reflexive = "sich"

    @property
    def number(self) -> int:
        """Which verb form agrees with it: that of er or that of wir."""
        return 2 if self.plural else 1

    @property
    def gender(self) -> str:
        """Gender as far as endings show it: "p" in the plural."""
        return "p" if self.plural else self.noun.gender

    def german(self, case: str) -> Words:
        """The German words in `case`."""
        words = [Word(noun_form(self.noun, case, self.plural), (self.key + NOUN,))]
        if self.determiner is None:
            return words
        if self.adjective is not None:
            form = adjective_form(self.adjective, self.determiner.kind, case, self.gender)
            words.insert(0, Word(form, (self.key + ADJECTIVE,)))
        words.insert(0, Word(determiner_form(self.determiner, case, self.gender), (self.key,)))
        return [*words, COMMA, *self.relative[0], COMMA] if self.relative[0] else words

    def english(self, subject: bool = False) -> Words:
        """The English words, the same in every case."""
        nouns = (self.noun.english_plural if self.plural else self.noun.english).split()
        words = [Word(noun, (self.key + NOUN,)) for noun in nouns]
        if self.determiner is None:
            return words
        if self.adjective is not None:
            words.insert(0, Word(self.adjective.english, (self.key + ADJECTIVE,)))
        article = self.determiner.english_plural if self.plural else self.determiner.english
        if article == "a":
            article = indefinite_article(words[0].text)
        return [Word(article, (self.key,)), *words, *self.relative[1]]


@dataclass(frozen=True)
class PronounPhrase:
    """A personal pronoun in a sentence."""

    key: int
    pronoun: Pronoun

    @property
    def number(self) -> int:
        """Which verb form agrees with it."""
        return self.pronoun.number

    @property
    def reflexive(self) -> str:
        """Its reflexive pronoun."""
        return self.pronoun.reflexive

    def german(self, case: str) -> Words:
        """The German pronoun in `case`."""
        return [Word(getattr(self.pronoun, case), (self.key,))]

    def english(self, subject: bool = False) -> Words:
        """The English pronoun as subject or object."""
        return [Word(self.pronoun.subject if subject else self.pronoun.object, (self.key,))]


@dataclass(frozen=True)
class RelativePhrase:
    """The pronoun that opens a relative clause about `head`."""

    key: int
    head: NounPhrase

    reflexive = "sich"

    @property
    def number(self) -> int:
        """Which verb form agrees with it: that of its head."""
        return self.head.number

    def german(self, case: str) -> Words:
        """The relative pronoun in `case`, nominative or accusative."""
        return [Word(ARTICLES[case][self.head.gender], (self.key,))]

    def english(self, subject: bool = False) -> Words:
        """Who of persons that act, otherwise that."""
        return [Word("who" if subject and self.head.noun.kind == "person" else "that", (self.key,))]


Phrase = NounPhrase | PronounPhrase | RelativePhrase


@dataclass(frozen=True)
class Location:
    """A preposition with a noun phrase; "in dem" is written "im"."""

    key: int
    preposition: Preposition
    phrase: NounPhrase

    def german(self) -> Words:
        """The German words, preposition and article merged where they can be."""
        first, *rest = self.phrase.german(self.preposition.case)
        merged = MERGED.get((self.preposition.german, first.text))
        if merged is not None:
            return [Word(merged, (self.key,), first.keys), *rest]
        return [Word(self.preposition.german, (self.key,)), first, *rest]

    def english(self) -> Words:
        """The English words, of which the preposition may be three."""
        return [Word(text, (self.key,)) for text in self.preposition.english.split()] + self.phrase.english()
