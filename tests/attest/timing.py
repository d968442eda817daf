"""`python -m tests.attest.timing [WORKERS]`: measures judging evidence, and many joins at once.

The evidence is made by the tests. Each time is the best of several runs.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sealring.attest.evidence import Evidence, Trust, parse_evidence, verify_evidence
from sealring.attest.evidence.evidence import Challenge
from sealring.attest.evidence.nvidia import verify_nvidia
from sealring.errors import WorkerFailed
from sealring.lab.bench.harness import seconds_of
from tests.attest.minting import CHALLENGE, NOW
from tests.attest.minting.amd import Amd
from tests.attest.minting.intel import Intel
from tests.attest.minting.nvidia import Nvidia
from tests.attest.minting.tpm import Maker

if TYPE_CHECKING:
    from sealring.attest.broker.client import Joined

_RUNS: Final = 20


def verify_ms(runs: int = _RUNS) -> dict[str, float]:
    """Milliseconds for one piece of evidence of each kind, from the bytes to the verdict.

    A GPU's time is that of its own report. Its machine's evidence comes on top.
    """
    maker, amd, intel, nvidia = Maker(), Amd(), Intel(), Nvidia()
    nonce = CHALLENGE.device_nonce("snp")
    gpu, known = nvidia.evidence(nonce), nvidia.trust(*nvidia.references())
    return {
        "tpm": _best(runs, _judged(maker.evidence(), maker.challenge(), maker.trust())),
        "snp": _best(runs, _judged(amd.evidence(), CHALLENGE, amd.trust(amd.revocation_list()))),
        "tdx": _best(runs, _judged(intel.evidence(), CHALLENGE, intel.trust(now=NOW))),
        "nvidia": _best(runs, lambda: verify_nvidia(gpu, nonce, known)),
    }


def _judged(evidence: Evidence, challenge: Challenge, trust: Trust) -> Callable[[], object]:
    encoded = evidence.encode()
    return lambda: verify_evidence(parse_evidence(encoded), challenge, trust)


def _best(runs: int, once: Callable[[], object]) -> float:
    """The least milliseconds of all runs: other work on this machine only adds time."""
    return round(min(seconds_of(once) for _ in range(runs)) * 1000, 3)


# ---- many workers that join through one broker at once, with SIMULATED evidence


_JOB: Final = "bench"
_PATIENCE: Final = 600.0


def join_seconds(workers: int) -> float:
    """From the first connection until the last worker has its certificate.

    TLS, evidence, verdicts, commits to disk and certificates are real. The broker is a process of
    its own.
    """
    with (
        tempfile.TemporaryDirectory(prefix="sealring-joins-") as folder,
        _broker(Path(folder)) as port,
    ):
        seconds, joined = asyncio.run(_join_all(Path(folder), port, workers))
    if len({one.certificate.serial_number for one in joined}) != workers:
        raise WorkerFailed("not every worker got a certificate of its own")
    return round(seconds, 2)


async def _join_all(folder: Path, port: int, workers: int) -> tuple[float, list[Joined]]:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from sealring.attest.broker.client import BrokerClient
    from sealring.attest.broker.keys import open_broker_keys
    from sealring.attest.evidence.attesters import open_simulator
    from sealring.core.identity.names import WorkerName

    # Every worker is a connection of this process.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attester = open_simulator(folder / "simulator")
    authorities = [open_broker_keys(folder / "ca").authority]
    clients = [BrokerClient([("127.0.0.1", port)], authorities) for _ in range(workers)]
    keys = [Ed25519PrivateKey.generate() for _ in range(workers)]
    start = time.perf_counter()
    joined = await asyncio.gather(
        *(
            client.join(WorkerName(_JOB, rank), workers, key, attester, _PATIENCE)
            for rank, (client, key) in enumerate(zip(clients, keys, strict=True))
        )
    )
    return time.perf_counter() - start, joined


@contextmanager
def _broker(folder: Path) -> Iterator[int]:
    """Runs a broker in a process of its own. Yields its port."""
    from sealring.attest.evidence.attesters import make_simulator
    from sealring.core.identity.authority import create_authority

    create_authority(folder / "ca", "benchmark")
    attester = make_simulator(folder / "simulator")
    (folder / "policy.toml").write_text(
        f'version = 1\n[simulated]\nroots = ["{attester.simulator.fingerprint}"]\n'
        f'measurements = ["{attester.measurement.hex()}"]\n'
    )
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(folder, there), daemon=True)
    process.start()
    there.close()
    try:
        try:
            yield here.recv()
        except EOFError:
            raise WorkerFailed("the broker of the benchmark did not start") from None
    finally:
        process.terminate()
        process.join()


def _serve(folder: Path, there: Any) -> None:
    from sealring.attest.broker.keys import open_broker_keys
    from sealring.attest.broker.server import serving
    from sealring.attest.broker.service import Broker, BrokerRules
    from sealring.attest.broker.store import SqliteStore
    from sealring.attest.evidence.cache import read_policy, trust_in
    from sealring.formats.http import ServerLimits

    async def main() -> None:
        keys = open_broker_keys(folder / "ca")
        policy, digest = read_policy(folder / "policy.toml")
        broker = Broker(
            keys,
            SqliteStore(folder / "broker.sqlite", keys.store_key),
            BrokerRules(policy, digest, trust_in(policy, None)),
        )
        async with serving(
            broker,
            keys,
            listen=("127.0.0.1", 0),
            page=None,
            names=["127.0.0.1"],
            limits=ServerLimits(),
        ) as (port, _):
            there.send(port)
            await asyncio.Event().wait()

    asyncio.run(main())


if __name__ == "__main__":
    together = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    joined = {"workers": together, "seconds": join_seconds(together)}
    print(json.dumps({"verify_ms": verify_ms(), "join": joined}))
