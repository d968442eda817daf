"""`sealring run --max-restarts`: a killed worker comes back, and training ends at the same loss."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.workers import Workers

SCRIPT = """
import os, signal, sys, torch, torch.distributed as dist
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel

folder, victim = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("sealring")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
begin, checkpoint = 0, folder / "checkpoint.pt"
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=True)
    begin = saved["step"]
    model.load_state_dict(saved["model"]); optimizer.load_state_dict(saved["optimizer"])
dist.barrier()
with open(folder / f"rank-{rank}.txt", "a") as log:
    print("begin", begin, os.getpid(), file=log, flush=True)
    for step in range(begin, 6):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        if step == 3 and rank == victim and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        dist.all_reduce(mean := loss.detach().clone(), op=dist.ReduceOp.AVG)
        if rank == 0:
            torch.save({"step": step + 1, "model": model.state_dict(),
                        "optimizer": optimizer.state_dict()}, folder / "new.pt")
            os.replace(folder / "new.pt", checkpoint)
    print("loss", mean.item(), file=log, flush=True)
dist.destroy_process_group()
"""


def launch(*arguments: str) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SEALRING_")}
    return subprocess.Popen(
        [Path(sys.executable).parent / "sealring", "run", *arguments],
        env={**clean, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def train(folder: Path, victim: int, nodes: int) -> list[list[str]]:
    """Runs the training under `sealring run`; returns the lines that ranks 0 and 1 wrote."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT)
    where: list[list[str]] = [["-n", "2"]]
    if nodes == 2:
        secret = folder / "job.secret"
        secret.touch(mode=0o600)
        secret.write_text(os.urandom(32).hex())
        endpoint = f"127.0.0.1:{free_port()}"
        where = [
            ["-n", "1", "--nnodes", "2", "--node-rank", str(node), "--rdzv-endpoint", endpoint,
             "--secret-file", str(secret)]
            for node in range(2)
        ]  # fmt: skip
    agents = [
        launch(*place, "--max-restarts", "3", str(script), str(folder), str(victim))
        for place in where
    ]
    try:
        for agent in agents:
            _, errors = agent.communicate(timeout=100)
            assert agent.returncode == 0, errors[-3000:]
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.kill()
    return [(folder / f"rank-{rank}.txt").read_text().splitlines() for rank in range(2)]


def run_script(rank: int, world: int, folder: str) -> None:
    sys.argv = ["train.py", folder, "-1"]
    exec(SCRIPT, {})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, workers: Workers) -> str:
    """Returns the last line of a run in which no worker is killed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    workers.run(run_script, str(folder), world=2, group=False)
    log = (folder / "rank-0.txt").read_text().splitlines()
    assert [line.split()[0] for line in log] == ["begin", "loss"]
    return log[-1]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.threat("F7")
def test_a_killed_worker_comes_back_and_training_ends_at_the_same_loss(
    tmp_path: Path, undisturbed: str, nodes: int
) -> None:
    logs = train(tmp_path / "run", victim=1, nodes=nodes)
    for log in logs:
        begins = [line.split() for line in log if line.startswith("begin")]
        assert [step for _, step, _ in begins] == ["0", "3"], "all workers start again, once"
        assert begins[0][2] != begins[1][2], "in a new process"
        assert log[-1] == undisturbed
