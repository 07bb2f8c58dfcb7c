"""What a run can be told: one frozen dataclass per section, with a sentence for each key whose name is not enough."""

from dataclasses import dataclass, field
from typing import Any

from rectiformer.errors import ConfigError

Files = tuple[str, ...]  # in TOML one string or a list of strings
Numbers = tuple[float, ...]  # in TOML a list of numbers


def choices(default: str, *others: str) -> Any:
    """A field that takes one of a few words; the first is the default."""
    return field(default=default, metadata={"choices": (default, *others)})


def added(item: Any) -> Any:
    """A key of [model] that came after the first run folders: their hashes leave it out where it has its default."""
    return field(default=item.default, metadata={**item.metadata, "added": True})


def within(default: float, least: float, below: float | None = None) -> Any:
    """A number from `least` up to, but not including, `below`; without that, 32 bits have to be enough for it."""
    if below is None:
        below = 2**31 if isinstance(default, int) else 1e30  # float32 ends at 3e38, and it will be multiplied
    return field(default=default, metadata={"least": least, "below": below})


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text. Without files, the built-in German-English grammar."""

    source: Files = ()
    """Sentences to translate from: plain, .gz or .xz files, `-` for standard input, or a column of a Hugging Face
    dataset as `hf:NAME?column=translation.de&split=train`; none for the built-in grammar."""
    target: Files = ()
    """Their translations, line by line; empty where `format` is "tsv"."""
    weights: Numbers = ()
    """How often an epoch has the pairs of each `source` file: 1 once, 3 three times, 0.5 half of them, by turns. Empty
    for once each. Not part of what is prepared."""
    stream: bool = False
    """Train on `source<TAB>target` lines from standard input, unprepared and as they come, until it ends. Subwords are
    those of `--data`, of the models that are named, or chosen from the validation text."""
    links: Files = ()
    """Word links of each `source` file, for `training.guided_alignment`: line n links the words of pair n, counted from
    0, as in `0-0 1-2` (Pharaoh). `rectiformer align` writes such files, and so do statistical aligners."""
    link_words: str = choices("words", "spaces")
    """Which words `links` counts: "words", those of `rectiformer align`, punctuation split off; "spaces", whatever
    stands between spaces, as `rectiformer align --tokenized` and aligners of tokenized text do."""
    valid_source: Files = ()
    """Sentences to validate on."""
    valid_target: Files = ()
    """Their translations."""
    format: str = choices("lines", "tsv")
    """"lines": one file per side. "tsv": source, target and, with `documents = "column"`, document name in one file."""
    documents: str = choices("none", "blank", "marker", "column")
    """Where a document starts: nowhere, after a blank line, at a line `<d>`, or where the third TSV column changes."""
    document_tables: Files = ()
    """A TSV for each `source` file, one row per document in order; its first line names the columns: `lines`, `date`,
    `section` are read. Consecutive documents with the same date and section are one debate, and joined."""
    segment_length: int = within(0, 0)
    """Join consecutive sentences of a document into training pairs of at most this many subwords per side, one
    separator per sentence included; 0 trains on sentences."""
    mixed: bool = False
    """With `segment_length`, cut one document at that limit, the next at half of it, and so on down to sentences, so
    that short and long pairs are learned together: long ones alone need far more text. Validation uses long ones."""
    bad_utf8: str = choices("error", "replace", "skip")
    """What to do with a line that is not UTF-8."""
    max_length: int = within(256, 1)
    """Most subwords on a side of a training pair; `segment_length`, where it is set, takes its place."""
    too_long: str = choices("drop", "truncate", "error")
    """What to do with a longer pair; what was done is counted and said."""
    grammar: str = choices("sentences", "documents")
    """What the built-in grammar gives: sentences by themselves, or documents in which words depend on earlier ones."""
    sentences: int = within(20_000, 1)
    """Sentence pairs drawn from the built-in grammar for training; of documents whole ones, until there are enough."""
    valid_sentences: int = within(500, 1)
    """Sentence pairs drawn from the built-in grammar for validation; none of them is in the training data."""
    seed: int = within(1, 0, 2**63)
    """Decides which pairs the built-in grammar gives."""

    def __post_init__(self) -> None:
        if wrong := [weight for weight in self.weights if not 1e-6 <= weight <= 1e6]:
            raise ConfigError(
                f"data.weights has {wrong[0]}, but each must be more than 0, from 1e-6 to 1e6; leave out a file for 0"
            )


@dataclass(frozen=True, kw_only=True)
class VocabularyConfig:
    """The subwords, by sentencepiece."""

    kind: str = choices("unigram", "bpe")
    """How subwords are chosen."""
    size: int = within(800, 8, 2**24)
    """Subwords, special ones included; small corpora may have fewer."""
    shared: bool = True
    """One vocabulary for both languages; otherwise one of this size for each."""
    byte_fallback: bool = False
    """Spell unknown characters as bytes (256 more entries), so that nothing is unknown."""
    sampling: float = within(0.0, 0.0, 1.0)
    """Subword regularization of the training text: smoothing of the unigram lattice, or dropout of BPE merges."""
    copies: int = within(1, 1, 1001)
    """Encodings of the training text with `sampling`; epoch e reads copy e mod copies."""
    sentences: int = within(200_000, 1)
    """Most lines per side to choose subwords from. sentencepiece needs about 25 bytes of main memory per character."""
    source_model: str = ""
    """A sentencepiece model to use for the source instead of training one; for both sides where `shared`."""
    target_model: str = ""
    """A sentencepiece model for the target; needs `shared = false`."""


SITES = ("encoder", "decoder", "cross")  # of attention in a Transformer


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The Transformer. Each attention site (encoder, decoder, cross) may have a variant of its own."""

    hidden_size: int = within(128, 1)
    """Size of the residual stream; the heads share it equally."""
    num_heads: int = within(4, 1)
    """Heads of every attention. Must divide `hidden_size`."""
    encoder_layers: int = within(2, 1, 1025)
    decoder_layers: int = within(2, 1, 1025)
    ffn_size: int = within(256, 1)
    """Inner size of every feed-forward layer: the slots of a key-value memory."""
    variant: str = "rela-g"
    """Attention at all sites; `rectiformer variants` lists the names."""
    encoder_variant: str = ""
    """Self-attention of the encoder, if it differs."""
    decoder_variant: str = ""
    """Self-attention of the decoder, if it differs."""
    cross_variant: str = ""
    """Cross-attention, if it differs."""
    memory: str = "relu"
    """Feed-forward layers; docs/variants.md lists the names."""
    norm: str = choices("post", "pre")
    """LayerNorm after each residual sum, as in ReLA, or before each sublayer with one more at the end."""
    tie_embeddings: str = choices("all", "target", "none")
    """Embeddings that are one matrix: source, target, output (with a shared vocabulary); target and output; none."""
    positions: str = choices("sequence", "sentence")
    """What positions are counted in: all that a model reads at once, or each sentence of it, whose index then rotates
    queries and keys (model/rotary.py). A model of single sentences goes on with segments of documents nearly where it
    was (`training.init_from`)."""
    output_norm: str = ""
    """Norm of the concatenated heads, instead of the variant's own: "none", "rms", "rms-small", "gated-rms",
    "head-rms" (each head by itself) or "layer"."""
    norm_epsilon: float = added(within(1e-8, 1e-12))
    """What the output norm adds to the mean square, inside the root: 1e-8 in ReLA. With more, such as 0.01, rows of
    little weight stay small, where they would be brought to full size."""
    gamma_sharing: str = choices("head", "layer", "model", "fixed")
    """How many gammas reluformer learns: one per head, per layer or per model, or none ("fixed")."""
    gamma_init: float = within(0.0, 0.0)
    """Initial gamma; 0 for the variant's own: 4, so that attention adds little at first."""
    alpha_sharing: str = choices("head", "layer", "model", "fixed")
    """How many alphas entmax learns, likewise."""
    alpha_init: float = within(0.0, 0.0)
    """Initial alpha; 0 for the variant's own."""
    beta_sharing: str = choices("head", "layer", "model", "fixed")
    """How many betas threshold learns, likewise; threshold-diff learns as many lam."""
    beta_init: float = within(0.0, 0.0)
    """Initial beta; 0 for the variant's own: 1."""
    output_gate: str = added(choices("none", "head"))
    """Whether each head's output is multiplied with a sigmoid of the attention's input (2505.06708). It comes after the
    output norm; with `output_norm = "rms"` it takes the place of the gate in "gated-rms"."""
    qk_norm: bool = added(field(default=False))
    """Whether queries and keys have their length divided out, so that scores are cosines times a learned number per
    head (2010.04245). threshold has cosines anyway, and stays as it is."""
    attention_power: int = added(within(0, 0, 65))
    """The power p of relu-exp and threshold; 0 for the variant's own: 2."""
    center_keys: str = choices("auto", "yes", "no")
    """Whether the mean over a sentence is subtracted from its keys, in the encoder and in cross-attention. A softmax
    ignores whatever all scores of a row have in common; through a ReLU it switches whole rows on and off. "auto"
    centers where the variant does not train well otherwise: for reluformer."""
    score_bias: str = choices("none", "zero", "open")
    """A learned bias that each query of rectified attention adds to all its scores: none, one that starts at zero (a
    learned threshold: with centered keys a query could not attend to fewer keys otherwise), or one that starts at the
    variant's power p. For small scores [x + p]+^p behaves like a softmax, so attention starts open, whereas [x]+^p
    starts with half of the keys closed."""
    dropout: float = within(0.1, 0.0, 1.0)
    """Of embeddings and of what each sublayer adds."""
    attention_dropout: float = within(0.1, 0.0, 1.0)
    """Of attention weights."""
    ffn_dropout: float = within(0.1, 0.0, 1.0)
    """Of feed-forward activations."""

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"model.num_heads = {self.num_heads} does not divide model.hidden_size = {self.hidden_size}"
            )

    def variant_at(self, site: str) -> str:
        """The variant at an attention site: "encoder", "decoder" or "cross"."""
        return getattr(self, f"{site}_variant") or self.variant


GUIDED_INDUCTION = "shifted"
"""How guided alignment reads its head: at the decoder step that has the target word as its input. The head then knows
which word it links, which it would have to guess at the step that predicts the word (docs/alignment.md)."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The loop."""

    steps: int = within(2_000, 1)
    """Updates."""
    batch_tokens: int = within(2_000, 1)
    """Padded tokens of the longer side in one micro-batch."""
    grad_accumulation: int = within(1, 1)
    """Micro-batches summed into one update."""
    optimizer: str = choices("adam", "adamw")
    """Adam, with weight decay apart from the gradient in "adamw"."""
    schedule: str = choices("noam", "inverse-sqrt", "constant", "linear", "cosine", "wsd")
    """All rise linearly over `warmup` updates. noam, of update t: learning_rate * hidden_size^-0.5 *
    min(t^-0.5, t * warmup^-1.5). inverse-sqrt: then times (warmup / t)^0.5. constant: then stays. linear, cosine: then
    falls to 0 at the last of `steps`, in a line or half a cosine. wsd (warm-up, stable, decay): then stays, and falls
    to 0 in a line over the last `decay_fraction` of `steps`."""
    learning_rate: float = within(1.0, 0.0)
    """A factor for noam, the peak rate for the others."""
    warmup: int = within(500, 1)
    """Updates over which the rate rises."""
    decay_fraction: float = within(0.2, 0.0, 1.0)
    """Share of `steps` over which the rate of `wsd` falls."""
    beta1: float = within(0.9, 0.0, 1.0)
    beta2: float = within(0.98, 0.0, 1.0)
    epsilon: float = within(1e-8, 0.0)
    weight_decay: float = within(0.0, 0.0)
    clip_grad_norm: float = within(0.0, 0.0)
    """Largest norm of the gradient; 0 does not clip, as in both papers."""
    label_smoothing: float = within(0.1, 0.0, 1.0)
    """Label smoothing."""
    label_smoothing_over: str = choices("others", "all")
    """Where the smoothed mass goes: the V-1 other words, constant subtracted (ReLA), or all V words (fairseq)."""
    loss_mean: str = choices("token", "sentence")
    """Loss of an update: mean over its target tokens, or over sentences of their token means (ReLA)."""
    mass_penalty: float = within(0.0, 0.0)
    """Weight of ReLUFormer's |log row sum|, mean over attention modules."""
    entropy_penalty: float = within(0.0, 0.0)
    """Weight of ReLUFormer's max(entropy - 0.7 log n, 0), mean over attention modules."""
    entropy_of: str = choices("share", "raw")
    """What that entropy is of: each row of weights divided by its sum, or the weights as they are."""
    penalty_warmdown: float = within(0.0, 0.0)
    """Share of all steps over which the two weights fall to 0, in a straight line; 0 keeps them as they are."""
    anneal_from: int = within(0, 0, 65)
    """The power of relu-exp at first; 16 is near softmax. It falls to that of the model in a few steps, each to about
    0.7 of the one before; validation has the model's from the start. 0 trains with the model's throughout."""
    anneal_fraction: float = within(0.5, 0.0, 1.0)
    """Share of all updates over which the power falls."""
    balance_penalty: float = within(0.0, 0.0)
    """Weight of the balance of experts, where the memory has any."""
    guided_alignment: float = within(0.0, 0.0)
    """Weight of guided alignment (Garg et al. 2019): one head of cross-attention learns the word links of `data.links`,
    and `rectiformer align` reads them from it. 0 for none; 0.05 in the paper."""
    guided_layer: int = within(0, 0)
    """Decoder layer of that head, counted from 1; 0 for the last but one, or the only one."""
    guided_head: int = within(1, 1)
    """That head, counted from 1."""
    ema: float = within(0.0, 0.0, 1.0)
    """Decay of a moving average of the weights that is validated and kept instead of them; 0 for none."""
    average_checkpoints: int = within(1, 1)
    """Newest checkpoints averaged into the final weights."""
    precision: str = choices("fp32", "bf16")
    """Of matrix products; weights and sums stay in float32."""
    compile: str = choices("auto", "yes", "capture", "no")
    """On a GPU: compile the layers and capture steps as CUDA graphs, only capture, or neither. Compiling takes a minute
    or two, so "auto" does it for 10,000 steps and more, and only captures for fewer. On a CPU nothing is compiled."""
    parallel: str = choices("auto", "ddp", "fsdp")
    """With several ranks of torchrun: "ddp", the meaning of "auto", replicates the model; "fsdp" shards its rows. The
    micro-batches of an update are divided among the ranks, so `grad_accumulation` must be a multiple of their
    number."""
    device: str = choices("auto", "cpu", "cuda")
    init_from: str = ""
    """A run folder to start from: its best weights and, where no others are named, its subwords. The model must have
    the same sizes; everything else may differ. A run of longer segments needs a separator, which the subwords of text
    with documents have."""
    seed: int = within(1, 0, 2**63)
    """Decides initial weights, batch order and dropout."""


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Learning from a trained model, as `rectiformer convert` does it: in place of the text's next word, what the
    teacher expects there."""

    teacher: str = ""
    """A run folder of the same sizes and subwords, whose weights the model starts from; empty to learn from text."""
    teacher_step: int = within(0, 0)
    """The step of its checkpoint; 0 for its best."""
    align: float = within(0.5, 0.0, 1.0)
    """Share of all updates, at first, in which each attention learns to give the output of the teacher's for the same
    inputs; in the rest the model learns what next words the teacher expects."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Looking at held-out text while training."""

    every: int = within(500, 1)
    """Updates between validations."""
    metric: str = choices("bleu", "loss", "chrf")
    """Decides which checkpoint is best and when to stop early."""
    sentences: int = within(500, 1)
    """Most validation sentences to translate, the last segment whole; the loss is over all."""
    beam: int = within(1, 1, 1001)
    patience: int = within(0, 0)
    """Validations without a better `metric` before training stops; 0 never stops early."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept of a run."""

    every: int = within(500, 1)
    """Updates between checkpoints."""
    keep: int = within(2, 2)
    """Newest checkpoints kept, in addition to the best one."""
    async_save: bool = True
    """Go on training while a checkpoint is written from a copy in main memory; false: wait until it is on disk."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is logged while training."""

    every: int = within(50, 1)
    """Updates between lines of metrics.jsonl."""
    tensorboard: bool = False
    """Also write TensorBoard events into the run folder."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    data: DataConfig = field(default_factory=DataConfig)
    vocabulary: VocabularyConfig = field(default_factory=VocabularyConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if not self.training.guided_alignment:
            return
        for key, there, what in (
            ("guided_layer", self.model.decoder_layers, "the decoder has layers"),
            ("guided_head", self.model.num_heads, "its attention has heads"),
        ):
            if (found := getattr(self.training, key)) > there:
                raise ConfigError(f"training.{key} = {found}, but {what} 1 to {there}")

    @property
    def guided(self) -> tuple[int, int, str] | None:
        """Decoder layer and head that learn word links, from 0, and the induction that reads them; None if none do."""
        if not self.training.guided_alignment:
            return None
        layer = self.training.guided_layer or max(1, self.model.decoder_layers - 1)
        return layer - 1, self.training.guided_head - 1, GUIDED_INDUCTION
