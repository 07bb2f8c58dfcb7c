"""Feed-forward layers as key-value memories: what weighs the slots, how many there are, and what they do."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rectiformer.analyze.findings import analyze
from rectiformer.analyze.meters import TOP_SHARES
from rectiformer.model.memory import MEMORIES
from rectiformer.studies.corpora import held_out
from rectiformer.studies.figures import collect_lines, draw_panels, lines_against
from rectiformer.studies.measures import measure_cost, measure_losses, measure_quality, open_model
from rectiformer.studies.plan import Scale, Study, Task, Training, configure, seeded
from rectiformer.studies.recipes import GRAMMAR_TINY, MEMORY_SENTENCES, SENTENCE_FOLDERS
from rectiformer.studies.results import (
    Claim,
    Figure,
    Results,
    Table,
    claims_table,
    describe_all,
    difference,
    judge_rows,
    verdict_rows,
)
from rectiformer.toml import load_config

SEEDS = {"smoke": (1,), "small": (1, 2, 3), "paper": (1, 2, 3)}
SWAPPED = {"smoke": ("relu", "softmax"), "small": tuple(MEMORIES), "paper": tuple(MEMORIES)}
SWEPT = {"smoke": ("relu",), "small": ("relu", "softmax", "softmax-ln"), "paper": ("relu", "softmax", "softmax-ln")}
SLOTS = {
    "smoke": (32,),
    "small": (32, 128, 512, 2048, 4096),
    "paper": (32, 64, 128, 256, 512, 1024, 2048, 3072, 4096),
}
PRODUCT_SLOTS = 16_384
PRODUCTS = tuple(memory for memory in MEMORIES if memory.startswith("product-"))
SWEEP_SENTENCES = {**MEMORY_SENTENCES, "smoke": GRAMMAR_TINY}
PAPER_BLEU = {"relu": "34.22 [T]", "softmax": "33.08 [T]", "softmax-ln": "34.21 [T]"}
SWAP_CLAIMS = (
    Claim("relu", "softmax", "above", "+1.14 [T]"),
    Claim("softmax-ln", "softmax", "above", "+1.13 [T]"),
    Claim("softmax-ln", "relu", "equal", "-0.01 [T]"),
)
DRAWN = ("relu", "softmax", "softmax-ln", "product-relu")
"""What the figures show; the tables have all memories."""
MemoryOf = Callable[[dict[str, Any]], float]


def swap_trainings(scale: Scale) -> list[Training]:
    """Every memory (two at smoke) with the slots of the scale."""
    slots = load_config(None, MEMORY_SENTENCES[scale.name]).model.ffn_size
    square = round(math.sqrt(slots)) ** 2  # product keys come in squares only
    rows = {memory: (memory, square if memory in PRODUCTS else slots) for memory in SWAPPED[scale.name]}
    return list_trainings(rows, MEMORY_SENTENCES, scale, tier=1)


def sweep_trainings(scale: Scale) -> list[Training]:
    """Three memories with few slots to many, product keys with very many."""
    swept = [(memory, slots) for slots in SLOTS[scale.name] for memory in SWEPT[scale.name]]
    swept += [(memory, PRODUCT_SLOTS) for memory in (PRODUCTS[-1:] if scale.name == "smoke" else PRODUCTS)]
    return list_trainings(
        {f"{memory}-{slots}": (memory, slots) for memory, slots in swept}, SWEEP_SENTENCES, scale, tier=6
    )


def list_trainings(
    rows: Mapping[str, tuple[str, int]], settings: Mapping[str, tuple[str, ...]], scale: Scale, tier: int
) -> list[Training]:
    """Every row, a memory and its slots, with the settings of the scale; all first seeds come first."""
    found = []
    for name, (memory, slots) in rows.items():
        config = configure(settings[scale.name], scale, f"model.memory={memory}", f"model.ffn_size={slots}")
        found += seeded(name, SEEDS[scale.name], config, tier=tier, memory=memory, slots=slots)
    return sorted(found, key=lambda training: training.seed)


def measure(task: Task) -> dict[str, Any]:
    """BLEU on test and validation data, losses while training, and its speed."""
    return {**measure_quality(open_model(task), task), **measure_losses(task), **measure_cost(task)}


def swap_tables(results: Results) -> list[Table]:
    rows = []
    for name in results.names():
        slots = f"{results.labels(name)['slots']:,}"
        bleu, valid = results.cell(name, "bleu"), results.cell(name, "valid_bleu")
        rows.append((name, slots, PAPER_BLEU.get(name, ""), bleu, valid, str(len(results.of(name)))))
    columns = ("memory", "slots", "paper, IWSLT14 De-En", "ours, test BLEU", "ours, validation BLEU", "seeds")
    return [
        claims_table(judge_rows(SWAP_CLAIMS, results, "bleu", "BLEU")),
        Table("Feed-forward memories", columns, rows, ("Beam 4.",)),
    ]


def sizes_of(results: Results) -> list[int]:
    return sorted({results.labels(name)["slots"] for name in results.names()})


def at(results: Results, slots: int) -> Results:
    """The results of one size, named by memory."""
    return results.select(slots=slots).rename(lambda entry: str(entry.labels["memory"]))


def judge_sweep(results: Results) -> list[tuple[str, ...]]:
    """ReLU above softmax at every size; ahead of softmax with LayerNorm only with very many slots."""
    found = []
    for size in sizes_of(results):
        above = Claim("relu", "softmax", "above", "above [T]", where=f"{size:,} slots")
        close = replace(above, second="softmax-ln", expected="equal", paper="almost equal [T]")
        ahead = replace(above, second="softmax-ln")
        products = replace(
            above, first="product-relu", second="product-softmax", paper="above, on language modeling [T, 2310.10837]"
        )
        claims = [above, ahead if size >= 3072 else close, products]
        found += judge_rows(claims, at(results, size), "bleu", "BLEU")
    return found


def sweep_tables(results: Results) -> list[Table]:
    """The three memories by slots, and the product keys, which have many more."""
    small, large = (
        [size for size in sizes_of(results) if (size == PRODUCT_SLOTS) == product] for product in (False, True)
    )
    return [
        claims_table(judge_sweep(results)),
        by_slots(results, "Test BLEU by slots", small),
        by_slots(results, "Test BLEU with product keys", large),
    ]


def by_slots(results: Results, title: str, sizes: list[int]) -> Table:
    """Test BLEU of the memories that have these numbers of slots."""
    memories = list(dict.fromkeys(memory for size in sizes for memory in at(results, size).names()))
    rows = [(f"{size:,}", *(at(results, size).cell(memory, "bleu") for memory in memories)) for size in sizes]
    return Table(title, ("slots", *memories), rows, ("Beam 4.",))


def sweep_figures(results: Results, folder: Path) -> list[Figure]:
    lines = lines_against(results, "memory", "slots", "bleu")
    lines = {name: line for name, line in lines.items() if name in DRAWN}
    return draw_panels(folder / "slots.svg", "Test BLEU by slots", ["test BLEU"], [lines], "slots", log_x=True)


def measure_diagnostics(task: Task) -> dict[str, Any]:
    """All measures of each memory, encoder first, on the test set under forced decoding."""
    found = analyze(open_model(task), held_out(task.scale), quality=False, warn=lambda _: None)
    return {"memories": [asdict(memory) for memory in found.memories]}


DIAGNOSES: dict[str, MemoryOf] = {
    "variance ratio": lambda memory: memory["variance_ratio"],
    **{
        f"top {share:.1%} of slots hold": lambda memory, share=share: memory["top_score_ratio"][str(share)]  # type: ignore[misc]
        for share in TOP_SHARES
    },
    "anisotropy": lambda memory: memory["anisotropy"],
    "slots used": lambda memory: memory["used_slots"],
    "usage entropy (nats)": lambda memory: memory["usage_entropy"],
}
DIAGNOSTIC_CLAIMS = {
    "variance ratio": Claim("softmax", "relu", "below", "far below [T]"),
    "top 0.2% of slots hold": Claim("softmax", "relu", "above", "above 85 % vs. clearly less [T]"),
    "anisotropy": Claim("softmax", "relu", "above", "high vs. lower [T]"),
}


def over_layers(results: Results, name: str, measure: MemoryOf) -> dict[int, float]:
    """The mean of a measure over all memories of a model, by seed."""
    return {entry.seed: fmean(map(measure, entry.measures["memories"])) for entry in results.of(name)}


def diagnostics_tables(results: Results) -> list[Table]:
    rows = []
    for name in results.names():
        found = [list(over_layers(results, name, measure).values()) for measure in DIAGNOSES.values()]
        rows.append((name, *describe_all(found, 3)))
    note = "Means over layers, on the test set under forced decoding."
    return [
        claims_table(judge_diagnoses(results)),
        Table("What the memories do", ("memory", *DIAGNOSES), rows, (note,)),
        layers_table(results),
    ]


def judge_diagnoses(results: Results) -> list[tuple[str, ...]]:
    """What the paper says of memories with softmax vs. ReLU, and whether ours do the same."""
    judged = []
    for diagnosis, claim in DIAGNOSTIC_CLAIMS.items():
        first, second = (over_layers(results, name, DIAGNOSES[diagnosis]) for name in (claim.first, claim.second))
        if found := difference(first, second):
            judged.append((replace(claim, where=diagnosis), found))
    return verdict_rows(judged, "", 3)


def layers_table(results: Results) -> Table:
    """The variance ratio of each layer."""
    found: dict[str, dict[str, list[float]]] = {}
    for entry in results.finished:
        for memory in entry.measures["memories"]:
            layer = f"{memory['side']} {memory['layer'] + 1}"
            found.setdefault(entry.name, {}).setdefault(layer, []).append(memory["variance_ratio"])
    columns = list(dict.fromkeys(layer for layers in found.values() for layer in layers))
    rows = [(name, *describe_all((layers.get(layer, []) for layer in columns), 3)) for name, layers in found.items()]
    note = "Variance of a memory's output over that of the residual stream it is added to."
    return Table("Variance ratio by layer", ("memory", *columns), rows, (note,))


def diagnostics_figures(results: Results, folder: Path) -> list[Figure]:
    """Variance ratio by layer, and how few slots hold the scores."""
    drawn = [entry for entry in results.finished if entry.name in DRAWN]
    layers = collect_lines(
        (entry.name, number, memory["variance_ratio"])
        for entry in drawn
        for number, memory in enumerate(entry.measures["memories"], 1)
    )
    tops = collect_lines(
        (
            entry.name,
            100 * share,
            100 * fmean(each["top_score_ratio"][str(share)] for each in entry.measures["memories"]),
        )
        for entry in drawn
        for share in TOP_SHARES
    )
    about = "A memory's output vs. the residual stream, layer by layer"
    path = folder / "variance-ratio.svg"
    made = draw_panels(path, about, ["variance ratio"], [layers], "memory, encoder first", log_y=True)
    path, about = folder / "top-score-ratio.svg", "How few slots hold the scores"
    return made + draw_panels(path, about, ["scores held, %"], [tops], "highest slots, %", log_x=True)


MEMORY_SWAP = Study(
    name="memory-swap",
    title="Feed-forward layers as memories: what weighs the slots",
    question="Is a feed-forward layer with softmax worse than one with ReLU, and does a LayerNorm make up for it?",
    paper="Shen et al. 2023, IWSLT14 De-En: ReLU 34.22, softmax 33.08, softmax with LayerNorm 34.21 [T].",
    folders=SENTENCE_FOLDERS,
    trainings=swap_trainings,
    measure=measure,
    tables=swap_tables,
)
SLOT_SWEEP = Study(
    name="slot-sweep",
    title="Feed-forward layers as memories: how many slots",
    question="Does ReLU stay ahead of softmax from few slots to many?",
    paper="Shen et al. 2023, 32 to 4,096 slots: ReLU above softmax at every size; with LayerNorm softmax almost closes "
    "the gap, but ReLU is ahead again at 3,072 and 4,096 [T].",
    folders=SENTENCE_FOLDERS,
    trainings=sweep_trainings,
    measure=measure,
    tables=sweep_tables,
    figures=sweep_figures,
)
MEMORY_DIAGNOSTICS = Study(
    name="memory-diagnostics",
    title="Feed-forward layers as memories: why",
    question="How large is a memory's output compared with the residual stream, how few slots hold its scores, how "
    "similar are its values?",
    paper="Shen et al. 2023: with softmax the output is small next to the residual, the top 0.2 % of slots hold over "
    "85 % of the scores, and values are similar; with ReLU none of it [T; definitions are ours].",
    folders=SENTENCE_FOLDERS,
    trainings=swap_trainings,
    measure=measure_diagnostics,
    tables=diagnostics_tables,
    figures=diagnostics_figures,
    reads="memory-swap",
)
