"""The application inside this process: its answers are those of the translator, and faults stay where they are."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import numpy as np
import pytest
import torch

from rectiformer.analyze.record import from_json
from rectiformer.analyze.recording import capture_examples
from rectiformer.errors import ArgumentError, DataError
from rectiformer.serve.app import Served, build_app
from rectiformer.serve.limits import Limits
from rectiformer.serve.worker import Worker
from rectiformer.text.grammar import draw_documents, draw_sentences
from rectiformer.toml import load_config
from rectiformer.train.start import train
from rectiformer.translate.align import AVERAGE, align_pairs
from rectiformer.translate.documents import translate_documents
from rectiformer.translate.markup import read_markup
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.placement import place_tags
from rectiformer.translate.translator import Translator

SENTENCES = [pair.source for pair in draw_sentences(30, 3, "test")]


@asynccontextmanager
async def asking(translator, token="", ready=True, **limits):
    app = build_app(Served(translator, "tiny", Limits(**limits), token))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        while ready and (await client.get("/readyz")).status_code != 200:
            await asyncio.sleep(0.01)
        yield client


def run_async(coroutine):
    """In a thread of its own: in this one, the browser of other tests may have its loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def ask(translator, *bodies, **limits):
    """Answers to requests sent at the same time."""

    async def send():
        async with asking(translator, **limits) as client:
            return await asyncio.gather(*(client.post("/v1/translate", json=body) for body in bodies))

    return run_async(send())


def test_answers_are_those_of_the_translator_in_order(translator):
    """Eight requests at once, of one to five sentences, over many small batches."""
    cuts = [SENTENCES[start : start + 1 + start % 5] for start in range(0, 24, 3)]
    options = SearchOptions(beam=2, nbest=2, length_penalty=1.0)
    asked = {"beam": 2, "nbest": 2, "length_penalty": 1.0}
    answers = ask(translator, *({"sentences": lines, **asked} for lines in cuts), batch_tokens=150)
    for lines, answer in zip(cuts, answers, strict=True):
        expected = translator.translate(lines, options)
        found = answer.json()["translations"]
        assert [each["text"] for each in found] == [each.text for each in expected]
        assert [[n["text"] for n in each["nbest"]] for each in found] == [
            [candidate.text for candidate in each.candidates] for each in expected
        ]
        for each, other in zip(found, expected, strict=True):
            assert each["score"] == pytest.approx(other.score, abs=1e-4)
            assert each["warnings"] == other.warnings


def test_blank_sentences_keep_their_place(translator):
    (answer,) = ask(translator, {"sentences": ["", SENTENCES[0], " \u2028\n", "\0"], "alignments": True})
    expected = translator.translate(["", SENTENCES[0], " \u2028\n", "\0"], SearchOptions())
    assert [each["text"] for each in answer.json()["translations"]] == [each.text for each in expected]


def test_markup_is_placed_by_the_links_of_the_text_without_it(translator):
    plain, lines = SENTENCES[:3], [f"<p>{line.replace(' ', ' <i>', 1)}</i><br/></p>" for line in SENTENCES[:3]]
    lines[2] = f"<b>{plain[2]}"
    (answer,) = ask(translator, {"sentences": [*lines, ""], "markup": True, "alignments": True})
    found = answer.json()["translations"]
    for line, text, each in zip(lines, plain, found, strict=False):
        (expected,) = translator.translate([text], SearchOptions())
        (links,) = align_pairs(translator, [(text, expected.text)], layer=0, head=AVERAGE)
        assert each["text"] == place_tags(read_markup(line), expected.text, links)
        assert [tuple(link) for link in each["alignment"]["links"]] == sorted(links)
        lost = ["<b> has no partner in this line, so it is kept as text"] if line.startswith("<b>") else []
        assert each["warnings"] == [*expected.warnings, *lost]
    assert found[3]["text"] == ""
    for more in ({"nbest": 2}, {"heads": True}):
        (answer,) = ask(translator, {"sentences": lines, "markup": True, **more})
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid")


def test_alignments_and_heads_are_those_of_forced_decoding(translator):
    (answer,) = ask(translator, {"sentences": SENTENCES[:3], "alignments": True, "heads": True})
    content = answer.json()
    pairs = [(line, each["text"]) for line, each in zip(SENTENCES, content["translations"], strict=False)]
    links = align_pairs(translator, pairs, layer=0, head=AVERAGE)
    for (source, target), each, expected in zip(pairs, content["translations"], links, strict=True):
        alignment = each["alignment"]
        assert [tuple(link) for link in alignment["links"]] == sorted(expected)
        assert "".join(source[a:b] for a, b in alignment["source_words"]) == "".join(source.split())
        assert "".join(target[a:b] for a, b in alignment["target_words"]) == "".join(target.split())
    record = from_json(content["record"], "answer")
    assert [(each.source.text, each.target.text) for each in record.examples] == pairs
    for example, expected in zip(record.examples, capture_examples(translator, pairs), strict=True):
        for site, other in zip(example.sites, expected.sites, strict=True):
            np.testing.assert_allclose(site.dense(), other.dense(), atol=1e-5)


class Hesitant(Translator):
    """Comes to no end of more than two sentences, so that segments fall back."""

    def search_all(self, parts, *others, **how):
        found = super().search_all(parts, *others, **how)
        ends = [part.ids.count(self.source.separator) < 2 for part in parts]
        return [
            [replace(each, ended=each.ended and end) for each in best] for best, end in zip(found, ends, strict=True)
        ]


@pytest.fixture(scope="module")
def document_translator(tmp_path_factory):
    """A run that reads segments of several sentences."""
    from end_to_end.tiny import overrides

    torch.set_num_threads(1)
    settings = overrides(data_segment_length=60, training_steps=20, validation_every=20, checkpoint_every=20)
    folder = tmp_path_factory.mktemp("documents") / "tiny"
    train(load_config(None, [*settings, "data.grammar=documents", "data.sentences=30"]), folder)
    return Hesitant.from_run(folder, device="cpu")


def test_documents_are_those_of_the_translator(document_translator):
    documents = [[pair.source for pair in document] for document in draw_documents(2, 3, "test")]
    documents[1][1] = " "
    expected = list(translate_documents(document_translator, documents, SearchOptions(beam=2), warn=lambda _: None))
    assert any(each.fallbacks for each in expected)
    answers = ask(
        document_translator,
        {"documents": documents, "beam": 2, "alignments": True},
        {"documents": [[], ["", " "]]},
        {"documents": documents[:1], "nbest": 2},
        batch_tokens=200,
    )
    found = answers[0].json()["documents"]
    for document, other in zip(found, expected, strict=True):
        assert [each["text"] for each in document["translations"]] == other.sentences
        assert [document[name] for name in ("segments", "fallbacks", "warnings")] == [
            other.segments, other.fallbacks, other.warnings,
        ]  # fmt: skip
    assert "alignment" in found[1]["translations"][0]
    assert [each["translations"] for each in answers[1].json()["documents"]] == [[], [{"text": ""}] * 2]
    assert answers[2].status_code == 422
    assert "a document has one translation" in answers[2].json()["error"]["message"]


class Faulty(Translator):
    """A translator that some sentences break."""

    def translate(self, lines, *arguments, **options):
        if "fails" in lines:
            raise RuntimeError(f"cannot translate {lines}")
        if "is refused" in lines:
            raise DataError("line 1: no")
        if "kills" in lines:
            raise SystemExit
        return super().translate(lines, *arguments, **options)


@pytest.fixture
def faulty(translator):
    return Faulty(translator.model, translator.source, translator.target)


def test_a_sentence_that_fails_fails_alone(faulty, translator, caplog):
    bodies = [{"sentences": [line]} for line in [*SENTENCES[:6], "fails", "is refused", *SENTENCES[6:12]]]
    answers = ask(faulty, *bodies)
    assert [answer.status_code for answer in answers] == [200] * 6 + [500, 422] + [200] * 6
    expected = translator.translate(SENTENCES[:12], SearchOptions())
    good = [answer for answer in answers if answer.status_code == 200]
    assert [answer.json()["translations"][0]["text"] for answer in good] == [each.text for each in expected]
    assert answers[6].json()["error"]["code"] == "failed"
    assert "fails" not in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it is what is tested
def test_a_dead_worker_is_not_alive_and_leaves_nobody_waiting(faulty):
    async def send():
        async with asking(faulty) as client:
            answers = await asyncio.gather(
                *(client.post("/v1/translate", json={"sentences": [line]}) for line in ["kills", *SENTENCES[:3]])
            )
            later = await client.post("/v1/translate", json={"sentences": ["kills"]})
            states = [(await client.get(path)).status_code for path in ("/livez", "/readyz")]
            return [answer.status_code for answer in [*answers, later]], states

    assert run_async(send()) == ([503] * 5, [500, 503])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_about_to_end_is_given_nothing(faulty, monkeypatch):
    """A thread that has said that it ends may live for a while; nobody hears from it any more."""
    run, go = Worker.run, threading.Event()

    def linger(worker):
        try:
            run(worker)
        finally:
            go.wait(10)

    async def send():
        async with asking(faulty, deadline=3) as client:
            answers = [await client.post("/v1/translate", json={"sentences": [line]}) for line in ("kills", "a")]
            alive = await client.get("/livez")
            go.set()
            return [answer.status_code for answer in (*answers, alive)]

    monkeypatch.setattr(Worker, "run", linger)
    assert run_async(send()) == [503, 503, 500]


def test_a_server_that_starts_is_alive_but_not_ready(faulty, monkeypatch):
    async def look():
        go = threading.Event()
        translate = Faulty.translate
        monkeypatch.setattr(Faulty, "translate", lambda *a, **o: (go.wait(5), translate(*a, **o))[1])
        async with asking(faulty, ready=False) as client:
            before = [(await client.get(path)).status_code for path in ("/livez", "/readyz")]
            refused = await client.post("/v1/translate", json={"sentences": ["a"]})
            go.set()
            while (await client.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.01)
            return before, refused

    before, refused = run_async(look())
    assert before == [200, 503]
    assert refused.status_code == 503
    assert int(refused.headers["Retry-After"]) >= 1


def test_a_token_closes_all_but_livez(translator):
    async def send():
        async with asking(translator, token="0123456789abcdef", ready=False) as client:
            right, wrong = {"Authorization": "Bearer 0123456789abcdef"}, {"Authorization": "Bearer 0123456789abcdeg"}
            while (await client.get("/readyz", headers=right)).status_code != 200:
                await asyncio.sleep(0.01)
            paths = ("/", "/readyz", "/metrics", "/v1/model", "/openapi.json", "/page/serve.js")
            closed = [
                (await client.get(path, headers=headers)).status_code for path in paths for headers in ({}, wrong)
            ]
            elsewhere = {**right, "Host": "translate.example"}
            opened = [(await client.get(path, headers=elsewhere)).status_code for path in paths]
            answer = await client.post("/v1/translate", json={"sentences": ["a"]}, headers=right)
            return closed, opened, answer.status_code, (await client.get("/livez")).status_code

    assert run_async(send()) == ([401] * 12, [200] * 6, 200, 200)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_sentences": 10, "queue_sentences": 9}, "max_sentences = 10 is more than queue_sentences = 9"),
        ({"deadline": float("nan")}, "deadline = nan"),
        ({"max_beam": 0}, "max_beam = 0"),
        ({"max_sentence_tokens": 1024}, "at most 974 subwords"),
    ],
)
def test_limits_that_make_no_sense_are_refused(translator, limits, words):
    with pytest.raises(ArgumentError, match=words):
        build_app(Served(translator, "tiny", Limits(**limits)))


def test_the_limits_of_the_command_are_those_of_the_library():
    from inspect import signature

    from rectiformer.cli.serving import serve

    parameters = signature(serve).parameters
    for name, value in vars(Limits()).items():
        assert parameters[name].default == value
