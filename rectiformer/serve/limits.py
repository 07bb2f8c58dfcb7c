"""Limits of a server; the defaults are small."""

from dataclasses import dataclass, fields

from rectiformer.errors import ArgumentError
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator
from rectiformer.web import WebLimits


@dataclass(frozen=True, kw_only=True)
class Limits(WebLimits):
    """What one request may ask for, and how many may wait; anything above is refused, never truncated."""

    max_sentences: int = 128
    """Sentences of a request, those of all its documents together."""
    max_sentence_tokens: int = 256
    """Subwords of a sentence."""
    max_tokens: int = 8_192
    """Subwords of all sentences of a request."""
    max_beam: int = 8
    """Hypotheses kept per sentence."""
    max_nbest: int = 8
    """Translations returned per sentence."""
    max_heads: int = 4
    """Sentences of a request that asks for the attention of the heads."""
    max_heads_tokens: int = 128
    """Subwords of all sentences of such a request."""
    queue_requests: int = 256
    """Requests accepted and not yet answered."""
    queue_sentences: int = 2_048
    """Sentences of these requests."""
    deadline: float = 30.0
    """Seconds from an accepted request to its answer."""
    drain: float = 30.0
    """Seconds that accepted requests have to finish once the server is asked to stop."""
    batch_tokens: int = 4_096
    """Padded source tokens that go through the model together."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < float("inf"):
                raise ArgumentError(f"{field.name} = {value}, but it must be above 0 and finite")
        if self.max_sentences > self.queue_sentences:
            raise ArgumentError(
                f"max_sentences = {self.max_sentences} is more than queue_sentences = {self.queue_sentences}, so that "
                "such a request could never wait; lower one or raise the other"
            )

    def check_model(self, translator: Translator) -> None:
        """ArgumentError if a sentence within the limits could be too long for the model."""
        longest = translator.max_length - SearchOptions.extra_length
        if self.max_sentence_tokens > longest:
            raise ArgumentError(
                f"max_sentence_tokens = {self.max_sentence_tokens}, but this model translates at most {longest} "
                "subwords and then reads its own translation; lower it"
            )
