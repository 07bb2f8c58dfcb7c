"""What the tests of whole runs share: one driver a worker, one corpus, and runs that nothing interrupted."""

import pytest
from end_to_end.tiny import Launcher, outcome, overrides

from rectiformer.text.prepared import prepare
from rectiformer.toml import load_config


@pytest.fixture(scope="session")
def launcher():
    launcher = Launcher()
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Prepared data, which all runs share that are not about preparing it."""
    return prepare(load_config(None, overrides()), tmp_path_factory.mktemp("shared") / "data").folder


@pytest.fixture(scope="session")
def straight(launcher, tmp_path_factory):
    """The outcome of a run from start to end, given its options; each is run once."""
    found = {}

    def run(**options):
        key = repr(sorted(options.items()))
        if key not in found:
            folder = tmp_path_factory.mktemp("straight")
            ended = launcher.train(folder, **options)
            assert (ended.exit, ended.error) == (0, "")
            found[key] = outcome(folder)
        return found[key]

    return run
