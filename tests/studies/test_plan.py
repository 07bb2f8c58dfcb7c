"""Every study at every scale: valid configurations, unique names, and the same hash on every machine."""

import dataclasses
import hashlib
from collections import Counter
from pathlib import Path

import pytest

from rectiformer.config import Config
from rectiformer.errors import ArgumentError
from rectiformer.model.memory import MEMORIES
from rectiformer.studies.ablations import CLAIMS as ABLATION_CLAIMS
from rectiformer.studies.catalog import STUDIES
from rectiformer.studies.corpora import CORPORA
from rectiformer.studies.plan import SCALES, Scale, configure, hash_config, hash_text
from rectiformer.studies.recipes import IWSLT14, MULTI30K, OPEN, THRESHOLD, attention_settings
from rectiformer.studies.running import choose, list_tasks
from rectiformer.text.corpus import check_files
from rectiformer.toml import load_config
from rectiformer.train.start import require_model

CONFIGS = Path(__file__).parents[2] / "configs"
TRAINED = [study for study in STUDIES if STUDIES[study].shows is None]
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


@pytest.mark.parametrize("study", TRAINED)
def test_files_are_in_the_given_folder(study):
    for scale in ("small", "paper"):
        for training in STUDIES[study].trainings(STUDIES[study].at(scale, Path("elsewhere"))):
            data = training.config.data
            assert data.source
            assert all(name.startswith("elsewhere/") for name in data.source + data.target + data.valid_source)
    assert all(training.config.data.source == () for training in STUDIES[study].trainings(Scale("smoke")))


def test_what_matters_most_comes_first_and_has_three_seeds():
    quality = STUDIES["translation-quality"].trainings(Scale("small"))
    headline = {
        (corpus.name, variant, seed)
        for corpus in CORPORA["small"]
        for variant in ("softmax", "rela-g", "reluformer", OPEN, THRESHOLD)
        for seed in corpus.seeds.get(variant, ())
    }
    claimed = ("softmax", "rela-g", "reluformer")
    assert all(corpus.seeds.get(variant, (1, 2, 3)) == (1, 2, 3) for corpus in CORPORA["small"] for variant in claimed)
    first = quality[: len(headline)]
    assert {(each.labels["corpus"], each.labels["variant"], each.seed) for each in first} == headline
    documents = STUDIES["document-length"].trainings(Scale("small"))
    wanted = {(f"{variant}-1024", seed) for variant in ("softmax", "rela-g", THRESHOLD) for seed in (1, 2, 3)}
    wanted.add((f"{OPEN}-1024", 1))
    assert {(training.name, training.seed) for training in documents[:10]} == wanted
    for name in ("memory-swap", "slot-sweep"):
        seeds = Counter(training.name for training in STUDIES[name].trainings(Scale("small")))
        assert set(seeds.values()) == {3}
    seeds = Counter(training.name for training in STUDIES["ablations"].trainings(Scale("small")))
    assert all(seeds[row] == 3 for claim in ABLATION_CLAIMS for row in (claim.first, claim.second))


def test_the_papers_variants_are_compared_on_every_corpus_that_is_scored_and_ours_with_them():
    compared = {
        corpus.name: set(corpus.seeds) for scale in ("small", "paper") for corpus in CORPORA[scale] if not corpus.form
    }
    assert len(compared) == 9
    papers = {"softmax", "sparsemax", "entmax15", "rela-i", "rela-g", "reluformer", "relu-seqlen"}
    assert all(variants - {OPEN, THRESHOLD} == papers for variants in compared.values())
    assert {name for name, variants in compared.items() if variants == papers} == {"multi30k-en-fr"}


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


@pytest.mark.parametrize(
    ("settings", "file"), [(MULTI30K, "multi30k.toml"), (IWSLT14, "small.toml"), (WMT14, "base.toml")]
)
def test_recipes_are_the_shipped_ones_with_softmax(settings, file):
    shipped = load_config(CONFIGS / file, ["model.variant=softmax"])
    settings = (*settings, "model.variant=softmax", f"training.seed={shipped.training.seed}")
    folder = Path(shipped.data.source[0]).parent
    assert configure(settings, Scale("small", folder)) == shipped


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

    chosen = keys("softmax-1024,rela-g-512-seed1", documents)
    assert chosen == [*(f"softmax-1024-seed{seed}" for seed in (1, 2, 3)), "rela-g-512-seed1"]
    assert keys("softmax-1024,", documents) == chosen[:3]
    assert keys("", documents) == [training.key for training in documents[0].trainings(documents[1])]
    assert keys("softmax-1024", quality, documents) == chosen[:3]
    assert keys("document-length/softmax-1024,nobody", quality, documents) == chosen[:3]
    assert keys("quality/europarl-en-de-rela-i,length/softmax-512", quality, documents) == [
        "europarl-en-de-rela-i-seed1",
        "softmax-512-seed1",
    ]
    with pytest.raises(ArgumentError, match="no training of document-length has ',' in its name"):
        keys(",", documents)


def test_several_studies_find_their_corpora_under_one_folder():
    folders = {
        name: STUDIES[name].at("small", root=Path("texts")).data for name in ("ablations", "translation-quality")
    }
    assert folders == {"ablations": Path("texts/multi30k"), "translation-quality": Path("texts")}
    assert STUDIES["ablations"].at("smoke", root=Path("texts")) == Scale("smoke")
