"""Short trainings on one prepared text, for what can be seen in real training only."""

from contextlib import contextmanager

import torch

from rectiformer.runs.metrics import read_metrics
from rectiformer.text.prepared import prepare
from rectiformer.toml import load_config
from rectiformer.train.start import train


@contextmanager
def trainings(folder, settings):
    """A function from changes of the settings to the last validation BLEU of a training with them."""
    prepare(load_config(None, settings), folder / "data")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small gain nothing from more

    def score(*changes):
        run = folder / "-".join(change.rpartition("=")[2] for change in changes)
        train(load_config(None, (*settings, *changes)), run, data=folder / "data")
        return [record["valid_bleu"] for record in read_metrics(run / "metrics.jsonl") if "valid_bleu" in record][-1]

    yield score
    torch.set_num_threads(threads)
