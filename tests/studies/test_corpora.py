"""Text in the form of a gold alignment, and the gold alignments themselves."""

import lzma

import pytest

from rectiformer.measure.alignment import Links
from rectiformer.studies.corpora import CORPORA, Gold, gold_pairs, held_out_pairs, in_form, rewrite
from rectiformer.studies.plan import Scale, configure


@pytest.mark.parametrize(
    ("form", "language", "line", "words"),
    [
        ("words", "de", "Herr Präsident! Der EU-Haushalt, 3,5 %.", "herr präsident ! der eu-haushalt , 3,5 % ."),
        ("words", "en", "The dog's well-known (2nd) bone.", "the dog 's well-known ( 2nd ) bone ."),
        ("words-apart", "en", "Let's hang-up, Mr. Speaker.", "let 's hang - up , mr. speaker ."),
        ("words-apart", "fr", "L'Union, c'est-à-dire qu'il n'y a", "le union , ce est - à - dire que il ne y a"),
        ("words-apart", "fr", "Du pain aux uns, au bord des eaux", "de le pain à les uns , à le bord de les eaux"),
        ("words-apart", "fr", "Aujourd\u2019hui jusqu'à quelqu'un", "aujourd' hui jusque à quelque un"),
        ("words", "en", "<d>", "<d>"),
        ("words", "en", "", ""),
    ],
)  # fmt: skip
def test_words_are_lowercase_and_separated(form, language, line, words):
    assert rewrite(line, form, language) == words


def test_files_are_rewritten_while_text_is_prepared(tmp_path):
    (tmp_path / "train.en.xz").write_bytes(lzma.compress("<d>\nHow do you do?\nYes\u0085no\n".encode()))
    (tmp_path / "train.de").write_text("<d>\nWie geht's?\nJa\u0085nein\n")
    config = configure(("data.source=train.en.xz", "data.target=train.de"), Scale("small", tmp_path))
    with in_form(config, "") as same:
        assert same is config
    with in_form(config, "words") as other:
        (source,), (target,) = other.data.source, other.data.target
        with open(source, newline="\n") as file:
            assert file.read() == "<d>\nhow do you do ?\nyes no\n"
        with open(target, newline="\n") as file:
            assert file.read() == "<d>\nwie geht 's ?\nja nein\n"
    assert other.model == config.model


def test_gold_links_run_from_the_source_of_the_model(tmp_path):
    """German-English links for a model from English to German; documents start at <d>, in all three files."""
    texts = {
        "gold.en": "<d>\nThe dog\nYes\nNo",
        "gold.de": "<d>\nDer Hund da\nJa\nNein",
        "gold.align": "<d>\n0-0 1-1 2p1\n0-0\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text + "\n")
    gold = Gold(name="gold", title="two sentences", files=("gold.en", "gold.de", "gold.align"), flipped=True, lines=2)
    pairs, links = gold_pairs(Scale("small", tmp_path), gold)
    assert pairs == [("the dog", "der hund da"), ("yes", "ja")]
    assert links == [Links(frozenset({(0, 0), (1, 1)}), frozenset({(1, 2)})), Links(frozenset({(0, 0)}))]


def test_test_sets_are_read_without_markers_and_in_the_form_of_their_corpus(tmp_path):
    corpus = next(corpus for corpus in CORPORA["small"] if corpus.name == "europarl-en-fr-words")
    folder = tmp_path / corpus.folder
    folder.mkdir()
    for name, text in zip(corpus.test, ("<d>\nThe Union.\n\nYes!\n", "<d>\nL'Union.\n\nOui !\n"), strict=True):
        (folder / name).write_bytes(lzma.compress(text.encode()))
    assert held_out_pairs(Scale("small", tmp_path), corpus) == [
        ("the union .", "le union ."),
        ("", ""),
        ("yes !", "oui !"),
    ]
