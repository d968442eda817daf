"""torch's questions to a group before it chooses a device, and the effects of the answers."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from sealring.errors import PeerSilent
from tests.workers import Workers

NAMES = ["sealring", "cpu:sealring", "cpu:sealring,cuda:sealring"]


def saves_in_the_background(rank: int, world: int, name: str, folder: str) -> list[float]:
    dist.init_process_group(name)
    state = {"weight": torch.full((3,), 7.0), "step": torch.tensor(5.0)}
    saving: Any = dcp.async_save(state, checkpoint_id=folder)
    saving.result()
    dist.barrier()
    loaded = {"weight": torch.zeros(3), "step": torch.tensor(0.0)}
    dcp.load(loaded, checkpoint_id=folder)
    return [*loaded["weight"].tolist(), loaded["step"].item()]


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_saved_in_the_background(
    workers: Workers, tmp_path: Path, name: str
) -> None:
    results = workers.run(saves_in_the_background, name, str(tmp_path / "saved"), group=False)
    assert results == [[7.0, 7.0, 7.0, 5.0]] * 2


def takes_the_model_of_rank_0(rank: int, world: int, name: str) -> float:
    dist.init_process_group(name)
    model = torch.nn.Linear(4, 3)
    full: dict[str, Any] = (
        {"weight": torch.full((3, 4), 2.5), "bias": torch.ones(3)} if rank == 0 else {}
    )
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    return float(model.weight.sum() + model.bias.sum())


@pytest.mark.parametrize("name", NAMES)
def test_a_state_dict_is_broadcast_from_rank_0(workers: Workers, name: str) -> None:
    assert workers.run(takes_the_model_of_rank_0, name, world=3, group=False) == [33.0] * 3


def gathers_a_sharded_tensor(rank: int, world: int) -> list[float]:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    dist.init_process_group("sealring")
    placements = [f"rank:{each}/cpu" for each in range(world)]
    spec = ChunkShardingSpec(dim=0, placements=placements)  # type: ignore[arg-type]
    sharded = sharded_tensor.rand(spec, 4, 2)
    sharded.local_shards()[0].tensor.fill_(rank + 1)
    out = torch.zeros(4, 2) if rank == 0 else None
    sharded.gather(0, out)
    return [] if out is None else out.sum(1).tolist()


def test_a_sharded_tensor_is_gathered_on_a_device_that_exists(workers: Workers) -> None:
    assert workers.run(gathers_a_sharded_tensor, group=False) == [[2.0, 2.0, 4.0, 4.0], []]


def test_devices_are_counted_when_a_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    claimed = dist.Backend.backend_capability["sealring"]
    for count, kinds in ((0, ["cpu"]), (2, ["cpu", "cuda"])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert list(claimed) == kinds
        assert list(dist.BackendConfig(dist.Backend("sealring")).device_backend_map) == kinds


def test_importing_torch_counts_no_devices() -> None:
    # cuInit in a parent process makes CUDA unusable in its forked children.
    script = (
        "import sys; sys.modules['pynvml'] = None\n"
        "calls = []\n"
        "sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name)\n"
        "    if event == 'call' and 'count' in frame.f_code.co_name else None)\n"
        "import torch\n"
        "sys.setprofile(None)\n"
        "assert 'sealring' in torch.distributed.Backend.backend_list\n"
        "print('device_count' in calls)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=110, check=True
    )
    assert result.stdout.strip() == "False"


def twice(group: dist.ProcessGroup) -> None:
    for _ in range(2):
        dist.all_reduce(torch.ones(1000), group=group)


def waits_for_a_rank_that_sleeps(rank: int, world: int) -> str:
    group = dist.new_group([0, 1], timeout=timedelta(minutes=30))
    assert group is not None
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    if rank == 1:
        time.sleep(2.5)
    with pytest.raises(
        PeerSilent, match="Timed out waiting 1000ms" if rank == 0 else "rank 0 reported"
    ):
        twice(group)
    return "timed out"


def test_torchs_function_that_sets_a_timeout_reaches_the_group(workers: Workers) -> None:
    only_here = {"SEALRING_JOB": "set-timeout"}
    assert workers.run(waits_for_a_rank_that_sleeps, env=only_here) == ["timed out"] * 2
