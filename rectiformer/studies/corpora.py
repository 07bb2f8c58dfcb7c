"""The settings and test sets of each scale: the built-in grammar, Multi30k, IWSLT 2014, Europarl documents."""

from __future__ import annotations

from pathlib import Path

from rectiformer.config import DataConfig
from rectiformer.errors import DataError
from rectiformer.studies.plan import Scale
from rectiformer.text.corpus import Counts, read_pairs, read_two_files
from rectiformer.text.grammar import draw_documents, draw_sentences

Pair = tuple[str, str]

GRAMMAR = (
    "data.sentences=8000",
    "data.valid_sentences=100",
    "vocabulary.size=600",
    "model.variant=softmax",
    "model.width=64",
    "model.encoder_layers=1",
    "model.decoder_layers=1",
    "model.slots=512",
    "model.order=pre",
    "model.tie=target",
    "model.dropout=0",
    "model.attention_dropout=0",
    "model.slot_dropout=0",
    "training.steps=300",
    "training.tokens=600",
    "training.schedule=inverse-sqrt",
    "training.rate=3e-3",
    "training.warmup=80",
    "training.device=cpu",
    "validation.every=150",
    "validation.sentences=50",
    "checkpoint.every=150",
    "log.every=25",
)
"""A model so narrow that the memories have to hold the words."""

MULTI30K = (
    "data.source=train.de.xz",
    "data.target=train.en.xz",
    "data.valid_source=val.de",
    "data.valid_target=val.en",
    "vocabulary.size=8000",
    "vocabulary.sampling=0.3",
    "vocabulary.copies=8",
    "model.variant=softmax",
    "model.width=512",
    "model.heads=8",
    "model.encoder_layers=4",
    "model.decoder_layers=4",
    "model.slots=1024",
    "model.order=pre",
    "model.dropout=0.3",
    "model.attention_dropout=0.1",
    "model.slot_dropout=0.3",
    "training.steps=4000",
    "training.tokens=12000",
    "training.optimizer=adamw",
    "training.schedule=inverse-sqrt",
    "training.rate=1e-3",
    "training.warmup=800",
    "training.smoothing_over=all",
    "training.ema=0.999",
    "training.precision=bf16",
    "validation.every=500",
    "validation.sentences=1014",
    "checkpoint.every=2000",
)
"""configs/multi30k.toml with softmax attention."""

MULTI30K_NARROW = (
    *MULTI30K,
    "model.width=256",
    "model.heads=4",
    "model.encoder_layers=3",
    "model.decoder_layers=3",
    "model.dropout=0.2",
    "model.slot_dropout=0.2",
    "training.steps=1000",
    "training.tokens=6000",
    "training.rate=2e-3",
    "training.warmup=250",
    "training.ema=0.99",
    "checkpoint.every=1000",
)
"""The same text with a model so narrow, and trained so briefly, that a hundred of them take minutes."""

IWSLT14 = (
    "data.source=train.de",
    "data.target=train.en",
    "data.valid_source=valid.de",
    "data.valid_target=valid.en",
    "vocabulary.kind=bpe",
    "vocabulary.size=10000",
    "model.variant=softmax",
    "model.width=512",
    "model.heads=4",
    "model.encoder_layers=6",
    "model.decoder_layers=6",
    "model.slots=1024",
    "model.tie=target",
    "model.dropout=0.3",
    "model.attention_dropout=0",
    "model.slot_dropout=0",
    "training.steps=50000",
    "training.tokens=4096",
    "training.optimizer=adamw",
    "training.weight_decay=1e-4",
    "training.schedule=inverse-sqrt",
    "training.rate=5e-4",
    "training.warmup=4000",
    "training.smoothing_over=all",
    "training.average=5",
    "validation.every=1000",
    "checkpoint.every=1000",
    "checkpoint.keep=5",
)
"""configs/small.toml with softmax attention: fairseq's recipe, which the paper's baseline fits."""

EUROPARL = (
    "data.source=train.0.en.xz",
    "data.target=train.0.de.xz",
    "data.valid_source=valid.en.xz",
    "data.valid_target=valid.de.xz",
    "data.documents=marker",
    "vocabulary.size=16000",
    "model.width=512",
    "model.heads=8",
    "model.encoder_layers=4",
    "model.decoder_layers=4",
    "model.slots=2048",
    "model.order=pre",
    "model.dropout=0.3",
    "training.steps=3000",
    "training.optimizer=adamw",
    "training.schedule=inverse-sqrt",
    "training.rate=1e-3",
    "training.warmup=800",
    "training.smoothing_over=all",
    "training.ema=0.999",
    "training.precision=bf16",
    "validation.every=1000",
    "validation.sentences=300",
    "checkpoint.every=1000",
)
"""One shard of Europarl with documents, about as much text as IWSLT 2014."""

EUROPARL7 = (
    "data.source=train.en",
    "data.target=train.de",
    "data.valid_source=valid.en",
    "data.valid_target=valid.de",
    "data.documents=marker",
    "vocabulary.kind=bpe",
    "vocabulary.size=30000",
    "model.width=512",
    "model.heads=8",
    "model.encoder_layers=6",
    "model.decoder_layers=6",
    "model.slots=2048",
    "model.dropout=0.3",
    "training.steps=100000",
    "training.schedule=inverse-sqrt",
    "training.rate=5e-4",
    "training.warmup=4000",
    "training.smoothing_over=all",
    "validation.every=1000",
    "validation.patience=10",
    "checkpoint.every=1000",
)
"""After G-Transformer's baseline, whose corpus the paper names; its number of updates is not known."""

GRAMMAR_DOCUMENTS = (
    *GRAMMAR,
    "data.grammar=documents",
    "data.sentences=4000",
    "data.valid_sentences=60",
    "model.slots=128",
    "training.steps=100",
    "validation.every=50",
    "validation.sentences=20",
    "checkpoint.every=50",
)

SENTENCES = {"smoke": GRAMMAR, "small": MULTI30K, "paper": IWSLT14}
"""Settings of the studies on single sentences, by scale."""
MEMORY_SENTENCES = {"smoke": GRAMMAR, "small": MULTI30K_NARROW, "paper": IWSLT14}
"""Settings of the studies of memories, of which there are many trainings."""
SENTENCE_FOLDERS = {"small": "data/multi30k", "paper": "data/iwslt14"}
SENTENCE_TESTS = {"small": ("test_2016_flickr.de", "test_2016_flickr.en"), "paper": ("test.de", "test.en")}
DOCUMENTS = {"smoke": GRAMMAR_DOCUMENTS, "small": EUROPARL, "paper": EUROPARL7}
"""Settings of the studies on documents, by scale."""
DOCUMENT_FOLDERS = {"small": "data/europarl-doc-ende", "paper": "data/europarl7"}
DOCUMENT_TESTS = {"small": ("test.en.xz", "test.de.xz"), "paper": ("test.en", "test.de")}
SMOKE_TESTS, SMOKE_DOCUMENTS, TEST_SEED = 200, 12, 7


def held_out(scale: Scale) -> list[Pair]:
    """The test set of the studies on single sentences."""
    if scale.data is None:
        return [(pair.source, pair.target) for pair in draw_sentences(SMOKE_TESTS, TEST_SEED, "test")]
    source, target = (str(scale.data / name) for name in SENTENCE_TESTS[scale.name])
    return [(left or "", right or "") for left, right, _ in read_two_files(source, target, DataConfig())]


def held_out_documents(scale: Scale) -> list[list[Pair]]:
    """The test set of the studies on documents."""
    if scale.data is None:
        drawn = draw_documents(SMOKE_DOCUMENTS, TEST_SEED, "test")
        return [[(pair.source, pair.target) for pair in document] for document in drawn]
    names = tuple(str(scale.data / name) for name in DOCUMENT_TESTS[scale.name])
    config = DataConfig(valid_source=(names[0],), valid_target=(names[1],), documents="marker")
    found: list[list[Pair]] = []
    for pair in read_pairs(config, "valid", Counts()):
        if pair.document_start:
            found.append([])
        found[-1].append((pair.source, pair.target))
    return found


def require_folder(scale: Scale) -> None:
    """DataError where the corpus of a scale is not there."""
    if scale.data is not None and not Path(scale.data).is_dir():
        raise DataError(f"--scale {scale.name} reads its text in {scale.data}, which is no folder; name it with --data")
