"""The settings of each scale: the built-in grammar, Multi30k, Europarl, IWSLT 2014, WMT; and all learning rates."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial


def settings(section: str, **values: str | float | list[str]) -> tuple[str, ...]:
    """`section.key=value` strings, as `load_config` takes them."""
    shown = {key: json.dumps(value) if isinstance(value, list) else value for key, value in values.items()}
    return tuple(f"{section}.{key}={value}" for key, value in shown.items())


data, vocabulary, model = (partial(settings, section) for section in ("data", "vocabulary", "model"))
training, validation, checkpoint = (partial(settings, section) for section in ("training", "validation", "checkpoint"))

COMPILED = "training.compile=yes"
"""For thousands of updates: compiling takes a minute of a CPU while other trainings keep the GPU busy."""


def text_files(source: str, target: str, valid_source: str, valid_target: str) -> tuple[str, ...]:
    """The files of training and validation text."""
    return data(source=source, target=target, valid_source=valid_source, valid_target=valid_target)


def model_size(hidden_size: int, num_heads: int, layers: int, ffn_size: int) -> tuple[str, ...]:
    """The size of a model with as many encoder as decoder layers."""
    sizes = model(hidden_size=hidden_size, num_heads=num_heads, ffn_size=ffn_size)
    return (*sizes, *model(encoder_layers=layers, decoder_layers=layers))


BASE_SIZE = model_size(512, 8, 6, 2048)
"""Transformer-base."""
MODERN = training(optimizer="adamw", label_smoothing_over="all", precision="bf16")
"""What the recipes of our own have in common."""
ENDING = training(schedule="linear")
"""Rates that fall to 0 at the last update: a model that is judged before that shows how fast it learns, no more."""
NORMS = ("post", "pre")
"""Norm placements: the papers', and that of most models today. The first column of every comparison is the papers'."""

GRAMMAR = (
    *data(sentences=4000, valid_sentences=100),
    *vocabulary(size=600),
    *model(variant="softmax", hidden_size=64, encoder_layers=1, decoder_layers=1, ffn_size=512),
    *model(norm="pre", tie_embeddings="target", dropout=0, attention_dropout=0, ffn_dropout=0),
    *training(steps=160, batch_tokens=600, schedule="inverse-sqrt", learning_rate=3e-3, warmup=60, device="cpu"),
    *validation(every=80, sentences=50),
    *checkpoint(every=80),
    "log.every=25",
)
"""A model so narrow that its memories have to hold the words."""

GRAMMAR_TINY = (
    *GRAMMAR,
    *data(sentences=1000, valid_sentences=20),
    *vocabulary(size=400),
    *model(hidden_size=32, ffn_size=64),
    *training(steps=30, batch_tokens=300, warmup=15),
    *validation(every=15, sentences=20),
    *checkpoint(every=30),
    "log.every=10",
)
"""Too little to learn anything: it shows that everything runs."""

GRAMMAR_DOCUMENTS = (*GRAMMAR_TINY, *data(grammar="documents"), *model(positions="sentence"))

MULTI30K = (
    *text_files("train.de.xz", "train.en.xz", "val.de", "val.en"),
    *vocabulary(size=8000, sampling=0.3, copies=8),
    *MODERN,
    *ENDING,
    *model_size(512, 8, 4, 1024),
    *model(variant="softmax", dropout=0.3, attention_dropout=0.1, ffn_dropout=0.3),
    *training(steps=6000, batch_tokens=12000, ema=0.999),
    *validation(every=500, metric="loss", sentences=1014),
    *checkpoint(every=3000),
)
"""Captions, 70 epochs and more: dropout and sampled subwords hold overfitting, and the best checkpoint is taken."""

MULTI30K_NARROW = (
    *MULTI30K,
    *model_size(256, 4, 3, 1024),
    *model(norm="post", dropout=0.2, ffn_dropout=0.2),
    *training(steps=5000, batch_tokens=6000, learning_rate=1e-3, warmup=1250, ema=0.99),
    *checkpoint(every=5000),
)
"""The same text with a model so narrow that a hundred of them take half an hour, in the papers' norm placement."""

IWSLT14 = (
    *text_files("train.de", "train.en", "valid.de", "valid.en"),
    *vocabulary(kind="bpe", size=10000),
    *model_size(512, 4, 6, 1024),
    *model(variant="softmax", tie_embeddings="target", dropout=0.3, attention_dropout=0, ffn_dropout=0),
    *training(steps=50000, batch_tokens=4096, optimizer="adamw", weight_decay=1e-4, schedule="inverse-sqrt"),
    *training(learning_rate=5e-4, warmup=4000, label_smoothing_over="all", average_checkpoints=5),
    *validation(every=1000),
    *checkpoint(every=1000, keep=5),
)
"""configs/small.toml with softmax attention: fairseq's recipe, which the paper's baseline fits."""

EUROPARL_TEXT = (
    *data(
        source=[f"train.{shard}.en.xz" for shard in range(4)],
        target=[f"train.{shard}.de.xz" for shard in range(4)],
        valid_source="valid.en.xz",
        valid_target="valid.de.xz",
        documents="marker",
    ),
    *vocabulary(size=16000, byte_fallback="true"),
    *MODERN,
    *ENDING,
    *BASE_SIZE,
    *training(batch_tokens=16384),
)
"""Shared by sentences and documents of Europarl: four shards, held-out text, vocabulary, Transformer-base."""

EUROPARL_SENTENCES = (
    *EUROPARL_TEXT,
    *training(steps=10000, ema=0.999),
    *validation(every=500, metric="loss", sentences=500),
    *checkpoint(every=5000),
    COMPILED,
)
"""Sentence by sentence: 8 passes over the text."""
EUROPARL_WORDS = (*EUROPARL_SENTENCES, *vocabulary(size=12000, byte_fallback="false", sentences=50000))
"""Lowercase words, of which there are fewer."""

EUROPARL_DOCUMENTS = (
    *EUROPARL_TEXT,
    *model(norm="post", positions="sentence", attention_dropout=0),
    *training(steps=2000, learning_rate=4e-4, warmup=200, ema=0.99),
    *validation(every=500, metric="loss", sentences=300),
    *checkpoint(every=1000),
    COMPILED,
)
"""Segments of documents, for post-norm models that know the sentences of Europarl already. Attention dropout would
double the cost of attention this long."""
EUROPARL_DEBATES = data(document_tables=[f"train.{shard}.docs.tsv.xz" for shard in range(4)])
"""Which of its speeches belong to one debate, for segments longer than a speech."""

EUROPARL7 = (
    *text_files("train.en", "train.de", "valid.en", "valid.de"),
    *data(documents="marker"),
    *vocabulary(kind="bpe", size=30000),
    *BASE_SIZE,
    *model(dropout=0.3),
    *training(steps=100000, schedule="inverse-sqrt", learning_rate=5e-4, warmup=4000, label_smoothing_over="all"),
    *validation(every=1000, patience=10),
    *checkpoint(every=1000),
)
"""After G-Transformer's baseline, whose corpus the paper names; its number of updates is not known."""

WMT = (
    *data(too_long="truncate"),
    *vocabulary(kind="bpe", size=32000),
    *BASE_SIZE,
    *model(tie_embeddings="target"),
    *training(steps=300000, batch_tokens=6250, grad_accumulation=4, warmup=4000, loss_mean="sentence"),
    *training(average_checkpoints=5),
    *validation(every=5000, beam=4, sentences=3000),
    *checkpoint(every=5000, keep=5),
    "log.every=100",
)
"""configs/base.toml: Transformer-base as ReLA trained it. Updates and dropout of the smaller tasks are guesses."""

OPEN, THRESHOLD = "relu2-open", "reluformer-threshold"
"""Our own rows next to the papers': squared ReLU in ReLA's place that starts open, and ReLUFormer with learned
thresholds (`model.score_bias` = "open" and "zero")."""
RELUFORMER = model(variant="reluformer", gamma_init=4)
ATTENTION = {
    "reluformer": RELUFORMER,
    THRESHOLD: (*RELUFORMER, *model(score_bias="zero")),
    OPEN: model(variant="relu2", output_norm="gated-rms", center_keys="yes", score_bias="open"),
}
"""The attention settings of rows that are more than a variant, chosen on validation data."""


def attention_settings(name: str) -> tuple[str, ...]:
    """What every study sets for a row: its variant, or one of `ATTENTION`."""
    return ATTENTION.get(name, model(variant=name))


@dataclass(frozen=True, order=True)
class Peak:
    """A learning rate at its highest, and how it is reached."""

    rate: float
    warmup: int
    """Updates until then."""
    clip: float = 0.0
    """Largest norm of the gradient; 0 clips nothing, as in both papers."""

    @property
    def settings(self) -> tuple[str, ...]:
        clip = training(clip_grad_norm=self.clip) if self.clip else ()
        return (*training(learning_rate=self.rate, warmup=self.warmup), *clip)

    def __str__(self) -> str:
        """`8e-4`, or `8e-4, clipped at 1`."""
        digits, power = f"{self.rate:e}".split("e")
        return f"{float(digits):g}e{int(power)}" + (f", clipped at {self.clip:g}" if self.clip else "")

    def describe(self) -> str:
        """`0.0008-2500`, or `0.0008-2500-clip1`: part of the names of trainings."""
        return f"{self.rate:g}-{self.warmup}" + (f"-clip{self.clip:g}" if self.clip else "")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The learning rate of a variant on a text in a norm placement, chosen by validation loss."""

    chosen: Peak | None
    """None until what is tried has been trained: its rows wait, see `rectiformer study plan`."""
    tried: tuple[Peak, ...] = ()
    """Trained to the end with one seed; the lowest validation loss decides."""
    seed: int = 1
    """That seed."""
    short: tuple[float, ...] = ()
    """Rates of trainings of 4,000 updates (learning_rate.py): enough where they put rates in the right order."""


POST_RATES, PRE_RATES = (4e-4, 8e-4, 1.6e-3), (7.5e-4, 1.5e-3, 3e-3)
CAPTIONS_POST = tuple(Peak(rate, 1500, clip=1) for rate in (3.5e-4, 7e-4, 1.4e-3))
CAPTIONS_PRE = tuple(Peak(rate, 900) for rate in (5e-4, 1e-3, 2e-3))
UNCLIPPED = Peak(8e-4, 2500)
CLIPPED, CLIPPED_HIGHER, CLIPPED_HIGHEST = (Peak(rate, 2500, clip=1) for rate in (8e-4, 1.2e-3, 1.6e-3))
CHOICES: Mapping[tuple[str, str, str], Choice] = {
    # In post-norm short trainings choose wrongly, and without clipping at 8e-4 softmax fails with two seeds of three,
    # seed 2 among them (docs/log.md, 2026-11-18): so both variants are tried to the end with that seed.
    ("europarl", "post", "softmax"): Choice(
        chosen=CLIPPED,
        tried=(Peak(4e-4, 2500), Peak(6e-4, 5000), CLIPPED, CLIPPED_HIGHER),
        seed=2,
        short=POST_RATES,
    ),
    ("europarl", "post", "rela-g"): Choice(
        chosen=CLIPPED_HIGHER,
        tried=(UNCLIPPED, CLIPPED, CLIPPED_HIGHER),
        seed=2,
        short=POST_RATES,
    ),
    ("europarl", "pre", "softmax"): Choice(chosen=None, short=PRE_RATES),
    ("europarl", "pre", "rela-g"): Choice(chosen=None, short=PRE_RATES),
    ("multi30k", "post", "softmax"): Choice(chosen=None, tried=CAPTIONS_POST),
    ("multi30k", "post", "rela-g"): Choice(chosen=None, tried=CAPTIONS_POST),
    ("multi30k", "pre", "softmax"): Choice(chosen=None, tried=CAPTIONS_PRE),
    ("multi30k", "pre", "rela-g"): Choice(chosen=None, tried=CAPTIONS_PRE),
}
"""Text, norm placement, variant: the one table of learning rates at `small`. After a sweep, name the rate with the
lowest validation loss here; a test compares the two."""
AS_SOFTMAX = ("sparsemax", "entmax15")
"""Variants whose rows compete, trained at softmax's rate; all others are trained at rela-g's."""
EXTRA_TRIED: Mapping[tuple[str, str, str], tuple[tuple[Peak, tuple[int, ...]], ...]] = {
    ("europarl", "post", "softmax"): ((UNCLIPPED, (1, 2)),),
    ("europarl", "post", "rela-g"): ((CLIPPED_HIGHEST, (2,)), (UNCLIPPED, (1, 3))),
}
"""What is tried to the end besides, and with which seeds: the recipe of both papers, which does not clip, and what lies
above the highest rate where that was the best."""


def choice_of(text: str, norm: str, variant: str) -> Choice:
    """The choice that holds for a variant: its own, or that of its like."""
    like = variant if (text, norm, variant) in CHOICES else "softmax" if variant in AS_SOFTMAX else "rela-g"
    return CHOICES[text, norm, like]


SENTENCES = {"smoke": GRAMMAR, "small": MULTI30K, "paper": IWSLT14}
"""Settings of the studies on single sentences, by scale."""
MEMORY_SENTENCES = {"smoke": GRAMMAR, "small": MULTI30K_NARROW, "paper": IWSLT14}
"""Settings of the studies of memories, which have many trainings."""
SENTENCE_FOLDERS = {"small": "multi30k", "paper": "iwslt14"}
DOCUMENTS = {"smoke": GRAMMAR_DOCUMENTS, "small": EUROPARL_DOCUMENTS, "paper": EUROPARL7}
"""Settings of the studies on documents, by scale."""
DOCUMENT_FOLDERS = {"small": "europarl-doc-ende", "paper": "europarl7"}
