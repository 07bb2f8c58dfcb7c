"""Compiling kernels takes most of the time: RECTIFORMER_SHARD=3/14 runs the third of fourteen parts of these tests."""

import os


def pytest_collection_modifyitems(items):
    part, _, parts = os.environ.get("RECTIFORMER_SHARD", "1/1").partition("/")
    items[:] = items[int(part) - 1 :: int(parts)]
