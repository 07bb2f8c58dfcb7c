"""Two real ranks: what one of them meets, or draws otherwise, leaves none waiting and none apart."""

import json
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rectiformer.distributed.ranks import Ranks, name_start

RANKS = 2


def work(rank, folder, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    names = []
    for _ in range(3):  # after a restart, rank 0 finds what rank 1 left before it
        time.sleep(0.2 * rank)
        names.append(name_start(store, rank, RANKS))
    start = dist.PrefixStore(names[-1], store)
    dist.init_process_group("gloo", store=start, world_size=RANKS, rank=rank)
    ranks = Ranks(rank, RANKS).new_group()
    drawn = [torch.full((3, 2), float(rank)), torch.full((), rank + 5.0)]
    ranks.broadcast(drawn)
    found = {"names": names, "drawn": [tensor.flatten().tolist() for tensor in drawn], "no JSON": error_of(ranks, rank)}
    found["afterwards"] = ranks.all_gather_object(lambda: "ä" * (rank + 1))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def error_of(ranks, rank):
    """What a rank raises where rank 1 has a value that JSON cannot hold."""
    try:
        ranks.all_gather_object(lambda: {1} if rank == 1 else 1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.set_forkserver_preload(
        ["torch.distributed", "rectiformer.distributed.ranks"]
    )  # once for both
    torch.multiprocessing.start_processes(work, (str(folder), store.port), RANKS, start_method="forkserver")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_a_restart_has_a_name_of_its_own_on_every_rank(found):
    assert found[0]["names"] == found[1]["names"]
    assert len(set(found[0]["names"])) == 3


def test_what_json_cannot_hold_is_an_error_on_every_rank(found):
    assert found[1]["no JSON"] == "TypeError: Object of type set is not JSON serializable"
    assert found[0]["no JSON"] == f"RectiformerError: rank 1 failed: {found[1]['no JSON']}"
    assert [each["afterwards"] for each in found] == [["ä", "ää"]] * 2


def test_every_rank_starts_with_the_weights_of_the_first(found):
    assert [each["drawn"] for each in found] == [[[0.0] * 6, [5.0]]] * 2
