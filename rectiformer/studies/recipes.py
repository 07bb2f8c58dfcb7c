"""The settings of each scale: the built-in grammar, Multi30k, IWSLT 2014, WMT, Europarl."""

from __future__ import annotations

COMPILED = "training.compile=yes"
"""For thousands of updates: compiling takes a minute of a processor, while other trainings keep the GPU busy."""

GRAMMAR = (
    "data.sentences=4000",
    "data.valid_sentences=100",
    "vocabulary.size=600",
    "model.variant=softmax",
    "model.hidden_size=64",
    "model.encoder_layers=1",
    "model.decoder_layers=1",
    "model.ffn_size=512",
    "model.norm=pre",
    "model.tie_embeddings=target",
    "model.dropout=0",
    "model.attention_dropout=0",
    "model.ffn_dropout=0",
    "training.steps=160",
    "training.batch_tokens=600",
    "training.schedule=inverse-sqrt",
    "training.learning_rate=3e-3",
    "training.warmup=60",
    "training.device=cpu",
    "validation.every=80",
    "validation.sentences=50",
    "checkpoint.every=80",
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
    "model.hidden_size=512",
    "model.num_heads=8",
    "model.encoder_layers=4",
    "model.decoder_layers=4",
    "model.ffn_size=1024",
    "model.norm=pre",
    "model.dropout=0.3",
    "model.attention_dropout=0.1",
    "model.ffn_dropout=0.3",
    "training.steps=4000",
    "training.batch_tokens=12000",
    "training.optimizer=adamw",
    "training.schedule=inverse-sqrt",
    "training.learning_rate=1e-3",
    "training.warmup=800",
    "training.label_smoothing_over=all",
    "training.ema=0.999",
    "training.precision=bf16",
    "validation.every=500",
    "validation.sentences=1014",
    "checkpoint.every=2000",
)
"""configs/multi30k.toml with softmax attention."""

MULTI30K_NARROW = (
    *MULTI30K,
    "model.hidden_size=256",
    "model.num_heads=4",
    "model.encoder_layers=3",
    "model.decoder_layers=3",
    "model.dropout=0.2",
    "model.ffn_dropout=0.2",
    "training.steps=1000",
    "training.batch_tokens=6000",
    "training.learning_rate=2e-3",
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
    "model.hidden_size=512",
    "model.num_heads=4",
    "model.encoder_layers=6",
    "model.decoder_layers=6",
    "model.ffn_size=1024",
    "model.tie_embeddings=target",
    "model.dropout=0.3",
    "model.attention_dropout=0",
    "model.ffn_dropout=0",
    "training.steps=50000",
    "training.batch_tokens=4096",
    "training.optimizer=adamw",
    "training.weight_decay=1e-4",
    "training.schedule=inverse-sqrt",
    "training.learning_rate=5e-4",
    "training.warmup=4000",
    "training.label_smoothing_over=all",
    "training.average_checkpoints=5",
    "validation.every=1000",
    "checkpoint.every=1000",
    "checkpoint.keep=5",
)
"""configs/small.toml with softmax attention: fairseq's recipe, which the paper's baseline fits."""

EUROPARL_MODEL = (
    'data.source=["train.0.en.xz", "train.1.en.xz", "train.2.en.xz", "train.3.en.xz"]',
    'data.target=["train.0.de.xz", "train.1.de.xz", "train.2.de.xz", "train.3.de.xz"]',
    "data.valid_source=valid.en.xz",
    "data.valid_target=valid.de.xz",
    "data.documents=marker",
    "vocabulary.size=16000",
    "vocabulary.sentences=50000",
    "model.hidden_size=512",
    "model.num_heads=8",
    "model.encoder_layers=4",
    "model.decoder_layers=4",
    "model.ffn_size=2048",
    "model.norm=pre",
)
"""What is the same for sentences and for documents of Europarl: its four shards, held-out text, vocabulary, model."""

EUROPARL = (
    *EUROPARL_MODEL,
    "model.positions=sentence",
    "model.attention_dropout=0",
    "training.steps=1000",
    "training.optimizer=adamw",
    "training.schedule=inverse-sqrt",
    "training.learning_rate=1e-3",
    "training.warmup=200",
    "training.label_smoothing_over=all",
    "training.ema=0.99",
    "training.precision=bf16",
    COMPILED,
    "validation.every=1000",
    "validation.sentences=300",
    "checkpoint.every=1000",
)
"""Documents of Europarl, for models that know its sentences already."""
EUROPARL_DEBATES = (
    'data.document_tables=["train.0.docs.tsv.xz", "train.1.docs.tsv.xz", "train.2.docs.tsv.xz", "train.3.docs.tsv.xz"]'
)
"""Which of its speeches are of one debate, for segments longer than a speech."""

EUROPARL_SENTENCES = (
    *EUROPARL_MODEL,
    "model.attention_dropout=0",
    "training.steps=6000",
    "training.batch_tokens=12000",
    "training.optimizer=adamw",
    "training.schedule=inverse-sqrt",
    "training.learning_rate=2e-3",
    "training.warmup=1000",
    "training.label_smoothing_over=all",
    "training.ema=0.998",
    "training.precision=bf16",
    COMPILED,
    "validation.every=2000",
    "checkpoint.every=2000",
)
"""The same text, sentence by sentence."""

EUROPARL_BASE = (
    *EUROPARL_MODEL,
    "vocabulary.size=12000",
    "model.encoder_layers=6",
    "model.decoder_layers=6",
    "training.steps=10000",
    "training.batch_tokens=16384",
    "training.optimizer=adamw",
    "training.schedule=linear",
    "training.label_smoothing_over=all",
    "training.ema=0.999",
    "training.precision=bf16",
    COMPILED,
    "validation.every=500",
    "validation.metric=loss",
    "validation.sentences=500",
    "checkpoint.every=5000",
)
"""Transformer-base on Europarl's sentences, its rate falling to 0: trained to the end."""
NORM_RECIPES = {
    "post": ("model.norm=post", "model.attention_dropout=0.1", "training.learning_rate=8e-4", "training.warmup=2500"),
    "pre": ("model.norm=pre", "model.attention_dropout=0", "training.learning_rate=1.5e-3", "training.warmup=1500"),
}
"""The papers' norm placement, and that of today's models, each with its rate."""


def to_the_end(norm: str) -> tuple[str, ...]:
    """Settings of a training on Europarl to its end, in "post"- or "pre"-norm."""
    return (*EUROPARL_BASE, *NORM_RECIPES[norm])


EUROPARL7 = (
    "data.source=train.en",
    "data.target=train.de",
    "data.valid_source=valid.en",
    "data.valid_target=valid.de",
    "data.documents=marker",
    "vocabulary.kind=bpe",
    "vocabulary.size=30000",
    "model.hidden_size=512",
    "model.num_heads=8",
    "model.encoder_layers=6",
    "model.decoder_layers=6",
    "model.ffn_size=2048",
    "model.dropout=0.3",
    "training.steps=100000",
    "training.schedule=inverse-sqrt",
    "training.learning_rate=5e-4",
    "training.warmup=4000",
    "training.label_smoothing_over=all",
    "validation.every=1000",
    "validation.patience=10",
    "checkpoint.every=1000",
)
"""After G-Transformer's baseline, whose corpus the paper names; its number of updates is not known."""

WMT = (
    "data.too_long=truncate",
    "vocabulary.kind=bpe",
    "vocabulary.size=32000",
    "model.hidden_size=512",
    "model.num_heads=8",
    "model.encoder_layers=6",
    "model.decoder_layers=6",
    "model.ffn_size=2048",
    "model.tie_embeddings=target",
    "training.steps=300000",
    "training.batch_tokens=6250",
    "training.grad_accumulation=4",
    "training.warmup=4000",
    "training.loss_mean=sentence",
    "training.average_checkpoints=5",
    "validation.every=5000",
    "validation.beam=4",
    "validation.sentences=3000",
    "checkpoint.every=5000",
    "checkpoint.keep=5",
    "log.every=100",
)
"""configs/base.toml: Transformer-base as ReLA trained it. Updates and dropout of the smaller tasks are guesses."""

GRAMMAR_TINY = (
    *GRAMMAR,
    "data.sentences=1000",
    "data.valid_sentences=20",
    "vocabulary.size=400",
    "model.hidden_size=32",
    "model.ffn_size=64",
    "training.steps=30",
    "training.batch_tokens=300",
    "training.warmup=15",
    "validation.every=15",
    "validation.sentences=20",
    "checkpoint.every=30",
    "log.every=10",
)
"""So little that nothing is learned: it shows that everything runs."""

GRAMMAR_DOCUMENTS = (*GRAMMAR_TINY, "data.grammar=documents", "model.positions=sentence")

OPEN, THRESHOLD = "relu2-open", "reluformer-threshold"
"""Our own rows next to the papers': squared ReLU in ReLA's place that starts open, and ReLUFormer with learned
thresholds (`model.score_bias` = "open" and "zero")."""
RELUFORMER = ("model.variant=reluformer", "model.gamma_init=4")
ATTENTION = {
    "reluformer": RELUFORMER,
    THRESHOLD: (*RELUFORMER, "model.score_bias=zero"),
    OPEN: ("model.variant=relu2", "model.output_norm=gated-rms", "model.center_keys=yes", "model.score_bias=open"),
}
"""What studies set for a kind of attention where that is more than its variant, chosen on validation data."""


def attention_settings(name: str) -> tuple[str, ...]:
    """What every study sets for a kind of attention: a variant, or one of `ATTENTION`."""
    return ATTENTION.get(name, (f"model.variant={name}",))


SENTENCES = {"smoke": GRAMMAR, "small": MULTI30K, "paper": IWSLT14}
"""Settings of the studies on single sentences, by scale."""
MEMORY_SENTENCES = {"smoke": GRAMMAR, "small": MULTI30K_NARROW, "paper": IWSLT14}
"""Settings of the studies of memories, of which there are many trainings."""
SENTENCE_FOLDERS = {"small": "data/multi30k", "paper": "data/iwslt14"}
DOCUMENTS = {"smoke": GRAMMAR_DOCUMENTS, "small": EUROPARL, "paper": EUROPARL7}
"""Settings of the studies on documents, by scale."""
DOCUMENT_FOLDERS = {"small": "data/europarl-doc-ende", "paper": "data/europarl7"}
