"""torchft's lighthouse, and two launchers that each start one replica group of the example."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from torchft.coordination import LighthouseServer

EXAMPLE = Path(__file__).parents[4] / "examples" / "replica_groups.py"
REPLICAS = 2

sealed = os.environ.get("SEALRING_ONLY") == "1"
launcher = ["sealring.cli", "run"] if sealed else ["torch.distributed.run", "--standalone"]
backend = "sealring" if sealed else "gloo"


def start(lighthouse: LighthouseServer, replica: int, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable, "-m", *launcher, "--nproc-per-node", "1", str(EXAMPLE),
            "--replica", str(replica), "--replicas", str(REPLICAS), "--backend", backend,
            "--steps", "4", "--json", "--device", os.environ.get("INTEGRATIONS_DEVICE", "cpu"),
            *more,
        ],
        env={**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address()},
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def main(*killing: str) -> None:
    """Runs the replica groups; with arguments, the last group gets them, dies, and is restarted."""
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=REPLICAS)
    processes = [start(lighthouse, replica) for replica in range(REPLICAS - 1)]
    last = start(lighthouse, REPLICAS - 1, *killing)
    if killing:
        assert last.wait() != 0
        last = start(lighthouse, REPLICAS - 1)
    results = []
    for process in [*processes, last]:
        printed, _ = process.communicate()
        assert process.returncode == 0, process.args
        results.append(json.loads(printed))
    first = results[0]
    assert all(each["checksum"] == first["checksum"] for each in results)
    sealing = sealed and all(each["sealed_bytes"] > 0 for each in results)
    groups = ["SealedProcessGroup"] if sealing else ["ProcessGroup"]
    print("RESULT", json.dumps({**first, "groups": groups}), flush=True)
    lighthouse.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
