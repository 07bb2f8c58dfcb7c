"""Compiling kernels takes most of the time: RECTIFORMER_SHARD=3/14 runs the third of fourteen parts of these tests."""

import os

PART, _, PARTS = os.environ.get("RECTIFORMER_SHARD", "1/1").partition("/")
# Read by torch.compile when it is imported; by default each part would start a process on every core.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // int(PARTS))))


def pytest_collection_modifyitems(items):
    items[:] = items[int(PART) - 1 :: int(PARTS)]
