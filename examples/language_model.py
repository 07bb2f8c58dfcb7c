"""A small GPT with any attention of rectiformer, from text to samples, in one file.

    python examples/language_model.py                        # softmax and rela-g on built-in text: minutes on a CPU
    python examples/language_model.py softmax rela-g relu2 relu2-open threshold sigmoid
    python examples/language_model.py softmax rela-g --size small --text train.en.xz --valid valid.en.xz --out lm.jsonl
    python examples/language_model.py --table lm.jsonl       # what was measured, as a table

The model is a pre-norm decoder with RMSNorm on queries and keys and rotary positions. Only its attention differs: every
variant reads the same batches in the same order, while the learning rate rises and then falls to 0. NAME-open starts a
rectified variant with no key closed: [x + p]+^p, where each query learns to move the p (docs/variants.md, Score bias).
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rectiformer import VARIANTS, AttentionStats, attention, attention_stats
from rectiformer.config import VocabularyConfig
from rectiformer.errors import ConfigError, DataError, RectiformerError
from rectiformer.model.norms import build_output_norm
from rectiformer.model.projection import build_learned, split_heads
from rectiformer.model.rotary import Rotation, apply_rotary, pair_up
from rectiformer.text.documents import DOCUMENT_MARKER
from rectiformer.text.grammar import draw_documents
from rectiformer.text.lines import read_lines
from rectiformer.text.vocabulary import Vocabulary

OPEN = "-open"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MEASURES = 10  # of a training, evenly spread; the last is at its end
COLUMNS = {
    "validation loss": ("loss", ".3f"),
    "perplexity": ("perplexity", ".2f"),
    "exact zeros": ("zeros", ".1%"),
    "null rows": ("null_rows", ".1%"),
    "tokens/s": ("tokens_per_second", ",.0f"),
}
"""Title: key and format of what is measured."""


@dataclass(frozen=True)
class Size:
    """A model and how it is trained."""

    layers: int
    hidden_size: int
    num_heads: int
    vocabulary_size: int
    length: int  # tokens of a sequence
    batch_size: int  # sequences per update
    updates: int
    learning_rate: float  # the peak, after a twentieth of the updates


SIZES = {
    "toy": Size(2, 128, 4, vocabulary_size=500, length=64, batch_size=16, updates=300, learning_rate=4e-3),
    "small": Size(8, 512, 8, vocabulary_size=8_000, length=512, batch_size=64, updates=2_400, learning_rate=2e-3),
    "base": Size(12, 768, 12, vocabulary_size=8_000, length=512, batch_size=64, updates=2_400, learning_rate=1e-3),
}
"""0.5, 29 and 91 million parameters; the larger two are for a GPU."""


class Attention(nn.Module):
    """Causal self-attention of one variant, with QK-norm and rotary positions."""

    def __init__(self, size: Size, name: str) -> None:
        super().__init__()
        row = VARIANTS[name.removesuffix(OPEN)]
        self.row, self.heads, head_dim = row, size.num_heads, size.hidden_size // size.num_heads
        self.qkv = nn.Linear(size.hidden_size, 3 * size.hidden_size, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)
        self.output_norm = build_output_norm(row.output_norm, size.hidden_size, size.num_heads)  # softmax has none
        self.output = nn.Linear(size.hidden_size, size.hidden_size, bias=False)
        self.learned = build_learned(row, "head", size.num_heads, {}, row.learned_init or None)  # such as beta
        self.score_bias = nn.Linear(size.hidden_size, size.num_heads) if name.endswith(OPEN) else None
        self.seen: list[AttentionStats] | None = None  # a list, while somebody looks

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, -1))  # [B, H, T, D]
        q = apply_rotary(self.q_norm(q.float()), rotation, self.row.views).type_as(v)
        k = apply_rotary(self.k_norm(k.float()), rotation, self.row.views).type_as(v)
        if self.score_bias is not None:  # one dimension of q and k carries it, so that kernels need not know
            bias = self.score_bias(x).mT[..., None].type_as(v)
            q = torch.cat([bias, q[..., 1:]], -1)
            k = torch.cat([torch.full_like(bias, math.sqrt(k.shape[-1])), k[..., 1:]], -1)
        options = {} if self.learned is None else self.learned.values()
        mixed = attention(q, k, v, self.row.name, causal=True, **options)
        if self.seen is not None:
            self.seen.append(attention_stats(q, k, self.row.name, causal=True, **options))
        return self.output(self.output_norm(mixed.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    def __init__(self, size: Size, name: str) -> None:
        super().__init__()
        self.attention = Attention(size, name)
        self.up = nn.Linear(size.hidden_size, 4 * size.hidden_size, bias=False)
        self.down = nn.Linear(4 * size.hidden_size, size.hidden_size, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(size.hidden_size) for _ in range(2))

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        x = x + self.attention(self.norms[0](x), rotation)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Token ids [B, T] to logits [B, T, V] of the token that follows each."""

    def __init__(self, size: Size, name: str, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size.hidden_size)  # and the output projection
        self.blocks = nn.ModuleList(Block(size, name) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden_size)
        pairs = size.hidden_size // size.num_heads // 2
        angles = torch.arange(size.length)[None, None, :, None] * 10_000 ** -(torch.arange(pairs) / pairs)
        for part, values in pair_up(angles.cos(), angles.sin(), size.hidden_size // size.num_heads)._asdict().items():
            self.register_buffer(part, values, persistent=False)
        self.init_weights(size)

    @torch.no_grad()
    def init_weights(self, size: Size) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                last = name.endswith(("output.weight", "down.weight"))  # of what is added to the residual stream
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * size.layers) if last else 0.02)
        for block in self.blocks:
            if (bias := block.attention.score_bias) is not None:
                nn.init.zeros_(bias.weight)
                nn.init.constant_(bias.bias, block.attention.row.power)

    def forward(self, ids: Tensor) -> Tensor:
        rotation = Rotation(self.cos[:, :, : ids.shape[1]], self.sin[:, :, : ids.shape[1]])
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, rotation)
        return F.linear(self.norm(x), self.embedding.weight)


@dataclass(frozen=True)
class Corpus:
    """Text as one row of token ids; each line ends with an end-of-sentence id, a document with a second one."""

    name: str
    vocabulary: Vocabulary
    train: Tensor
    valid: Tensor

    @property
    def unigram_loss(self) -> float:
        """Loss of knowing how frequent each token is, and nothing else."""
        counts = torch.bincount(self.train, minlength=self.vocabulary.size) + 1.0
        return -(counts / counts.sum()).log()[self.valid].mean().item()


def read_corpus(options: argparse.Namespace, size: Size) -> Corpus:
    """The user's files, or English of the built-in grammar; without validation text, the last twentieth is taken."""
    if options.text:
        train, valid = (list(read_files(files)) for files in (options.text, options.valid))
    else:
        train, valid = (list(generate(*split)) for split in ((3_000, "train"), (300, "valid")))
    if not valid:
        train, valid = train[: len(train) * 19 // 20], train[len(train) * 19 // 20 :]
    sample = train[:: max(1, len(train) // 100_000)]
    vocabulary = Vocabulary.train(sample, VocabularyConfig(size=size.vocabulary_size, kind="bpe"))
    ids = [encode(vocabulary, lines) for lines in (train, valid)]
    if min(map(len, ids)) <= size.length:
        raise DataError(
            f"{len(ids[0])} tokens to train with and {len(ids[1])} to validate are too few; give longer --text"
        )
    return Corpus(" ".join(Path(file).name for file in options.text) or "grammar", vocabulary, *ids)


def read_files(files: list[str]) -> Iterator[str]:
    for file in files:
        yield from ("" if line == DOCUMENT_MARKER else line or "" for line in read_lines(file, bad_utf8="replace"))


def generate(documents: int, split: str) -> Iterator[str]:
    for document in draw_documents(documents, seed=1, split=split):
        yield from (*(pair.target for pair in document), "")


def encode(vocabulary: Vocabulary, lines: list[str]) -> Tensor:
    ids = (id for line in vocabulary.encode_all(lines) for id in (*line, vocabulary.eos))
    return torch.from_numpy(np.fromiter(ids, np.int64)).to(DEVICE)


def learning_rate(size: Size, update: int) -> float:
    """Rising linearly over a twentieth of the updates, then falling linearly to 0."""
    rising = max(1, size.updates // 20)
    return size.learning_rate * min((update + 1) / rising, (size.updates - update) / max(1, size.updates - rising))


def loss_of(model: Any, rows: Tensor) -> Tensor:
    """Mean loss of each token [B, T + 1] given those before it, in nats."""
    with torch.autocast(DEVICE, torch.bfloat16, enabled=rows.is_cuda):
        logits = model(rows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def train(name: str, corpus: Corpus, size: Size, options: argparse.Namespace) -> Iterator[tuple[GPT, dict[str, Any]]]:
    """Train one variant to the end; yields the model and what is measured of it, `MEASURES` times."""
    torch.manual_seed(options.seed)
    model = GPT(size, name, corpus.vocabulary.size).to(DEVICE)
    torch.compiler.reset()  # of the variants before, which count towards its limit of recompilations
    compiled = torch.compile(model) if options.compile else model
    groups = [
        {"params": [weight for weight in model.parameters() if weight.dim() == 2], "weight_decay": 0.1},
        {"params": [weight for weight in model.parameters() if weight.dim() != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=size.learning_rate, betas=(0.9, 0.95), fused=DEVICE == "cuda")
    draws = torch.Generator().manual_seed(options.seed)
    window = torch.arange(size.length + 1, device=DEVICE)
    ends = [math.ceil(size.updates * part / MEASURES) for part in range(1, MEASURES + 1)]
    seconds, clock = 0.0, time.perf_counter()
    for update in range(size.updates):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(size, update)
        starts = torch.randint(len(corpus.train) - size.length, (size.batch_size, 1), generator=draws)
        for part in starts.to(DEVICE).chunk(options.grad_accumulation):
            loss = loss_of(compiled, corpus.train[part + window])
            (loss * len(part) / size.batch_size).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if update + 1 in ends:
            found = {"update": update + 1, "training_loss": loss.item(), "tokens_per_second": 0.0}
            if update >= ends[0]:  # what came before has warm-up and compiling in it
                seconds += time.perf_counter() - clock
                found["tokens_per_second"] = (update + 1 - ends[0]) * size.batch_size * size.length / seconds
            yield model, found | measure(model, corpus, size)
            clock = time.perf_counter()


@torch.no_grad()
def measure(model: GPT, corpus: Corpus, size: Size) -> dict[str, Any]:
    """Loss on the validation text; shares of visible weights that are exactly 0 and of rows that are null."""
    starts = torch.arange(0, len(corpus.valid) - size.length, size.length, device=DEVICE)
    rows = corpus.valid[starts[:, None] + torch.arange(size.length + 1, device=DEVICE)]
    loss = sum(loss_of(model, part).item() * len(part) for part in rows.split(size.batch_size)) / len(rows)
    stats: list[AttentionStats] = []
    for block in model.blocks:
        block.attention.seen = stats
    loss_of(model, rows[:8])
    for block in model.blocks:
        block.attention.seen = None
    zeros = torch.stack([found.sparsity for found in stats]).mean().item()
    null_rows = torch.stack([found.null_rate for found in stats]).mean().item()
    return {"loss": loss, "perplexity": math.exp(loss), "zeros": zeros, "null_rows": null_rows}


@torch.no_grad()
def sample(model: GPT, corpus: Corpus, size: Size, tokens: int, seed: int) -> str:
    """Lines that the model makes up, at temperature 0.8."""
    draws = torch.Generator(DEVICE).manual_seed(seed)
    ids = torch.tensor([[corpus.vocabulary.eos]], device=DEVICE)
    for _ in range(tokens):
        weights = F.softmax(model(ids[:, -size.length :])[:, -1].float() / 0.8, -1)
        ids = torch.cat([ids, torch.multinomial(weights, 1, generator=draws)], 1)
    lines = groupby(ids[0].tolist(), key=lambda id: id == corpus.vocabulary.eos)
    return "\n".join(f"  {corpus.vocabulary.decode(list(line))}" for ends, line in lines if not ends)


def describe() -> dict[str, Any]:
    """What a figure needs to be trusted: command, commit, device."""
    words = sys.argv[1:]
    if "--out" in words:
        del words[(place := words.index("--out")) : place + 2]
    commit = os.environ.get("RECTIFORMER_COMMIT") or subprocess.getoutput("git describe --always --dirty")
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    command = " ".join(["python", "examples/language_model.py", *words])
    return {"command": command, "commit": commit, "device": device, "torch": torch.__version__}


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """What trainings have appended to a file."""
    for number, line in enumerate(read_lines(str(path)), 1):
        try:
            yield json.loads(line or "")
        except ValueError as error:
            raise DataError(f"{path}:{number} is no line of JSON that --out wrote; remove it") from error


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of the finished trainings of each setting, with means over seeds."""
    setting = ("text", *(field.name for field in fields(Size)), "device", "torch", "commit")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["update"] == row["updates"]:
            groups.setdefault(tuple(row[key] for key in setting), []).append(row)
    text = []
    for key, same in groups.items():
        text += [", ".join(f"{name} {value}" for name, value in zip(setting, key, strict=True)) + ".", ""]
        text += [f"| variant | parameters | seeds | {' | '.join(COLUMNS)} |", "| --- " * (3 + len(COLUMNS)) + "|"]
        for name in dict.fromkeys(row["variant"] for row in same):
            seeds = {row["seed"]: row for row in same if row["variant"] == name}.values()  # the last of each
            cells = [format(sum(row[key] for row in seeds) / len(seeds), spec) for key, spec in COLUMNS.values()]
            millions = next(iter(seeds))["parameters"] / 1e6
            text.append(f"| {name} | {millions:.2f} M | {len(seeds)} | {' | '.join(cells)} |")
        text += ["", *(f"`{command}`" for command in dict.fromkeys(row["command"] for row in same)), ""]
    return "\n".join(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", help="names of rectiformer.VARIANTS; a rectified one may end in -open")
    parser.add_argument("--text", nargs="+", default=[], metavar="FILE", help="plain, .gz or .xz; default: the grammar")
    parser.add_argument("--valid", nargs="+", default=[], metavar="FILE", help="default: the end of --text")
    parser.add_argument("--size", choices=SIZES, default="toy", help="the defaults of what follows")
    for field in fields(Size):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=field.type)
    parser.add_argument("--grad-accumulation", type=int, default=1, help="parts of a batch, one after the other")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=DEVICE == "cuda")
    parser.add_argument("--out", type=Path, help="JSON lines to append to, as training goes on")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="print the table of such files and stop")
    options = parser.parse_args()
    known = {name for name, row in VARIANTS.items() if row.has_weights}
    known |= {name + OPEN for name in known if VARIANTS[name].power}
    if unknown := sorted({*options.variants} - known):
        parser.error(f"unknown variant {unknown[0]!r}; there are {', '.join(sorted(known))}")
    return options


def main() -> None:
    options = parse()
    if options.table:
        print(table([row for path in options.table for row in read_rows(path)]))
        return
    given = {field.name: getattr(options, field.name) for field in fields(Size)}
    size = replace(SIZES[options.size], **{name: value for name, value in given.items() if value is not None})
    if size.updates < 2 * MEASURES:
        raise ConfigError(
            f"--updates {size.updates} is too few to measure {MEASURES} times; give {2 * MEASURES} or more"
        )
    corpus = read_corpus(options, size)
    print(f"{corpus.name}: {len(corpus.train):,} tokens to train with, {len(corpus.valid):,} to validate with")
    print(f"a model that knows only how frequent each token is has a loss of {corpus.unigram_loss:.3f}", flush=True)
    rows = []
    for name in options.variants or ["softmax", "rela-g"]:
        for model, found in train(name, corpus, size, options):
            about = {"variant": name, "seed": options.seed, "text": corpus.name, "unigram_loss": corpus.unigram_loss}
            about |= {"parameters": sum(weight.numel() for weight in model.parameters()), **asdict(size)}
            rows.append({**about, **found, **describe()})
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
            shown = [f"{title} {format(found[key], spec)}" for title, (key, spec) in COLUMNS.items()]
            print(f"{name} {found['update']:,}/{size.updates:,}: {', '.join(shown)}", flush=True)
        print(sample(model, corpus, size, tokens=100, seed=options.seed), flush=True)
    print("\n" + table(rows))


if __name__ == "__main__":
    try:
        main()
    except RectiformerError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
