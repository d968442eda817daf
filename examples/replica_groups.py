"""torchft: replica groups may leave and return while the others train, with sealed traffic.

    umask 077; openssl rand -hex 32 > job.secret
    torchft_lighthouse --min_replicas 2 --bind '[::]:29510' &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510 SEALRING_SECRET_FILE=job.secret
    sealring run examples/replica_groups.py --replicas 2 --replica 0

Run the last line again with --replica 1 in another terminal. With --kill-at, a replica group kills
itself in that step. Started again without it, the group gets the state from the others, and all
continue.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import torchft

import gpt
from sealring.train.integrations import Figures
from sealring.train.integrations.torchft import DistributedDataParallel, sealed_manager

LIMIT = timedelta(seconds=60)
RETURN = timedelta(minutes=5)
"""How long the others wait for a replica group that is started again."""


def make_manager(
    backend: str, replica: int, replicas: int, device: str, **state: Any
) -> torchft.Manager:
    # All replica groups must be up to date before a step begins, so each step has a whole batch.
    shared = {
        "min_replica_size": replicas, "use_async_quorum": False,
        "timeout": LIMIT, "quorum_timeout": RETURN, **state,
    }  # fmt: skip
    if backend == "gloo":
        plaintext = torchft.ProcessGroupGloo(LIMIT)
        return torchft.Manager(pg=plaintext, replica_id=f"replica_{replica}", **shared)
    return sealed_manager(replica=replica, replicas=replicas, device=device, **shared)


def train(
    steps: int,
    replica: int,
    replicas: int,
    backend: str = "sealring",
    device: str = "cpu",
    kill_at: int | None = None,
) -> tuple[list[float], dict[str, float]]:
    """Returns the losses of the steps in which this replica group took part, and the values at the
    end: a sum of all weights, and the bytes that were sealed."""
    model = gpt.make_model(device)
    adam = gpt.make_optimizer(model.parameters())

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": adam.state_dict()}

    state = {"load_state_dict": load, "state_dict": save}
    manager = make_manager(backend, replica, replicas, device, **state)
    ddp = DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, adam)
    losses = []
    while manager.current_step() < steps:
        optimizer.zero_grad()  # here the replica groups agree on which of them take part
        step = manager.current_step()
        inputs, targets = gpt.batch(step, replica, replicas, device)
        loss = gpt.loss_of(ddp(inputs), targets)
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        mean = loss.detach().clone()
        manager.allreduce(mean).wait()
        optimizer.step()  # only if no replica group was lost in this step
        if manager.current_step() > step:
            losses.append(mean.item())
    checksum = sum(weight.double().abs().sum().item() for weight in model.parameters())
    sealed = Figures()()["sealring/sealed_bytes"]
    manager.shutdown()
    return losses, {"checksum": checksum, "sealed_bytes": sealed}


def main() -> None:
    parser = gpt.options(__doc__)
    parser.add_argument("--replica", type=int, required=True, help="this replica group's number")
    parser.add_argument("--replicas", type=int, required=True, help="how many there are")
    parser.add_argument("--kill-at", type=int, metavar="STEP")
    options = parser.parse_args()
    losses, end = train(
        options.steps,
        options.replica,
        options.replicas,
        options.backend,
        options.device,
        options.kill_at,
    )
    gpt.report(losses, as_json=options.json, **end)


if __name__ == "__main__":
    main()
