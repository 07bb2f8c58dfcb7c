"""The built-in corpus: sentence pairs, documents and exact word links of a small German-English grammar.

German is the source. Every pair is a pure function of seed, split and index, and a sentence (within a document: the
document) has exactly one translation.
"""

from rectiformer.text.grammar.clauses import Dependent, Pair
from rectiformer.text.grammar.documents import draw_documents
from rectiformer.text.grammar.sentences import draw_sentences

__all__ = ["Dependent", "Pair", "draw_documents", "draw_sentences"]
