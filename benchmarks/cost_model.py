"""The cost of an update on one GPU and on many: formulas fitted to the points in results/, and their predictions.

    python benchmarks/cost_model.py           print the tables
    python benchmarks/cost_model.py --write   put them into docs/cost-model.md and draw docs/images/scaling-*.svg

What is not measured is an argument: links, memory bandwidth, the share of cuBLAS's speed that layers reach.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))  # where the package is not installed
from cost_fits import (
    BACKWARD,
    Fit,
    Network,
    fit_attention,
    fit_collectives,
    fit_memory,
    fit_updates,
    per_flop,
    read,
)
from marian import SIZES

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- cost model: begin -->\n", "<!-- cost model: end -->"
BILLION = Network(hidden_size=2048, ffn_size=8192, encoder=9, decoder=9, vocabulary=32_000)
HALF, FULL = 2, 4
"""Bytes of an element in 16 bits and in float32."""
OPTIMIZER_BYTES = 28
"""Traffic of Adam per parameter in float32: weight and two moments, read and written, and the gradient."""


@dataclass(frozen=True)
class Machine:
    """One GPU, and what connects it to others."""

    matmul: float
    """FLOP/s of matrix products, as layers reach them."""
    memory: float
    """Bytes per second."""
    attention: dict[str, float]
    """Seconds per FLOP of attention, forward and backward together, rectified and softmax."""
    element_bytes: float
    """Traffic outside matrix products, per element of the residual stream and sublayer."""
    near: float
    far: float
    node: int

    def seconds(
        self, network: Network, length: float, sequences: float, variant: str, recompute: bool = False
    ) -> float:
        """Seconds of an update on one GPU; with `recompute` only the input of each layer is kept."""
        tokens, passes = length * sequences, 4 / 3 if recompute else 1
        products = network.product_flops(tokens) / self.matmul
        traffic = self.element_bytes * network.elements(tokens) / self.memory
        attention = network.attention_flops(length, sequences) * self.attention[variant]
        attention *= (2 + BACKWARD) / (1 + BACKWARD) if recompute else 1
        return passes * (products + traffic) + attention + OPTIMIZER_BYTES * network.weights / self.memory

    def link(self, ranks: int) -> float:
        """Bytes per second between ranks: within one node, or the slowest link between nodes."""
        return self.near if ranks <= self.node else self.far


def build_machine(options: argparse.Namespace, fits: dict[str, Fit]) -> tuple[Machine, Fit]:
    """The GPU of the measurements, its last unknown from an update of a base model; a language model is held out."""
    (cublas,) = [point["tflops"]["cublas"] for point in read("kernels-h200.jsonl") if point["section"] == "matmul"]
    speeds = {variant: per_flop(each) for variant, each in fits.items()}
    bare = Machine(
        options.share * cublas * 1e12, options.memory * 1e12, speeds, 0.0, options.near * 1e9, options.far * 1e9, 8
    )
    size, points = SIZES["base"], {point["contestant"]: point for point in read("training-h200.jsonl")}
    base = Network(size["hidden_size"], size["ffn_size"], size["layers"], size["layers"], size["vocabulary"])
    own, tokens = points["rela-g"], 384 * 32
    left = own["ms"] / 1e3 - bare.seconds(base, 32, 384, "rectified")
    machine = replace(bare, element_bytes=left * bare.memory / base.elements(tokens))
    (model,) = [point for point in read("huggingface-training-h200.jsonl") if point["contestant"] == "rectified"]
    other = Network(model["hidden_size"], model["ffn_size"], 0, model["layers"], model["vocabulary"], False, 3)
    predicted = machine.seconds(other, model["length"], model["batch"], "rectified")
    errors = [predicted / (model["ms"] / 1e3) - 1]
    return machine, Fit("update on an H200", np.array([machine.element_bytes]), 1, errors)


def gradient_bytes(network: Network, ranks: int) -> dict[str, float]:
    """Bytes that a rank sends for its float32 gradients; sharded, also for 16-bit weights, in both passes."""
    share = (ranks - 1) / ranks * network.weights
    return {"data parallel": 2 * FULL * share, "sharded": (2 * HALF + FULL) * share}


def context_bytes(network: Network, length: float, ranks: int, recompute: bool = False) -> dict[str, float]:
    """Bytes that a rank sends for attention over a 16-bit sequence that `ranks` share, in both passes."""
    share, elements = (ranks - 1) / ranks, network.attentions * length * network.hidden_size
    forward = {"rectified": share * (HALF + FULL), "softmax": share * 2 * HALF}
    backward = {"rectified": share * (HALF + FULL), "softmax": 2 * (share * HALF + FULL)}
    return {variant: ((1 + recompute) * forward[variant] + backward[variant]) * elements for variant in forward}


def predict_sentences(machine: Machine, gpus: int) -> list[str]:
    """A table: sentences of 32 tokens, by tokens per GPU."""
    rows = ["| tokens per GPU | one GPU, s | all-reduce, s | sharded, s | tokens/s, all-reduce | vs. one GPU |"]
    rows.append("| --- " * 6 + "|")
    for tokens in (4096, 16_384, 65_536):
        alone = machine.seconds(BILLION, 32, tokens / 32, "rectified")
        sending = {name: size / machine.link(gpus) for name, size in gradient_bytes(BILLION, gpus).items()}
        total = alone + sending["data parallel"]
        cells = [f"{tokens:,}", f"{alone:.2f}", *(f"{seconds:.2f}" for seconds in sending.values())]
        rows.append(f"| {' | '.join(cells)} | {gpus * tokens / total / 1e6:.1f} million | {alone / total:.0%} |")
    return rows


@dataclass(frozen=True)
class Document:
    """An update with one document that `ranks` GPUs share."""

    ranks: int
    compute: dict[str, float]
    sending: dict[str, float]

    @property
    def total(self) -> dict[str, float]:
        """Rectified: compute, then send, as it is built. Softmax: a ring that hides all sending behind its compute."""
        ring = max(self.compute["softmax"], self.sending["softmax"])
        return {"rectified": self.compute["rectified"] + self.sending["rectified"], "softmax": ring}


def share_document(machine: Machine, length: float, ranks: int) -> Document:
    sizes = context_bytes(BILLION, length, ranks, recompute=True)
    return Document(
        ranks,
        {variant: machine.seconds(BILLION, length, 1, variant, recompute=True) / ranks for variant in sizes},
        {variant: size / machine.link(ranks) for variant, size in sizes.items()},
    )


def predict_documents(machine: Machine, gpus: int, length: int) -> list[str]:
    """A table: documents of `length` tokens per side, by the number of GPUs that share one."""
    rows = [
        "| GPUs per document | documents at once | rectified: compute + sending, s | "
        "ring softmax: compute, sending, s | tokens/s, rectified | vs. ring softmax |"
    ]
    rows.append("| --- " * 6 + "|")
    for ranks in (8, 16, 64, 256, gpus):
        found = share_document(machine, length, ranks)
        ours = f"{found.compute['rectified']:.1f} + {found.sending['rectified']:.1f}"
        ring = f"{found.compute['softmax']:.1f}, {found.sending['softmax']:.1f}"
        speed = gpus / ranks * length / found.total["rectified"]
        ratio = found.total["softmax"] / found.total["rectified"]
        rows.append(f"| {ranks:,} | {gpus // ranks:,} | {ours} | {ring} | {speed / 1e6:.2f} million | {ratio:.2f} |")
    return rows


def report(options: argparse.Namespace) -> tuple[str, Machine]:
    """All tables, as Markdown."""
    kernels, here = read("kernels-h200.jsonl"), read("scaling-cpu.jsonl")
    attention = {"rectified": fit_attention("ours", kernels), "softmax": fit_attention("cudnn", kernels)}
    machine, update = build_machine(options, attention)
    fits = [*attention.values(), update, fit_updates([point for point in here if point["benchmark"] == "update"])]
    collectives = [point for point in here if point["benchmark"] == "collective"]
    fits += [fit_collectives(collectives, ranks) for ranks in sorted({point["ranks"] for point in collectives})]
    memory = fit_memory(read("memory-h200.jsonl"))
    fits.append(memory)
    bytes_sent = context_bytes(BILLION, options.length, 8, recompute=True)
    held = memory.costs[1] * BILLION.elements(options.length) / 8
    inputs = HALF * BILLION.hidden_size * (BILLION.encoder + BILLION.decoder) * options.length / 8
    lines = [
        "| what is timed | points fitted | points held out | mean error there | largest |",
        "| --- " * 5 + "|",
        *(each.row() for each in fits),
        "",
        f"Rectified attention over both passes: {1e-12 / machine.attention['rectified']:.0f} TFLOP/s; softmax "
        f"{1e-12 / machine.attention['softmax']:.0f}. Traffic outside matrix products: {machine.element_bytes:.0f} "
        "bytes per element of the residual stream and sublayer.",
        "",
        f"Sentences of 32 tokens, {BILLION.weights / 1e9:.2f} billion weights, {options.gpus:,} GPUs:",
        "",
        *predict_sentences(machine, options.gpus),
        "",
        f"Documents of {options.length:,} tokens per side, {options.gpus:,} GPUs:",
        "",
        *predict_documents(machine, options.gpus, options.length),
        "",
        f"Eight GPUs that share one such document each send {bytes_sent['rectified'] / 1e9:.0f} GB per update, those "
        f"of a ring {bytes_sent['softmax'] / 1e9:.0f} GB. Each would hold {held / 1e9:.0f} GB of activations, or the "
        f"inputs of all layers, {inputs / 1e9:.0f} GB, and one layer's activations at a time.",
        "",
    ]
    return "\n".join(lines), machine


def draw(machine: Machine, options: argparse.Namespace, folder: Path) -> None:
    """Seconds per update against the GPUs that share a document, and the share of sending against its length."""
    from rectiformer.studies.figures import collect_lines, draw_panels

    ranks = [2**power for power in range(3, 11)]
    lengths = [2**power for power in range(10, 21)]
    names = {"softmax": "ring softmax", "rectified": "rectified"}
    shared = {count: share_document(machine, options.length, count) for count in ranks}
    near = {length: share_document(machine, length, machine.node) for length in lengths}
    seconds = collect_lines((said, x, each.total[name]) for name, said in names.items() for x, each in shared.items())
    draw_panels(
        folder / "scaling-gpus.svg",
        "Time of an update by GPUs per document",
        ["a document of 1,048,576 tokens"],
        [seconds],
        "GPUs per document",
        "seconds per update",
        log_x=True,
        log_y=True,
    )
    parts = {
        x: {name: each.sending[name] / (each.sending[name] + each.compute[name]) for name in names}
        for x, each in near.items()
    }
    sending = collect_lines((said, x, parts[x][name]) for name, said in names.items() for x in parts)
    draw_panels(
        folder / "scaling-length.svg",
        "Share of sending by document length",
        ["a document on 8 GPUs"],
        [sending],
        "tokens per document",
        "share of sending",
        log_x=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.85, help="of cuBLAS's measured speed that products reach")
    parser.add_argument("--memory", type=float, default=4.8, help="TB/s of a GPU's memory")
    parser.add_argument("--near", type=float, default=450.0, help="GB/s a GPU sends within a node of 8")
    parser.add_argument("--far", type=float, default=50.0, help="GB/s a GPU sends to other nodes")
    parser.add_argument("--gpus", type=int, default=1024)
    parser.add_argument("--length", type=int, default=1 << 20, help="tokens per side of a document")
    parser.add_argument("--write", action="store_true", help="renew docs/cost-model.md and its figures")
    options = parser.parse_args()
    text, machine = report(options)
    print(text, end="")
    if options.write:
        page = ROOT / "docs" / "cost-model.md"
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        page.write_text(f"{before}{BEGIN}{text}{END}{after}", encoding="utf-8")
        draw(machine, options, ROOT / "docs" / "images")


if __name__ == "__main__":
    main()
