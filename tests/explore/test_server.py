"""The explorer as a user starts it: a process of its own, asked over HTTP and by a real browser."""

import copy
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from end_to_end.tiny import overrides

pytest.importorskip("fastapi", reason='needs fastapi: pip install "rectiformer[serve]"')
pytest.importorskip("uvicorn", reason='needs uvicorn: pip install "rectiformer[serve]"')

from rectiformer.analyze.record import from_json
from rectiformer.analyze.recording import record_pairs
from rectiformer.analyze.switching import Head, switched_off
from rectiformer.connections import bind
from rectiformer.errors import ArgumentError
from rectiformer.text.samples import sample_pairs
from rectiformer.toml import load_config
from rectiformer.train.start import train
from rectiformer.translate.cuda_graphs import capturable
from rectiformer.translate.evaluate import score_pairs
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator

SOURCE, TARGET = "Der Hund schläft.", "The dog sleeps."
VARIANTS = ("rela-g", "softmax")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A rectified and a softmax run, both of one layer and two heads."""
    folder = tmp_path_factory.mktemp("runs")
    torch.set_num_threads(1)  # as in every test, whose own fixture comes later
    for variant in VARIANTS:
        data = folder / VARIANTS[0] / "data" if variant != VARIANTS[0] else None
        settings = overrides(
            model_variant=variant, training_seed=2, training_steps=60, validation_every=60, checkpoint_every=60
        )
        train(load_config(None, settings), folder / variant, data=data)
    return [folder / variant for variant in VARIANTS]


@pytest.fixture(scope="module")
def server(runs, tmp_path_factory):
    """Two runs behind one page, opened by a browser that notes its address; it ends by Ctrl-C, with nothing to say."""
    opened = tmp_path_factory.mktemp("browser") / "opened"
    script = opened.with_name("browser")
    script.write_text(f'#!/bin/sh\nprintf %s "$1" > {opened}\n')
    script.chmod(0o755)
    command = [sys.executable, "-m", "rectiformer", "explore", *map(str, runs), "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DISPLAY": ":0", "BROWSER": f"{script} %s"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    line = process.stdout.readline().decode()
    assert line.startswith("exploring rela-g vs. softmax at http://127.0.0.1:"), process.stderr.read().decode()
    address = line.split(" at ")[1].split(" ")[0]
    yield SimpleNamespace(address=address, port=int(address.rstrip("/").rpartition(":")[2]), opened=opened)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, b"", b"")


def request(server, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, named)
        answer = connection.getresponse()
        return SimpleNamespace(status=answer.status, headers=answer.headers, body=answer.read())
    finally:
        connection.close()


def post(server, body, **headers):
    headers = {"Content_Type": "application/json", **headers}
    answer = request(server, "POST", "/api/translate", body, **headers)
    return answer.status, json.loads(answer.body)


def ask(server, **question):
    status, content = post(server, json.dumps(question))
    assert status == 200, content
    record = from_json(content["record"], "answer")
    return SimpleNamespace(**content | {"record": record, "example": record.examples[0]})


def refuse(server, status, body, **headers):
    """The one line of an answer that says no."""
    found, content = post(server, body, **headers)
    assert (found, list(content), list(content["error"])) == (status, ["error"], ["code", "message"])
    assert "\n" not in content["error"]["message"]
    return content["error"]["message"]


@pytest.mark.parametrize("model", [0, 1])
def test_an_answer_is_what_the_run_translates_and_its_record(server, runs, model):
    answer = ask(server, source=SOURCE, model=model)
    translator = Translator.from_run(runs[model], device="cpu")
    (own,) = translator.translate([SOURCE], SearchOptions())
    assert answer.translation == answer.example.translation == answer.example.target.text == own.text
    assert answer.score == pytest.approx(own.candidates[0].score, abs=1e-5)
    assert answer.record.model.name == VARIANTS[model]
    assert not answer.example.forced
    (expected,) = record_pairs(translator, [(SOURCE, own.text)]).examples
    assert [(site.kind, site.layer) for site in answer.example.sites] == [(s.kind, s.layer) for s in expected.sites]
    for site, other in zip(answer.example.sites, expected.sites, strict=True):
        np.testing.assert_allclose(site.dense(), other.dense(), atol=1e-5)


def test_a_forced_target_is_what_the_model_is_recorded_on(server):
    free, forced = ask(server, source=SOURCE), ask(server, source=SOURCE, target=TARGET)
    assert forced.example.forced
    assert forced.example.target.text == TARGET
    assert forced.translation == forced.example.translation == free.translation


@pytest.mark.parametrize("model", [0, 1])
@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_a_head_that_is_off_weighs_nothing_and_others_go_on(server, model, kind):
    whole = ask(server, source=SOURCE, target=TARGET, model=model)
    part = ask(server, source=SOURCE, target=TARGET, model=model, off=[[kind, 0, 1]])
    before, after = whole.example.site(kind, 0), part.example.site(kind, 0)
    assert before.dense()[1].any()
    assert not after.dense()[1].any()
    rows = slice(after.queries, 2 * after.queries)
    assert after.null[rows].all()
    assert not after.mass[rows].any()
    np.testing.assert_array_equal(after.visible, before.visible)
    np.testing.assert_allclose(after.dense()[0], before.dense()[0], atol=1e-5)  # nothing stands before a first layer
    assert part.score != pytest.approx(whole.score, abs=1e-4)


@pytest.mark.parametrize("run", VARIANTS)
@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_a_head_that_is_off_is_one_whose_values_are_zero(runs, run, kind):
    """The same as a model that learned to have no values there: translating with caches, and forced."""
    translator = Translator.from_run(runs[VARIANTS.index(run)], device="cpu")
    other = Translator(copy.deepcopy(translator.model), translator.source, translator.target)
    (attention,) = [site.attention for site in other.model.sites() if site.kind == kind]
    size = attention.embed_dim // attention.num_heads
    for values in (
        attention.input_weight.data[2 * attention.embed_dim :],
        attention.input_bias.data[2 * attention.embed_dim :],
    ):
        values[size:] = 0  # head 1 of 2
    with switched_off(translator.model, {Head(kind, 0, 1)}):
        found = [each.translate([SOURCE], SearchOptions())[0].candidates[0] for each in (translator, other)]
        scores = [score_pairs(each, [(SOURCE, TARGET)])[0].token_scores for each in (translator, other)]
    assert found[0].tokens == found[1].tokens
    assert found[0].token_scores == pytest.approx(found[1].token_scores, abs=1e-5)
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    assert scores[0] != pytest.approx(score_pairs(translator, [(SOURCE, TARGET)])[0].token_scores, abs=1e-4)


def test_a_model_with_a_head_off_is_not_captured(runs):
    """A CUDA graph recorded before would run without the hook, and one recorded now would keep it."""
    model = Translator.from_run(runs[0], device="cpu").model
    assert capturable(model)
    with switched_off(model, {Head("decoder", 0, 1)}):
        assert not capturable(model)
    assert capturable(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_all_heads_off_is_an_answer_too(server):
    heads = [[kind, 0, head] for kind in ("encoder", "decoder", "cross") for head in range(2)]
    answer = ask(server, source=SOURCE, off=heads)
    assert all(site.null.all() and not len(site.weights) for site in answer.example.sites)
    assert ask(server, source=SOURCE).example.sites[0].weights.size


def test_questions_at_the_same_time_do_not_disturb_each_other(server):
    questions = [{"source": SOURCE, "target": TARGET, "off": [["cross", 0, head]]} for head in (0, 1)] * 4
    alone = [ask(server, **question) for question in questions[:2]]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda question: ask(server, **question), questions))
    for index, answer in enumerate(together):
        assert answer.score == alone[index % 2].score
        dense, expected = (each.example.site("cross", 0).dense() for each in (answer, alone[index % 2]))
        np.testing.assert_array_equal(dense, expected)


HOSTILE = [
    "</script><script>alert(1)</script>",
    "\0",
    "a\nb\u2028c\u0085d",
    "\u202eder Hund",
    "👩‍👩‍👧",
    "\u0301",
    "x" * 400,
]


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_hostile_text_is_answered_as_it_is(server, text):
    answer = ask(server, source=text, target=text)
    assert answer.example.source.text == answer.example.target.text == text


@pytest.mark.parametrize(
    ("question", "line"),
    [
        ([], "the request is not a JSON object; send {source, target, off, model}"),
        ({}, "source is None; it needs some text"),
        ({"source": " \n"}, "source is ' \\n'; it needs some text"),
        ({"source": 5}, "source is 5; it needs some text"),
        ({"source": "a", "target": ["b"]}, "target is ['b']; it needs some text"),
        ({"source": "a\ud800"}, "source has half of a surrogate pair, which is not a character; remove it"),
        ({"source": "a" * 20_001}, "source has 20,001 characters, but at most 20,000 are read; shorten it"),
        ({"source": "a", "model": 2}, "there is no model 2; there are 2, counted from 0"),
        ({"source": "a", "model": True}, "model is True; it is the number of a model, from 0"),
        ({"source": "a", "off": "cross"}, "off is 'cross'; it is a list of at most 10,000 [kind, layer, head]"),
        ({"source": "a", "off": [["cross", 0]]}, "off has ['cross', 0]; each head is [kind, layer, head]"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_a_question_that_is_none_is_refused_in_one_line(server, question, line):
    assert refuse(server, 422, json.dumps(question)) == line


@pytest.mark.parametrize("head", [["cross", 0, 2], ["cross", 1, 0], ["sideways", 0, 0], ["encoder", -1, 0]], ids=str)
def test_an_unknown_head_is_refused(server, head):
    kind, layer, number = head
    assert refuse(server, 422, json.dumps({"source": SOURCE, "off": [head]})) == (
        f"there is no head {number} of {kind} layer {layer}; the encoder has 1 layers, the decoder 1, and each "
        "attention 2 heads, all counted from 0"
    )


@pytest.mark.parametrize("side", ["source", "target"])
def test_too_many_subwords_are_refused(server, side):
    line = refuse(server, 422, json.dumps({"source": SOURCE, side: "Hund " * 600}))
    assert line.startswith(f"{side} has ")
    assert line.endswith(" subwords, but at most 512 are shown; shorten it")


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (b"", "the body is not JSON: Expecting value at character 0"),
        (b"{", "the body is not JSON: "),
        (b"\xff\xfe", "byte 0 of the body is not UTF-8; encode it as UTF-8"),
        (b"[" * 100_000, "the body has a number that is too long or nesting that is too deep; send less"),
        (b'{"source": NaN}', "the body has NaN, which is not JSON; send a number"),
    ],
    ids=["empty", "half", "bytes", "deep", "NaN"],
)
def test_a_body_that_is_no_json_is_refused(server, body, line):
    assert refuse(server, 400, body).startswith(line)


def test_headers_and_connections_are_limited_as_those_of_serve(server):
    """Headers are refused before they are held, and the 65th idle connection replaces the first."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000)
        assert connection.recv(12) == b"HTTP/1.1 431"
    held = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(70)]
    assert request(server, "GET", "/").status == 200
    assert held[0].recv(1) == b""
    for connection in held:
        connection.close()


def test_a_body_is_not_read_beyond_its_limit(server):
    """Neither where its length says so, nor where it has none and never ends."""
    line = "the body has more than 500,000 bytes; split the request"
    assert refuse(server, 413, b" " * 600_000) == line
    assert refuse(server, 413, iter([b" " * 100_000] * 6)) == line


def test_a_page_that_leaves_midway_leaves_no_trace(server):
    """What the server has to say of it would fail the fixture's end."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = f"POST /api/translate HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
    assert ask(server, source=SOURCE).example.source.text == SOURCE


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example", "", "[::1]"])
def test_a_request_by_another_name_is_refused(server, host):
    for method, path in (("GET", "/"), ("GET", "/main.js"), ("POST", "/api/translate")):
        answer = request(server, method, path, "{}", Host=host)
        assert answer.status == 403
        assert json.loads(answer.body)["error"]["message"].startswith(f"host '{host}' is not this server; ")


def test_a_request_of_another_page_is_refused_and_never_allowed(server):
    body = json.dumps({"source": SOURCE})
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{server.port}", "http://127.0.0.1:1"):
        assert refuse(server, 403, body, Origin=origin).startswith(f"origin '{origin}' is another site")
    assert refuse(server, 415, body, Content_Type="text/plain") == "content type 'text/plain'; send application/json"
    asked = request(server, "OPTIONS", "/api/translate", Access_Control_Request_Method="POST")
    assert asked.status == 405
    assert not [name for name in asked.headers if name.lower().startswith("access-control")]


def test_the_page_of_localhost_may_ask(server):
    host = f"localhost:{server.port}"
    status, content = post(server, json.dumps({"source": SOURCE}), Host=host, Origin=f"http://{host}")
    assert (status, content["record"]["model"]["name"]) == (200, "rela-g")


@pytest.mark.parametrize("path", ["/", "/main.js", "/style.css", "/no.js"])
def test_everything_is_served_under_a_strict_policy(server, path):
    answer = request(server, "GET", path)
    assert answer.status == (404 if path == "/no.js" else 200)
    policy = answer.headers["Content-Security-Policy"].split("; ")
    assert policy[:3] == ["default-src 'none'", "script-src 'self'", "style-src 'self'"]
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/index.html", "/..%2fserver.py", "/../server.py", "/%00"])
def test_nothing_else_is_served(server, path):
    assert request(server, "GET", path).status == 404


def test_the_page_is_opened_in_the_browser(server):
    ask(server, source=SOURCE)  # by the time of an answer it has been
    assert server.opened.read_text() == server.address


def test_a_port_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ArgumentError, match=rf"^cannot listen on 127\.0\.0\.1:{port}: [^\n]*; name another --port"):
            bind("127.0.0.1", port)


def test_a_person_chooses_an_example_and_knows_the_languages(server, visit):
    page = visit(server.address, offline=False, size=(390, 844))
    assert page.locator("#languages").inner_text() == "German \u2192 English"
    assert page.locator("#tabs button").count() == 0  # as long as there is nothing to see
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
    examples = sample_pairs(load_config(None, overrides()).data, 8)
    choices = page.locator(".choice")
    assert choices.all_inner_texts() == [source for source, _ in examples]
    assert choices.first.get_attribute("lang") == "de"
    choices.nth(2).click()
    page.wait_for_selector("svg [data-weight]")
    source, reference = examples[2]
    assert page.get_by_label("Source", exact=True).input_value() == source
    assert (
        page.locator("[data-translation]").first.get_attribute("data-translation")
        == ask(server, source=source).translation
    )
    assert page.locator(".reference").inner_text().split() == ["reference", *reference.split()]
    assert page.locator("#tabs button").all_inner_texts() == ["Attention", "Heads", "Compare"]
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 390


def test_a_person_translates_switches_a_head_off_and_sees_the_difference(server, visit):
    page = visit(server.address, offline=False)
    page.get_by_label("Source", exact=True).fill(SOURCE)
    page.keyboard.press("Enter")
    page.wait_for_selector("svg [data-weight]")
    whole = ask(server, source=SOURCE)
    shown = page.locator("[data-translation]")
    assert [shown.nth(i).get_attribute("data-translation") for i in range(2)] == [
        whole.translation,
        ask(server, source=SOURCE, model=1).translation,
    ]
    site = whole.example.site("cross", 0)
    counts = np.diff(site.row_starts).reshape(2, -1).sum(1).tolist()
    assert [edges_of(page, head) for head in range(2)] == counts
    page.locator("[data-power='1']").click()
    page.wait_for_selector("[data-head-switch='1'][data-edges='0']")
    off = ask(server, source=SOURCE, off=[["cross", 0, 1]])
    assert edges_of(page, 0) == len(off.example.site("cross", 0).weights)
    assert page.locator("svg [data-weight][data-head='1']").count() == 0
    assert page.locator("svg [data-null][data-head='1']").count() > 0
    assert shown.nth(0).get_attribute("data-translation") == off.translation
    assert shown.nth(0).get_attribute("data-changed") == str(int(off.translation != whole.translation))
    assert f"score {off.score:.3f}, with all heads {whole.score:.3f}" in shown.nth(0).inner_text()
    page.locator("[data-power='1']").click()
    page.wait_for_selector(f"[data-head-switch='1'][data-edges='{counts[1]}']")


def edges_of(page, head):
    return int(page.locator(f"[data-head-switch='{head}']").first.get_attribute("data-edges"))


def test_a_refusal_is_shown_as_text(server, browser):
    page = browser.new_page()
    page.goto(server.address)
    page.get_by_label("Source", exact=True).fill("<b>Hund</b> " * 600)
    page.get_by_role("button", name="Translate").click()
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert "subwords, but at most 512 are shown; shorten it" in alert.inner_text()
    page.close()
