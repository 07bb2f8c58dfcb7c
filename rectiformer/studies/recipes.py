"""The settings of each scale: the built-in grammar, Multi30k, IWSLT 2014, WMT, Europarl."""

import json
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
MODERN = (
    *training(optimizer="adamw", schedule="inverse-sqrt", label_smoothing_over="all", precision="bf16"),
    *model(norm="pre"),
)
"""What the recipes of our own have in common."""

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
    *model_size(512, 8, 4, 1024),
    *model(variant="softmax", dropout=0.3, attention_dropout=0.1, ffn_dropout=0.3),
    *training(steps=4000, batch_tokens=12000, learning_rate=1e-3, warmup=800, ema=0.999),
    *validation(every=500, sentences=1014),
    *checkpoint(every=2000),
)
"""configs/multi30k.toml with softmax attention."""

MULTI30K_NARROW = (
    *MULTI30K,
    *model_size(256, 4, 3, 1024),
    *model(dropout=0.2, ffn_dropout=0.2),
    *training(steps=1000, batch_tokens=6000, learning_rate=2e-3, warmup=250, ema=0.99),
    *checkpoint(every=1000),
)
"""The same text with a model so narrow, and trained so briefly, that a hundred of them take minutes."""

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

EUROPARL_MODEL = (
    *data(
        source=[f"train.{shard}.en.xz" for shard in range(4)],
        target=[f"train.{shard}.de.xz" for shard in range(4)],
        valid_source="valid.en.xz",
        valid_target="valid.de.xz",
        documents="marker",
    ),
    *vocabulary(size=16000, sentences=50000),
    *MODERN,
    *model_size(512, 8, 4, 2048),
    COMPILED,
)
"""Shared by sentences and documents of Europarl: four shards, held-out text, vocabulary, model."""

EUROPARL = (
    *EUROPARL_MODEL,
    *model(positions="sentence", attention_dropout=0),
    *training(steps=1000, learning_rate=1e-3, warmup=200, ema=0.99),
    *validation(every=1000, sentences=300),
    *checkpoint(every=1000),
)
"""Documents of Europarl, for models that know its sentences already."""
EUROPARL_DEBATES = data(document_tables=[f"train.{shard}.docs.tsv.xz" for shard in range(4)])
"""Which of its speeches belong to one debate, for segments longer than a speech."""

EUROPARL_SENTENCES = (
    *EUROPARL_MODEL,
    *model(attention_dropout=0),
    *training(steps=6000, batch_tokens=12000, learning_rate=2e-3, warmup=1000, ema=0.998),
    *validation(every=2000),
    *checkpoint(every=2000),
)
"""The same text, sentence by sentence."""

EUROPARL_BASE = (
    *EUROPARL_MODEL,
    *vocabulary(size=12000),
    *BASE_SIZE,
    *training(steps=10000, batch_tokens=16384, schedule="linear", ema=0.999),
    *validation(every=500, metric="loss", sentences=500),
    *checkpoint(every=5000),
)
"""Transformer-base on Europarl's sentences, trained until its learning rate has fallen to 0."""
TO_THE_END = {
    "post": (*EUROPARL_BASE, *model(norm="post", attention_dropout=0.1), *training(learning_rate=8e-4, warmup=2500)),
    "pre": (*EUROPARL_BASE, *model(norm="pre", attention_dropout=0), *training(learning_rate=1.5e-3, warmup=1500)),
}
"""The same in the papers' norm placement and in that of today's models, each with its learning rate."""

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


SENTENCES = {"smoke": GRAMMAR, "small": MULTI30K, "paper": IWSLT14}
"""Settings of the studies on single sentences, by scale."""
MEMORY_SENTENCES = {"smoke": GRAMMAR, "small": MULTI30K_NARROW, "paper": IWSLT14}
"""Settings of the studies of memories, which have many trainings."""
SENTENCE_FOLDERS = {"small": "multi30k", "paper": "iwslt14"}
DOCUMENTS = {"smoke": GRAMMAR_DOCUMENTS, "small": EUROPARL, "paper": EUROPARL7}
"""Settings of the studies on documents, by scale."""
DOCUMENT_FOLDERS = {"small": "europarl-doc-ende", "paper": "europarl7"}
