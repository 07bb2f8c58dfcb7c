"""Sentences of the built-in corpus, written out by hand: their German, their English and their links."""

from itertools import chain

import pytest

from rectiformer.text.grammar import lexicon
from rectiformer.text.grammar.clauses import (
    COMMA,
    LINKED_COMMA,
    Clause,
    Location,
    NounPhrase,
    PronounPhrase,
    Word,
    pair_words,
)
from rectiformer.text.grammar.lexicon import FIRST, FIRST_PLURAL, HE, MODALS, SHE

# Parts to build examples from. Keys only have to differ.


def noun(german):
    return next(row for row in chain(lexicon.NOUNS, lexicon.NAMES) if row.german == german)


def verb(participle):
    return next(row for row in lexicon.VERBS if row.participle == participle)


def time(german):
    return next(row for row in lexicon.ADVERBIALS if row.german == german)


def adjective(german):
    return next(row for row in lexicon.ADJECTIVES if row.german == german)


def modal(english):
    return next(row for row in MODALS if row.english == english)


def the(german, key, **more):
    return NounPhrase(key, noun(german), lexicon.THE, **more)


def one(german, key, **more):
    return NounPhrase(key, noun(german), lexicon.A, **more)


def said(pronoun, key=100):
    return PronounPhrase(key, pronoun)


def statement(front="subject", **parts):
    clause = Clause(10, **parts)
    return pair_words(clause.german("second", front), clause.english(early=front == "adverbial"))


def question():
    clause = Clause(10, the("Mann", 20), verb("gesehen"), "present", direct=the("Hund", 30), particle="denn")
    opening = Word("warum", (1,)), Word("why", (1,))
    source = [opening[0], *clause.german("first")]
    return pair_words(source, [opening[1], *clause.english(inverted=True, past=True)], "?")


def command():
    clause = Clause(
        10, said(FIRST), verb("aufgemacht"), "imperative", direct=the("Tür", 30), negated=True, particle="bitte"
    )
    return pair_words(clause.german("first"), clause.english(), "!")


def reason():
    main = Clause(10, the("Hund", 20), verb("geschlafen"))
    tired = Clause(40, said(SHE, 50), verb("angerufen"), direct=the("Mann", 60))
    return pair_words(
        [*main.german(), COMMA, Word("weil", (1,)), *tired.german("last")],
        [*main.english(), Word("because", (1,)), *tired.english()],
    )


def occasion():
    first = Clause(10, the("Frau", 20), verb("gesungen"), "perfect")
    main = Clause(40, said(SHE, 50), predicate=adjective("müde"))
    return pair_words(
        [Word("obwohl", (1,)), *first.german("last"), LINKED_COMMA, *main.german("first")],
        [Word("although", (1,)), *first.english(), LINKED_COMMA, *main.english()],
    )


def relative():
    head = the("Hund", 20)
    pronoun = PronounPhrase(30, lexicon.relative_pronoun(head.number, head.gender, person=False))
    clause = Clause(40, the("Frau", 50), verb("gesehen"))
    words = [*pronoun.german("acc"), *clause.german("last")], [*pronoun.english(), *clause.english()]
    return statement(subject=the("Hund", 20, relative=words), verb=verb("geschlafen"))


EXAMPLES = [  # pair, German, English, sure links, possible links
    (
        statement(
            subject=the("Mann", 20, adjective=adjective("alt")),
            verb=verb("gekauft"),
            direct=one("Apfel", 30, adjective=adjective("rot")),
        ),
        "Der alte Mann kauft einen roten Apfel.",
        "The old man buys a red apple.",
        "0-0 1-1 2-2 3-3 4-4 5-5 6-6 7-7",
        "",
    ),
    (
        statement(subject=said(FIRST_PLURAL), verb=verb("angerufen"), direct=the("Frau", 30)),
        "Wir rufen die Frau an.",
        "We call the woman.",
        "0-0 1-1 2-2 3-3 5-4",
        "4-1",
    ),
    (
        statement(subject=said(HE), verb=verb("abgeholt"), direct=the("Junge", 30)),
        "Er holt den Jungen ab.",
        "He picks up the boy.",
        "0-0 1-1 4-2 2-3 3-4 5-5",
        "",
    ),
    (
        statement(subject=said(FIRST_PLURAL), verb=verb("abgeholt"), direct=said(HE, 30)),
        "Wir holen ihn ab.",
        "We pick him up.",
        "0-0 1-1 2-2 3-3 4-4",
        "",
    ),
    (
        statement(
            "adverbial",
            subject=the("Frau", 20),
            verb=verb("gesehen"),
            mode="perfect",
            direct=the("Hund", 30),
            adverbial=time("gestern"),
        ),
        "Gestern hat die Frau den Hund gesehen.",
        "Yesterday the woman saw the dog.",
        "0-0 2-1 3-2 6-3 4-4 5-5 7-6",
        "1-3",
    ),
    (
        statement(subject=the("Katze", 20), verb=verb("angekommen"), mode="perfect", adverbial=time("vor zwei Tagen")),
        "Die Katze ist vor zwei Tagen angekommen.",
        "The cat arrived two days ago.",
        "0-0 1-1 6-2 4-3 5-4 3-5 7-6",
        "2-2",
    ),
    (
        statement("direct", subject=the("Frau", 20), verb=verb("gesehen"), direct=the("Hund", 30), negated=True),
        "Den Hund sieht die Frau nicht.",
        "The woman does not see the dog.",
        "3-0 4-1 5-3 2-4 0-5 1-6 6-7",
        "",
    ),
    (
        statement(
            subject=said(HE),
            verb=verb("gesehen"),
            mode="modal",
            modal=modal("can"),
            direct=said(FIRST, 30),
            negated=True,
        ),
        "Er kann mich nicht sehen.",
        "He cannot see me.",
        "0-0 2-3 1-1 3-1 4-2 5-4",
        "",
    ),
    (
        statement(subject=the("Mann", 20), verb=verb("getanzt"), mode="modal", modal=modal("want to")),
        "Der Mann will tanzen.",
        "The man wants to dance.",
        "0-0 1-1 2-2 3-4 4-5",
        "2-3",
    ),
    (
        statement(
            "location",
            subject=the("Ball", 20),
            verb=verb("gelegen"),
            location=Location(30, lexicon.LOCATIONS["in"], the("Garten", 40, adjective=adjective("klein"))),
        ),
        "Im kleinen Garten liegt der Ball.",
        "The ball lies in the small garden.",
        "4-0 5-1 3-2 0-3 1-5 2-6 6-7",
        "0-4",
    ),
    (
        statement(subject=the("Haustür", 20), predicate=adjective("alt"), particle="ja"),
        "Die Haustür ist ja alt.",
        "The house door is old.",
        "0-0 1-1 1-2 2-3 4-4 5-5",
        "",
    ),
    (
        statement(subject=the("Mann", 20), verb=verb("gesetzt"), particle="doch"),
        "Der Mann setzt sich doch.",
        "The man sits down.",
        "0-0 1-1 2-2 2-3 5-4",
        "",
    ),
    (
        statement(subject=the("Frau", 20), verb=verb("gegeben"), direct=one("Ei", 30), indirect=the("Nachbar", 40)),
        "Die Frau gibt dem Nachbarn ein Ei.",
        "The woman gives an egg to the neighbor.",
        "0-0 1-1 2-2 5-3 6-4 3-6 4-7 7-8",
        "3-5",
    ),
    (
        statement(
            subject=the("Brief", 20, plural=True),
            verb=verb("gelesen"),
            mode="passive",
            location=Location(30, lexicon.BY, the("Bruder", 40)),
        ),
        "Die Briefe werden vom Bruder gelesen.",
        "The letters are read by the brother.",
        "0-0 1-1 2-2 5-3 3-4 4-6 6-7",
        "3-5",
    ),
    (
        question(),
        "Warum sieht der Mann denn den Hund?",
        "Why does the man see the dog?",
        "0-0 2-2 3-3 1-4 5-5 6-6 7-7",
        "",
    ),
    (
        command(),
        "Mach bitte die Tür nicht auf!",
        "Please do not open the door!",
        "1-0 4-2 0-3 2-4 3-5 6-6",
        "5-3",
    ),
    (
        reason(),
        "Der Hund schläft, weil sie den Mann anruft.",
        "The dog sleeps because she calls the man.",
        "0-0 1-1 2-2 4-3 5-4 8-5 6-6 7-7 9-8",
        "",
    ),
    (
        occasion(),
        "Obwohl die Frau gesungen hat, ist sie müde.",
        "Although the woman has sung, she is tired.",
        "0-0 1-1 2-2 4-3 3-4 5-5 7-6 6-7 8-8 9-9",
        "",
    ),
    (
        relative(),
        "Der Hund, den die Frau sieht, schläft.",
        "The dog that the woman sees sleeps.",
        "0-0 1-1 3-2 4-3 5-4 6-5 8-6 9-7",
        "",
    ),
]


def parse(links):
    return {tuple(map(int, link.split("-"))) for link in links.split()}


@pytest.mark.parametrize(("pair", "german", "english", "sure", "possible"), EXAMPLES, ids=[row[1] for row in EXAMPLES])
def test_examples_are_translated_and_linked(pair, german, english, sure, possible):
    assert (pair.source, pair.target) == (german, english)
    assert pair.sure == parse(sure)
    assert pair.possible == parse(possible)
