"""A kernel of the Hugging Face Hub, loaded as the `kernels` package loads it: under the id that its metadata gives."""

import importlib.util
import json
import sys


def load(variant):
    """The module in the folder of a build variant."""
    id = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(id, variant / "__init__.py")
    module = sys.modules[id] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
