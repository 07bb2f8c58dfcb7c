"""Training speed of a Llama-like language model with rectified attention vs. SDPA, through Hugging Face's interface.

    python benchmarks/huggingface_training.py --out benchmarks/results/huggingface-training.jsonl

All contestants have the same random weights: 8 layers, hidden size 2,048. One step is forward, backward and fused AdamW
on 4 sequences of 8,192 random tokens, bfloat16. They run one after the other in this process; a point is the median
over turns.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))  # where the package is not installed
from kernel_timing import seconds_of
from points import add_result_options, append_point, describe_machine

from rectiformer.integrations.transformers import register

CONTESTANTS = ("sdpa", "sdpa-cudnn", "rectified")
SIZES = {
    "full": {"layers": 8, "hidden_size": 2048, "ffn_size": 5632, "vocabulary": 32_000, "length": 8192, "batch": 4},
    "tiny": {"layers": 2, "hidden_size": 64, "ffn_size": 128, "vocabulary": 100, "length": 16, "batch": 2},
}


def build_model(name: str, size: dict[str, int], head_size: int, device: str) -> Any:
    """A random model with the attention of a contestant; bfloat16 on a GPU."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    heads = size["hidden_size"] // head_size
    config = LlamaConfig(
        vocab_size=size["vocabulary"],
        hidden_size=size["hidden_size"],
        intermediate_size=size["ffn_size"],
        num_hidden_layers=size["layers"],
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=size["length"],
        use_cache=False,
    )
    torch.manual_seed(1)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=name.removesuffix("-cudnn"))
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32).train()


def training_step(name: str, size: dict[str, int], head_size: int, device: str) -> Callable[[], torch.Tensor]:
    """One step of a contestant, which returns its loss."""
    model = build_model(name, size, head_size, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(size["vocabulary"], (size["batch"], size["length"]), generator=generator).to(device)
    pinned = name.endswith("-cudnn")

    def step() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if pinned else nullcontext():
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measure(name: str, options: argparse.Namespace) -> dict[str, float] | None:
    """Milliseconds per step, peak device memory and the last loss; None, with the reason printed, where it fails."""
    cuda = options.device == "cuda"
    try:
        step = training_step(name, SIZES[options.size], options.head_size, options.device)
        for _ in range(2):
            step()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        turns = sorted(seconds_of(step, options.repeats, options.device) for _ in range(options.turns))
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
        loss = step().item()
    except Exception as error:
        print(f"{name}: left out: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", flush=True)
        return None
    finally:
        step = None
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    times = {"ms": turns[len(turns) // 2] * 1e3, "ms_least": turns[0] * 1e3, "ms_most": turns[-1] * 1e3}
    return {**times, "peak_gib": peak, "loss": loss}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--repeats", type=int, default=2, help="steps in a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add_result_options(parser)
    return parser.parse_args()


def main() -> None:
    options = parse()
    register()
    size = SIZES[options.size]
    fastest: float | None = None  # of SDPA's backends, in milliseconds
    for name in sorted(options.contestants, key=CONTESTANTS.index):
        found = measure(name, options)
        if found is None:
            continue
        if name.startswith("sdpa"):
            fastest = min(found["ms"], fastest or found["ms"])
        ratio = fastest / found["ms"] if fastest and name == "rectified" else None
        speed = size["batch"] * size["length"] / found["ms"] * 1e3
        setting = {"benchmark": "language model", "contestant": name, **size, "head_size": options.head_size}
        machine = describe_machine(options.device)
        append_point(options.out, {**setting, **found, "tokens_per_second": speed, "ratio": ratio, **machine})
        peak = "" if found["peak_gib"] is None else f"  {found['peak_gib']:6.1f} GiB"
        compared = "" if ratio is None else f"  {ratio:5.2f}x"
        print(f"{name:12} {found['ms']:9.2f} ms  {speed / 1e3:8.2f}k tokens/s{peak}{compared}", flush=True)


if __name__ == "__main__":
    main()
