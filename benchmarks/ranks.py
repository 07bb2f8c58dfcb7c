"""Training on several gloo ranks of this machine: time of an update, and bytes that a rank sends for it.

    python benchmarks/ranks.py --out benchmarks/results/ranks.jsonl

An update has four micro-batches of 32 sentences of 32 tokens per side, however many ranks share them. `bytes_sent`
counts the tensors handed to collectives: in an all-gather or a reduce-scatter among R ranks each sends R - 1 of R
parts, and an all-reduce is one of either. `bytes_derived` is the formula of docs/scaling.md. With more ranks than
cores the times say what the engines cost, not what they gain.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))  # where the package is not installed
from marian import SIZES, our_config
from points import add_result_options, append_point, describe_machine
from training import draw_batch

from rectiformer.config import Config, TrainingConfig
from rectiformer.distributed.ranks import Ranks
from rectiformer.distributed.sharding import UpdateShare
from rectiformer.model.transformer import Transformer
from rectiformer.train.update import Updater

MICRO_BATCHES, SENTENCES, LENGTH = 4, 32, 32


PARTS_SENT = {
    "all_reduce": 2,
    "all_gather_into_tensor": 1,  # FSDP2 of older torch
    "reduce_scatter_tensor": 1,
    "all_gather_single": 1,  # of newer
    "reduce_scatter_single": 1,
}
"""How often each part but its own leaves a rank, by the name of the collective."""


class Counter:
    """Bytes that this rank hands on in collectives of torch.distributed."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.total = ranks, 0
        for name, times in PARTS_SENT.items():
            if hasattr(dist, name):
                setattr(dist, name, self._counted(getattr(dist, name), times))

    def _counted(self, collective: Any, times: int) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            tensors = [each for each in (*arguments, *named.values()) if isinstance(each, torch.Tensor)]
            whole = max(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.total += times * whole * (self.ranks - 1) // self.ranks
            return collective(*arguments, **named)

        return call


def derive_bytes(model: Transformer, engine: str, ranks: int) -> float:
    """What a rank sends in one update, parameters of float32."""
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    layers = 4 * sum(parameter.numel() for part in (model.encoder, model.decoder) for parameter in part.parameters())
    share = (ranks - 1) / ranks
    if engine == "ddp":
        return 2 * share * whole
    own = MICRO_BATCHES // ranks
    return share * (own * (whole + layers) + whole)  # layers are gathered again on the way back


def work(rank: int, ranks: int, engine: str, size: str, updates: int, meet: str, out: Path | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=ranks)
    group = Ranks(rank, ranks).new_group()
    config, vocabulary = our_config(SIZES[size], "rela-g"), SIZES[size]["vocabulary"]
    torch.manual_seed(1)
    model = Transformer(config, vocabulary, vocabulary).train()
    derived = derive_bytes(model, engine, ranks)
    settings = Config(
        model=config, training=TrainingConfig(parallel=engine, compile="no", grad_accumulation=MICRO_BATCHES)
    )
    updater = build(model, settings, group, vocabulary)
    batches = [draw_batch(SENTENCES, LENGTH, vocabulary) for _ in range(MICRO_BATCHES // ranks)]
    share = UpdateShare(
        range(rank, MICRO_BATCHES, ranks), MICRO_BATCHES * SENTENCES * LENGTH, MICRO_BATCHES * SENTENCES
    )
    counter = Counter(ranks)
    updater.update(1, batches, share)
    sent, times = counter.total, []
    for step in range(2, 2 + updates):
        start = time.perf_counter()
        updater.update(step, batches, share)
        times.append(time.perf_counter() - start)
    if rank == 0:
        point = {"size": size, "engine": engine, "ranks": ranks, "update_ms": round(1000 * median(times), 2)}
        point |= {"target_tokens": share.tokens, "bytes_sent": sent, "bytes_derived": round(derived)}
        print(json.dumps(point), flush=True)
        append_point(out, {**point, **describe_machine()})
    dist.barrier()
    dist.destroy_process_group()


def build(model: Transformer, settings: Config, ranks: Ranks, vocabulary: int) -> Updater:
    cpu = torch.device("cpu")
    if settings.training.parallel == "ddp" or ranks.world_size == 1:
        return Updater(model, settings, cpu, ranks)
    from rectiformer.train.fsdp import ShardedUpdater

    with torch.device("meta"):
        eval_model = Transformer(settings.model, vocabulary, vocabulary)
    return ShardedUpdater(model, settings, cpu, ranks, eval_model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_result_options(parser)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "base"], choices=SIZES)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--updates", type=int, default=20, help="timed ones, after one that is not")
    options = parser.parse_args()
    for size in options.sizes:
        for ranks in options.ranks:
            for engine in ("ddp", "fsdp")[: 1 if ranks == 1 else 2]:
                with tempfile.TemporaryDirectory() as folder:
                    arguments = (ranks, engine, size, options.updates, f"{folder}/meet", options.out)
                    torch.multiprocessing.start_processes(work, arguments, nprocs=ranks, start_method="fork")


if __name__ == "__main__":
    main()
