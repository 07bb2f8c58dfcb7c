"""One tiny run, served once with small limits; each test leaves the server able to answer."""

import pytest
import torch
from end_to_end.tiny import overrides

pytest.importorskip("fastapi", reason='needs fastapi: pip install "rectiformer[serve]"')
pytest.importorskip("uvicorn", reason='needs uvicorn: pip install "rectiformer[serve]"')
pytest.importorskip("prometheus_client", reason='needs prometheus_client: pip install "rectiformer[serve]"')

from serve.asking import Server

from rectiformer.toml import load_config
from rectiformer.train.start import train
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator

SMALL = {
    "max_bytes": 20_000,
    "max_sentences": 40,
    "max_tokens": 6_000,
    "max_heads": 2,
    "max_heads_tokens": 60,
    "queue_requests": 16,
    "queue_sentences": 200,
    "body_seconds": 1,
    "deadline": 5,
    "batch_tokens": 400,
}


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run of one layer and two heads, trained for some seconds."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    torch.set_num_threads(1)  # as in every test, whose own fixture comes later
    # With this seed its translations of long sentences end at the limit, so that there is work for seconds.
    settings = overrides(training_seed=3, training_steps=60, validation_every=60, checkpoint_every=60)
    train(load_config(None, settings), folder)
    return folder


@pytest.fixture(scope="session")
def translator(run):
    return Translator.from_run(run, device="cpu")


@pytest.fixture(scope="session")
def good(translator):
    """A request, and the translation in its answer."""
    (found,) = translator.translate(["Der Hund schläft."], SearchOptions(beam=1))
    return {"sentences": ["Der Hund schläft."], "beam": 1}, found.text


@pytest.fixture(scope="session")
def server(run):
    """A server with small limits; in the end it stops with nothing to say, whatever it was asked."""
    options = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", value)]
    started = Server(run, "--port", 0, "--device", "cpu", *options)
    assert started.said.startswith("serving tiny at http://127.0.0.1:"), started.end()
    started.until("/readyz", 200)
    yield started
    assert started.end() == (0, b"", b"")
