"""From a request to a job, if it is within the limits."""

from __future__ import annotations

from dataclasses import dataclass

from rectiformer.analyze.record import ModelCard
from rectiformer.errors import ArgumentError
from rectiformer.serve.jobs import DocumentsJob, Job, SentencesJob, Watching
from rectiformer.serve.limits import Limits
from rectiformer.serve.refusals import INVALID, OVER_LIMIT, RefusalError
from rectiformer.serve.schema import TranslateRequest
from rectiformer.serve.tasks import AlignPairs
from rectiformer.translate.documents import check_request
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator

OVERLAP = 2


@dataclass(frozen=True)
class JobMaker:
    """Makes jobs for one model."""

    translator: Translator
    card: ModelCard
    limits: Limits
    align: AlignPairs | None
    """Where to look for word links; None where the model has none to give."""

    def make(self, asked: TranslateRequest) -> Job:
        """The job of a request; RefusalError where it asks for too much."""
        self._check_counts(asked)
        try:
            options = SearchOptions(beam=asked.beam, nbest=asked.nbest, length_penalty=asked.length_penalty)
            segment = check_request(self.translator, options, None, OVERLAP) if asked.documents else 0
        except ArgumentError as error:
            raise RefusalError(INVALID, str(error)) from error
        if asked.alignments and self.align is None:
            raise RefusalError(INVALID, "this model's attention to the source has no weights; leave alignments out")
        watching = Watching(self.align if asked.alignments else None, self.card if asked.heads else None)
        documents = asked.documents or [asked.sentences or []]
        encode = self.translator.source.encode
        ids = [[encode(sentence) for sentence in document] for document in documents]
        self._check_lengths([len(each) for document in ids for each in document], asked.heads)
        if asked.documents is None:
            return SentencesJob(documents[0], [len(each) for each in ids[0]], options, watching)
        return DocumentsJob(documents, ids, options, watching, segment, OVERLAP)

    def _check_counts(self, asked: TranslateRequest) -> None:
        limits = self.limits
        documents = asked.documents or [asked.sentences or []]
        check("documents", len(documents), limits.max_sentences)
        sentences = sum(map(len, documents))
        check("sentences", sentences, limits.max_sentences)
        check("beam", asked.beam, limits.max_beam)
        check("nbest", asked.nbest, limits.max_nbest)
        if asked.heads:
            check("sentences with heads", sentences, limits.max_heads)

    def _check_lengths(self, lengths: list[int], heads: bool) -> None:
        limits = self.limits
        for number, length in enumerate(lengths, 1):
            check(f"subwords of sentence {number}", length, limits.max_sentence_tokens)
        check("subwords", sum(lengths), limits.max_tokens)
        if heads:
            check("subwords with heads", sum(lengths), limits.max_heads_tokens)


def check(what: str, value: int, most: int) -> None:
    """Refuse more than the limit."""
    if value > most:
        raise RefusalError(OVER_LIMIT, f"{what}: {value:,}, but at most {most:,} are taken")
