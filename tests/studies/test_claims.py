"""The page of claims: few, each of rows that the studies plan, and judged only when all seeds are there."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rectiformer.studies.catalog import STUDIES
from rectiformer.studies.claims import GROUPS, judge, render_claims
from rectiformer.studies.corpora import CORPORA
from rectiformer.studies.plan import Scale
from rectiformer.studies.recipes import CHOICES
from rectiformer.studies.results import Result, Results
from rectiformer.studies.running import choose, list_tasks

DOCS = Path(__file__).parents[2] / "docs"
CLAIMS = [claim for claims in GROUPS.values() for claim in claims]
MEMORY = next(claim for claim in CLAIMS if claim.study == "memory-swap")


def results_of(study, rows):
    """Results of a study: the BLEU of each row, seed by seed."""
    entries = [
        Result(
            study=study, scale="small", key=f"{name}-seed{seed}", name=name, seed=seed, labels={}, config="c",
            measures={"bleu": bleu},
        )
        for name, values in rows.items()
        for seed, bleu in enumerate(values, 1)
    ]  # fmt: skip
    return Results(study, "small", len(entries), entries)


def judged(**rows):
    return judge(MEMORY, results_of("memory-swap", rows))


def test_a_reader_has_at_most_25_claims_to_read():
    assert 20 <= len(CLAIMS) <= 25
    assert len({claim.says for claim in CLAIMS}) == len(CLAIMS)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.says[:40])
def test_the_command_of_a_claim_trains_something_or_waits_for_a_choice(claim, tmp_path):
    plan = list_tasks([(STUDIES[claim.study], STUDIES[claim.study].at("small"))], tmp_path)
    if all(CHOICES.get(key) is None or CHOICES[key].chosen for key in claim.needs):
        assert choose(plan, claim.only)


def test_a_claim_is_judged_by_its_interval_once_all_seeds_are_there():
    outcome = judged(relu=[36.0, 36.2, 36.1], softmax=[35.0, 35.1, 35.2])
    assert outcome.verdict == "agree"
    assert outcome.ours == "+1.00 ± 0.25 BLEU: ReLU 36.10, softmax 35.10"
    assert outcome.why == "over 3 seeds; the claim asks for more than 0"
    assert judged(relu=[34.0, 34.2, 34.1], softmax=[35.0, 35.1, 35.2]).verdict == "disagree"
    assert judged(relu=[34.0, 36.2, 35.1], softmax=[35.0, 35.1, 35.2]).verdict == "open"


def test_a_claim_without_all_seeds_is_open_and_says_why():
    assert judged().why == "not trained yet"
    assert judged().ours == ""
    assert judged(relu=[36.0]).why == "softmax is not trained yet"
    assert judged(relu=[36.0]).ours == "ReLU 36.00 BLEU"
    outcome = judged(relu=[36.0, 36.1], softmax=[35.0, 35.1])
    assert (outcome.verdict, outcome.why) == ("open", "2 of 3 seeds so far")


def test_the_means_on_the_page_are_of_the_seeds_that_are_compared():
    """Otherwise the difference shown with them would not be theirs."""
    assert judged(relu=[36.0, 39.0, 39.0], softmax=[35.0]).ours == "+1.00 BLEU: ReLU 36.00, softmax 35.00"


def test_a_claim_that_waits_for_a_learning_rate_says_so(monkeypatch):
    key = ("europarl", "pre", "rela-g")
    claim = next(claim for claim in CLAIMS if key in claim.needs)
    monkeypatch.setitem(CHOICES, key, replace(CHOICES[key], chosen=None))
    assert (
        "the learning rate of rela-g on Europarl in pre-norm is still being chosen"
        in judge(claim, results_of(claim.study, {})).why
    )


def test_the_page_counts_its_verdicts():
    found = {study.name: results_of(study.name, {}) for study in STUDIES.values()}
    found["memory-swap"] = results_of("memory-swap", {"relu": [36.0, 36.2, 36.1], "softmax": [35.0, 35.1, 35.2]})
    page = render_claims(found)
    assert f"**Of {len(CLAIMS)} claims, 1 hold here, 0 do not, and {len(CLAIMS) - 1} are open**" in page
    assert f"What holds here:\n\n- {MEMORY.says}." in page
    measured, waiting = (re.findall(rf"^{start}\[.*\]\(studies/", page, re.MULTILINE) for start in (r"\| ", "- "))
    assert (len(measured), len(waiting)) == (2, len(CLAIMS) - 2)  # one of the two has one of its two sides


def test_claims_are_of_studies_at_small():
    assert {claim.study for claim in CLAIMS} <= {
        study.name for study in STUDIES.values() if study.trainings(Scale("small"))
    }


PAGES = [DOCS / "reproduction.md", *sorted((DOCS / "studies").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_texts_in_words(page):
    """What the code calls them is for `--only` and for names of files."""
    text = re.sub(r"`[^`\n]*--only [^`]*`|\]\([^)]*\)", "", page.read_text(encoding="utf-8"))
    named = [name for corpus in CORPORA["small"] for name in (corpus.name, *(gold.name for gold in corpus.gold))]
    assert [name for name in named if name in text] == []
