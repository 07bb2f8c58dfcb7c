"""Every study at every scale: valid configurations, unique names, and the same hash on every machine."""

import dataclasses
import hashlib
from collections import Counter
from pathlib import Path

import pytest

from rectiformer.config import Config
from rectiformer.errors import ArgumentError
from rectiformer.model.memory import MEMORIES
from rectiformer.studies import recipes
from rectiformer.studies.ablations import CLAIMS as ABLATION_CLAIMS
from rectiformer.studies.catalog import STUDIES
from rectiformer.studies.corpora import CORPORA, chosen_rows, tried_rows
from rectiformer.studies.learning_rate import LEARNING_RATE, best_tried, tried_losses
from rectiformer.studies.plan import SCALES, Scale, configure, hash_config, hash_text, portable
from rectiformer.studies.recipes import CHOICES, IWSLT14, MULTI30K, OPEN, THRESHOLD, Peak, attention_settings
from rectiformer.studies.running import choose, list_tasks, load_results
from rectiformer.studies.schedule import list_left
from rectiformer.text.corpus import check_files
from rectiformer.toml import load_config
from rectiformer.train.start import require_model

CONFIGS = Path(__file__).parents[2] / "configs"
DOCS = Path(__file__).parents[2] / "docs"
TRAINED = [study for study in STUDIES if STUDIES[study].trains]
EVERY = [(study, scale) for study in TRAINED for scale in SCALES]


@pytest.mark.parametrize(("study", "scale"), EVERY)
def test_trainings_are_valid_and_have_unique_names(study, scale):
    trainings = STUDIES[study].trainings(STUDIES[study].at(scale))
    assert max(Counter(training.key for training in trainings).values()) == 1
    configs = Counter(hash_config(training.config) for training in trainings)
    assert max(configs.values()) == 1, "the same training twice under two names"
    for training in trainings:
        assert training.config.training.seed == training.seed
        assert training.key.replace("-", "").replace(".", "").isalnum()
        check_files(training.config.data)
    for config in {training.config.model: training.config for training in trainings}.values():
        require_model(config, None, None)  # refuses unknown variants and memories that do not fit


@pytest.mark.parametrize("study", [study for study in TRAINED if STUDIES[study].folders])
def test_files_are_in_the_given_folder(study):
    for scale in ("small", "paper"):
        for training in STUDIES[study].trainings(STUDIES[study].at(scale, Path("elsewhere"))):
            data = training.config.data
            assert data.source
            assert all(name.startswith("elsewhere/") for name in data.source + data.target + data.valid_source)
    assert all(training.config.data.source == () for training in STUDIES[study].trainings(Scale("smoke")))


def test_headline_rows_come_first_and_have_three_seeds():
    """All studies share one queue; a variant whose learning rate is still to be chosen is in no plan."""
    tasks = list_tasks([(study, study.at("small")) for study in STUDIES.values()], Path("nowhere"))
    queue = [task.training for task in list_left(tasks, tasks)]
    tiers = [training.tier for training in queue if training.labels.get("corpus") != "europarl-en-de"]
    assert tiers == sorted(tiers)  # that corpus has models to start from, which are trained when they are needed
    words = [training for training in queue if training.name.startswith("europarl-en-de-words-post-")]
    assert queue[: len([each for each in words if each.tier == 0])] == [each for each in words if each.tier == 0]
    rows = Counter(
        (row.variant, row.norm) for row in CORPORA["small"][0].rows if row.seeds == (1, 2, 3) and row.tier < 2
    )
    chosen = [key for key, choice in CHOICES.items() if key[0] == "europarl" and choice.chosen]
    assert rows == Counter((variant, norm) for _, norm, variant in chosen)
    for name in ("memory-swap", "slot-sweep"):
        seeds = Counter(training.name for training in STUDIES[name].trainings(Scale("small")))
        assert set(seeds.values()) == {3}
    seeds = Counter(training.name for training in STUDIES["ablations"].trainings(Scale("small")))
    assert all(seeds[row] == 3 for claim in ABLATION_CLAIMS for row in (claim.first, claim.second))


def test_a_choice_brings_its_rows_into_the_plan(monkeypatch):
    """And the seed that was tried is not trained again."""
    key, peak = ("europarl", "post", "softmax"), Peak(6e-4, 5000)
    assert peak in CHOICES[key].tried
    before = {training.key for training in STUDIES["translation-quality"].trainings(Scale("small"))}
    monkeypatch.setitem(recipes.CHOICES, key, dataclasses.replace(CHOICES[key], chosen=peak))
    rows = [
        *tried_rows("europarl", "post", 0),
        *chosen_rows("europarl", "post", 0, ("softmax", "sparsemax"), (1, 2, 3)),
    ]
    corpus = dataclasses.replace(CORPORA["small"][0], rows=tuple(rows))
    monkeypatch.setitem(CORPORA, "small", (corpus,))
    after = [training.key for training in STUDIES["translation-quality"].trainings(Scale("small"))]
    assert len(after) == len(set(after))
    name = "europarl-en-de-words-post-softmax-0.0006-5000"
    assert f"{name}-seed2" in before
    assert {f"{name}-seed{seed}" for seed in (1, 2, 3)} <= set(after)
    assert "europarl-en-de-words-post-sparsemax-0.0006-5000-seed1" in after


def test_every_choice_is_the_best_of_what_was_tried():
    """By the saved results, or so near to it that it may be the safer one."""
    results = load_results(LEARNING_RATE, LEARNING_RATE.at("small"), DOCS)
    judged = 0
    for key, choice in CHOICES.items():
        best = best_tried(results, *key)
        assert best is not None or choice.chosen is None, f"{key} was chosen before its sweep was finished"
        if best is not None and choice.chosen is not None:
            judged += 1
            losses = {peak: loss for peak, loss in tried_losses(results, *key).items() if peak == choice.chosen}
            assert losses[choice.chosen] < best[1] + 0.02, f"{key}: {best[0]} has the lowest validation loss"
    assert judged >= 1


def test_the_papers_variants_are_compared_on_every_corpus_of_the_papers_and_ours_with_them():
    papers = {"softmax", "sparsemax", "entmax15", "rela-i", "rela-g", "reluformer", "relu-seqlen"}
    compared = [{row.variant for row in corpus.rows} for corpus in CORPORA["paper"]]
    assert compared == [papers | {OPEN, THRESHOLD}] * 6


def test_every_rate_falls_to_zero_at_small():
    for study in TRAINED:
        for training in STUDIES[study].trainings(STUDIES[study].at("small")) if study != "efficiency" else ():
            assert training.config.training.schedule == "linear"
            assert training.config.training.warmup < training.config.training.steps


def test_each_row_has_the_same_attention_in_every_study():
    for name in ("translation-quality", "document-length"):
        for training in STUDIES[name].trainings(Scale("small")):
            model = training.config.model
            wanted = load_config(None, attention_settings(str(training.labels["variant"]))).model
            for key in ("variant", "output_norm", "center_keys", "score_bias", "gamma_init"):
                assert getattr(model, key) == getattr(wanted, key)


def test_every_memory_is_swapped_in_at_the_same_slots():
    for scale in ("small", "paper"):
        trainings = STUDIES["memory-swap"].trainings(Scale(scale))
        slots = {training.labels["memory"]: training.config.model.ffn_size for training in trainings}
        assert list(slots) == list(MEMORIES)
        wanted = slots["relu"]
        for memory, found in slots.items():
            assert found == wanted or (memory.startswith("product-") and abs(found - wanted) <= wanted**0.5)


def test_slots_are_swept_from_32_to_4096_and_to_16384():
    slots = {
        scale: {training.labels["slots"] for training in STUDIES["slot-sweep"].trainings(Scale(scale))}
        for scale in ("small", "paper")
    }
    assert slots["paper"] == {32, 64, 128, 256, 512, 1024, 2048, 3072, 4096, 16384}
    assert slots["small"] == {32, 128, 512, 2048, 4096, 16384}


WMT14 = CORPORA["paper"][0].settings
CAPTIONS = (*MULTI30K, "model.norm=pre", *Peak(1e-3, 900).settings)


@pytest.mark.parametrize(
    ("settings", "file"), [(CAPTIONS, "multi30k.toml"), (IWSLT14, "small.toml"), (WMT14, "base.toml")]
)
def test_recipes_are_the_shipped_ones_with_softmax(settings, file):
    shipped = load_config(CONFIGS / file, ["model.variant=softmax"])
    settings = (*settings, "model.variant=softmax", f"training.seed={shipped.training.seed}")
    folder = Path(shipped.data.source[0]).parent
    assert configure(settings, Scale("small", folder)) == shipped


@pytest.mark.parametrize(
    ("file", "study", "name"),
    [
        ("europarl.toml", "translation-quality", "europarl-en-de-post-rela-g-0.0012-2500-clip1"),
        ("europarl-documents.toml", "document-length", "rela-g-1024"),
    ],
)
def test_the_model_card_is_of_rows_of_the_studies(file, study, name):
    (planned,) = [
        each.config for each in STUDIES[study].trainings(Scale("small")) if (each.name, each.seed) == (name, 1)
    ]
    shipped = load_config(CONFIGS / file, ())
    same_start = dataclasses.replace(shipped.training, init_from=planned.training.init_from)
    assert portable(dataclasses.replace(shipped, training=same_start)) == portable(planned)


def test_a_hash_does_not_depend_on_folders_or_the_device():
    study = STUDIES["memory-swap"]
    here, there = (study.trainings(study.at("small", Path(folder)))[0].config for folder in ("here", "there"))
    assert hash_config(here) == hash_config(there)
    assert hash_text(here) != hash_text(there)
    other = dataclasses.replace(here, training=dataclasses.replace(here.training, device="cuda"))
    assert hash_config(other) == hash_config(here)
    changed = dataclasses.replace(here, training=dataclasses.replace(here.training, steps=1))
    assert hash_config(changed) != hash_config(here)
    assert hash_text(changed) == hash_text(here)
    # Defaults are not hashed: a key that a later version adds does not invalidate prepared text.
    assert hash_text(Config()) == hashlib.sha256(b"").hexdigest()[:16]


def test_trainings_are_chosen_by_parts_of_their_names():
    documents, quality = ((STUDIES[name], Scale("small")) for name in ("document-length", "translation-quality"))

    def keys(only, *plans):
        return [task.training.key for task in choose(list_tasks(plans, Path("out")), only)]

    chosen = keys("reluformer-1024,rela-g-512-seed1", documents)
    assert chosen == [*(f"reluformer-1024-seed{seed}" for seed in (1, 2, 3)), "rela-g-512-seed1"]
    assert keys("reluformer-1024,", documents) == chosen[:3]
    assert keys("", documents) == [training.key for training in documents[0].trainings(documents[1])]
    assert keys("reluformer-1024", quality, documents) == chosen[:3]
    assert keys("document-length/reluformer-1024,nobody", quality, documents) == chosen[:3]
    assert keys("quality/multi30k-de-en-pre-softmax-0.001,length/rela-g-512", quality, documents) == [
        "multi30k-de-en-pre-softmax-0.001-900-seed1",
        "rela-g-512-seed1",
    ]
    with pytest.raises(ArgumentError, match="no training of document-length has ',' in its name"):
        keys(",", documents)


def test_several_studies_find_their_corpora_under_one_folder():
    folders = {
        name: STUDIES[name].at("small", root=Path("texts")).data for name in ("ablations", "translation-quality")
    }
    assert folders == {"ablations": Path("texts/multi30k"), "translation-quality": Path("texts")}
    assert STUDIES["ablations"].at("smoke", root=Path("texts")) == Scale("smoke")
