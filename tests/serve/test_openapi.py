"""What OpenAPI says of the server is what it does: generated requests, good and bad, find no failure of the server."""

import threading

import httpx
import hypothesis
import pytest
import uvicorn
from serve.asking import wait_until

from rectiformer.connections import address, bind
from rectiformer.serve.app import Served, build_app
from rectiformer.serve.limits import Limits

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis: pip install schemathesis")

CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
]
PATHS = {"/v1/translate": "POST", "/v1/model": "GET", "/livez": "GET", "/readyz": "GET", "/metrics": "GET"}
GENERATED = hypothesis.settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.generate],
)


@pytest.fixture(scope="module")
def schema(translator):
    """Of a server in a thread, which takes little at once and has time for it."""
    limits = Limits(max_sentences=3, max_tokens=100, max_beam=2, max_nbest=2, deadline=120)
    bound = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(build_app(Served(translator, "tiny", limits)), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    wait_until(lambda: server.started and httpx.get(f"{address(bound)}readyz").status_code == 200)
    yield schemathesis.openapi.from_url(f"{address(bound)}openapi.json")
    server.should_exit = True
    thread.join()


def test_every_path_is_described_with_its_limits_and_examples(schema):
    paths = schema.raw_schema["paths"]
    assert set(paths) == set(PATHS)
    body = paths["/v1/translate"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"]["properties"]["sentences"]["maxItems"] == 3
    assert body["schema"]["properties"]["beam"]["maximum"] == 2
    assert len(body["examples"]) == 3


@pytest.mark.parametrize(("path", "mode"), [*((path, "positive") for path in PATHS), ("/v1/translate", "negative")])
def test_generated_requests_find_no_failure(schema, path, mode):
    checks = schemathesis.checks.CHECKS.get_by_names(CHECKS)
    assert len(checks) == len(CHECKS)
    operation = schema[path][PATHS[path]]

    @hypothesis.given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    @hypothesis.settings(GENERATED, max_examples=25 if path == "/v1/translate" else 2)
    def ask(case):
        case.call_and_validate(checks=checks)

    ask()
