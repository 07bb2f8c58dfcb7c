"""Requests to translate: what they look like, what comes back, and how one becomes a job within the limits."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rectiformer.analyze.record import ModelCard
from rectiformer.errors import ArgumentError
from rectiformer.serve.jobs import AlignPairs, DocumentsJob, Job, MarkedJob, SentencesJob
from rectiformer.serve.limits import Limits
from rectiformer.translate.documents import check_request
from rectiformer.translate.markup import read_markup
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator
from rectiformer.web import INVALID, OVER_LIMIT, RefusalError

OVERLAP = 2
"""Sentences by which segments of a document overlap."""
REQUEST_EXAMPLES = {
    "sentences": {"value": {"sentences": ["Der Hund schläft."], "beam": 4}},
    "alignments": {"value": {"sentences": ["Der Hund schläft."], "alignments": True, "nbest": 2}},
    "documents": {"value": {"documents": [["Der Hund schläft.", "Er ist müde."]]}},
}


class TranslateRequest(BaseModel):
    """Sentences or documents, how to decode them, and what to return besides translations."""

    model_config = ConfigDict(extra="forbid", strict=True)

    sentences: list[str] | None = Field(None, min_length=1, description="Each is translated by itself.")
    documents: list[list[str]] | None = Field(None, min_length=1, description="Each is a list of sentences, in order.")
    beam: int = Field(4, ge=1, description="Hypotheses kept per sentence; 1 is greedy.")
    nbest: int = Field(1, ge=1, description="Translations returned per sentence, at most beam; 1 for documents.")
    length_penalty: float = Field(0.6, ge=0, le=5, allow_inf_nan=False, description="Power of the length penalty.")
    alignments: bool = Field(False, description="Whether to link the words of both sides.")
    markup: bool = Field(False, description="Whether sentences have inline tags, to be placed by word links.")
    heads: bool = Field(False, description="Whether to give the attention record: what every head does.")


class Candidate(BaseModel):
    """One translation of a sentence."""

    text: str
    score: float | None = Field(description="Log probability over length penalty.")
    ended: bool = Field(description="False if the length limit came first.")


class Alignment(BaseModel):
    """Word links; words are spans [start, stop) of code points."""

    source_words: list[tuple[int, int]]
    target_words: list[tuple[int, int]]
    links: list[tuple[int, int]] = Field(description="Indices of a source word and a target word, from 0.")


class Translated(Candidate):
    """A sentence's best translation."""

    nbest: list[Candidate] | None = Field(None, description="All translations asked for, best first, if more than one.")
    alignment: Alignment | None = None
    warnings: list[str]


class DocumentSentence(BaseModel):
    """The translation of one sentence of a document; empty for a blank one."""

    text: str
    alignment: Alignment | None = None


class TranslatedDocument(BaseModel):
    """As many translations as the document has sentences."""

    translations: list[DocumentSentence]
    segments: int = Field(description="How many segments the document was cut into.")
    fallbacks: int = Field(description="How many of them had to be translated in smaller segments.")
    warnings: list[str]


class TranslateAnswer(BaseModel):
    """Translations of the sentences or documents, in their order."""

    model: str
    translations: list[Translated] | None = None
    documents: list[TranslatedDocument] | None = None
    record: dict[str, Any] | None = Field(None, description="The attention record, version 1, if heads was set.")


class ErrorLine(BaseModel):
    """Why a request was refused."""

    code: str
    message: str


class ErrorAnswer(BaseModel):
    """What every refusal looks like."""

    error: ErrorLine


class State(BaseModel):
    """Whether the server is up."""

    status: str


class ModelAnswer(BaseModel):
    """Which model answers, and within which limits."""

    name: str
    source_language: str = Field(description="Such as de; empty where the names of the training files do not tell.")
    target_language: str = Field(description="As source_language.")
    variants: dict[str, str]
    layers: dict[str, int]
    heads: int
    segment: int = Field(description="Subwords of a document's segment; 0 for sentences by themselves.")
    aligns: bool = Field(description="Whether its cross-attention has weights to align by.")
    limits: dict[str, int | float]


def read_request(content: Any) -> TranslateRequest:
    """The request in a body; RefusalError, in one line, if it is invalid."""
    try:
        asked = TranslateRequest.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        location = ".".join(map(str, first["loc"]))[:80] or "the request"
        what = "unknown key" if first["type"] == "extra_forbidden" else first["msg"]
        raise RefusalError(INVALID, f"{location!a}: {what}") from None
    if (asked.sentences is None) == (asked.documents is None):
        raise RefusalError(INVALID, "give either sentences or documents")
    if asked.markup and (asked.documents is not None or asked.nbest > 1 or asked.heads):
        raise RefusalError(
            INVALID, "markup goes into one translation of each sentence; leave documents, nbest and heads out"
        )
    if has_half_pairs(asked.documents or [asked.sentences or []]):
        raise RefusalError(INVALID, "a sentence has half of a surrogate pair, which is not a character; remove it")
    return asked


def has_half_pairs(documents: list[list[str]]) -> bool:
    """Whether a text cannot be encoded as UTF-8: JSON's escapes can spell half of a surrogate pair."""
    try:
        "".join(sentence for document in documents for sentence in document).encode()
    except UnicodeEncodeError:
        return True
    return False


def body_schema(limits: Limits) -> dict[str, Any]:
    """The body of a request as OpenAPI describes it, with what the limits allow."""
    schema = TranslateRequest.model_json_schema()
    properties = schema["properties"]
    for name in ("sentences", "documents"):
        (array,) = [each for each in properties[name].pop("anyOf") if each["type"] != "null"]
        properties[name] = {**array, "maxItems": limits.max_sentences, "description": properties[name]["description"]}
    properties["beam"]["maximum"] = limits.max_beam
    properties["nbest"]["maximum"] = limits.max_nbest
    schema["oneOf"] = [{"required": ["sentences"]}, {"required": ["documents"]}]
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": schema, "examples": REQUEST_EXAMPLES}},
        }
    }


@dataclass(frozen=True)
class JobMaker:
    """Makes jobs for one model."""

    translator: Translator
    card: ModelCard
    limits: Limits
    align: AlignPairs | None
    """Which heads align words; None if the model has no cross-attention weights."""

    def make(self, asked: TranslateRequest) -> Job:
        """The job of a request; RefusalError if it asks for too much."""
        limits, documents = self.limits, asked.documents or [asked.sentences or []]
        sentences = sum(map(len, documents))
        check("documents", len(documents), limits.max_sentences)
        check("sentences", sentences, limits.max_sentences)
        check("beam", asked.beam, limits.max_beam)
        check("nbest", asked.nbest, limits.max_nbest)
        if asked.heads:
            check("sentences with heads", sentences, limits.max_heads)
        try:
            options = SearchOptions(beam=asked.beam, nbest=asked.nbest, length_penalty=asked.length_penalty)
            segment = check_request(self.translator, options, None, OVERLAP) if asked.documents else 0
        except ArgumentError as error:
            raise RefusalError(INVALID, str(error)) from error
        if (asked.alignments or asked.markup) and self.align is None:
            raise RefusalError(INVALID, "this model's cross-attention has no weights; leave alignments and markup out")
        marked = [read_markup(sentence) for sentence in documents[0]] if asked.markup else []
        documents = [[each.text for each in marked]] if marked else documents
        ids = [[self.translator.source.encode(sentence) for sentence in document] for document in documents]
        lengths = [len(each) for document in ids for each in document]
        for number, length in enumerate(lengths, 1):
            check(f"subwords of sentence {number}", length, limits.max_sentence_tokens)
        check("subwords", sum(lengths), limits.max_tokens)
        if asked.heads:
            check("subwords with heads", sum(lengths), limits.max_heads_tokens)
        align = self.align if asked.alignments or asked.markup else None
        card = self.card if asked.heads else None
        if marked:
            return MarkedJob(options, align, card, documents[0], lengths, marked, asked.alignments)
        if asked.documents is None:
            return SentencesJob(options, align, card, documents[0], lengths)
        return DocumentsJob(options, align, card, documents, ids, segment, OVERLAP)


def check(what: str, value: int, most: int) -> None:
    """Refuse more than the limit."""
    if value > most:
        raise RefusalError(OVER_LIMIT, f"{what}: {value:,}, but at most {most:,} are allowed")
