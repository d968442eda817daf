"""The whole run, in namespaces of its own: python -m tests.vault.whole_run FOLDER.

FOLDER, /tmp and /dev/shm are all that the job can write to. FOLDER/outside is a file system of its
own for what is plaintext on purpose: the owner's source, and torch's own checkpoint. Prints JSON.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from sealring import _native
from sealring.core.settings import with_settings
from sealring.vault import Vault, keys
from tests.attest.broker.local import running
from tests.attest.broker.tpm_hosts import TpmHosts, tpm_hosts
from tests.vault.capture import Capture, send_over_loopback
from tests.vault.datasets.made import sealed
from tests.vault.plaintext import Plaintext, files_of, memory_files_of
from tests.vault.whole_run_job import BATCH, LENGTH, RESOURCE, Told, go_on, train_and_save
from tests.workers import Workers

SHARED_MEMORY = Path("/dev/shm")
SAMPLES = 600
STEPS, LOST, RESUMED = 3, 1, 3
"""Before the checkpoint, behind it until the workers are killed, and after the resume."""


class Watch:
    """All files that appear in /dev/shm, also for a short time."""

    def __init__(self) -> None:
        self.seen: dict[str, bytes] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch")
        self._thread.start()

    def _look(self) -> None:
        while not self._end.wait(0.02):
            self.seen |= dict(files_of(SHARED_MEMORY))
        self.seen |= dict(files_of(SHARED_MEMORY))

    def stop(self) -> dict[str, bytes]:
        self._end.set()
        self._thread.join()
        return self.seen


class Job:
    """Workers of one world, each with a TPM of its own. They are killed when the context ends."""

    def __init__(self, folder: Path, world: int, hosts: TpmHosts, env: dict[str, str]) -> None:
        self._workers = Workers(world)
        self._folder, self._world, self._env = folder, world, env
        self._tpms = {rank: with_settings({}, tpm=hosts.addresses[rank]) for rank in range(world)}

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._workers.processes:
            process.kill()
        self._workers.close()

    def run(self, fn: Callable[..., Any], *arguments: int) -> list[Any]:
        places = str(self._folder / "vault"), str(self._folder / "outside" / "plain")
        return self._workers.run(
            fn, *places, *arguments, world=self._world, env=self._env, rank_env=self._tpms
        )

    def memory_files(self) -> dict[str, bytes]:
        """While the group exists."""
        return dict(memory_files_of(each.pid for each in self._workers.processes))


class Seen:
    """What the job has left, and has passed on."""

    def __init__(self) -> None:
        self._capture, self._watch = Capture(), Watch()
        self.memory: dict[str, bytes] = {}

    def stop(self) -> None:
        self._frames, self._shared = self._capture.stop(), self._watch.stop()

    def report(self, secret: dict[str, Plaintext]) -> dict[str, Any]:
        """Of each place: how much there was, and where which plaintext is in it."""
        return {
            "disk": found(secret, files_of(Path("/tmp"))),
            "shared memory": found(secret, self._shared.items()),
            "memory files": found(secret, self.memory.items()),
            "network": found(secret, [("frames", self._frames)]),
        }


def found(
    secret: dict[str, Plaintext], files: Iterable[tuple[str, bytes | bytearray]]
) -> dict[str, Any]:
    size, hits = 0, []
    for name, content in files:
        size += len(content)
        hits += [[what, name] for what, one in secret.items() if one.find(content) is not None]
    return {"bytes": size, "found": hits}


def make_vault(path: Path, hosts: TpmHosts, source: Path) -> None:
    """As its owner does: sealed, and open to workers that the broker admits."""
    data_key = hosts.place.data_keys / RESOURCE
    data_key.parent.mkdir(parents=True)
    data_key.write_bytes(bytes(_native.Secret.random(32)))
    data_key.chmod(0o600)
    keys.make_key_file(path.with_name("owner.key"))
    vault = Vault.create(path, keys.key_file(path.with_name("owner.key")), "owner")
    vault.grant("workers", keys.broker_key(RESOURCE, _native.Secret(data_key.read_bytes())))
    sealed(vault, source, shard=8000, dtype="uint16")


def leave_plaintext(folder: Path, samples: dict[str, bytes]) -> dict[str, bytes]:
    """In each place: by this the test knows that the search would have found it."""
    for name, content in samples.items():
        send_over_loopback(content)
        (folder / name).write_bytes(content)
        (SHARED_MEMORY / name).write_bytes(content)
    whole = b"".join(samples.values())
    file = os.memfd_create("control")
    try:
        os.write(file, whole)
        with mmap.mmap(file, len(whole)):
            return dict(memory_files_of([os.getpid()]))
    finally:
        os.close(file)


def run_job(folder: Path, source: Path, seen: Seen) -> tuple[list[Told], list[Any]]:
    resources = f'[[resources]]\npath = "{RESOURCE}"'
    with tpm_hosts(folder, 4, top="rejoins = 1", more=resources) as hosts:
        make_vault(folder / "vault", hosts, source)
        with running(hosts.place) as broker:
            env = {**hosts.environment(broker.port), "SEALRING_VAULT_LEDGER": "broker"}
            # One world's messages pass the network, the other's shared memory.
            with Job(folder, 4, hosts, env | {"SEALRING_TRANSPORT": "tcp"}) as first:
                before = first.run(train_and_save, STEPS, LOST)
                seen.memory |= first.memory_files()
            with Job(folder, 3, hosts, env | {"SEALRING_TRANSPORT": "shm"}) as second:
                after = second.run(go_on, RESUMED, 4 * BATCH * STEPS + 3 * BATCH * RESUMED)
                seen.memory |= second.memory_files()
    return before, after


def main() -> None:
    folder = Path(sys.argv[1])
    os.chdir(folder)
    source = folder / "outside" / "source"
    source.mkdir()
    tokens = np.random.default_rng(3).integers(0, 65536, SAMPLES * LENGTH, dtype="<u2")
    tokens.tofile(source / "data.bin")
    seen = Seen()
    try:
        before, after = run_job(folder, source, seen)
    finally:
        seen.stop()
    sealed_told, plain_told, order = zip(*after, strict=True)
    weights = [one for told in (*before, *sealed_told, *plain_told) for one in told.weights]
    features = (tokens.astype(np.float32) / 65536).tobytes()
    secret = {"data": Plaintext([tokens.tobytes(), features]), "weights": Plaintext(weights)}
    report = {
        "runs": {name: [one.runs, one.left_out] for name, one in secret.items()},
        "places": seen.report(secret),
        "outside": found(secret, files_of(folder / "outside")),
        "saved": [told.state for told in before],
        "loaded": [[told.state for told in each] for each in (sealed_told, plain_told)],
        "losses": [[told.losses for told in each] for each in (sealed_told, plain_told)],
        "order": [one.hex() for one in order[0]],
        "samples": {
            "before": [[one.hex() for one in told.samples] for told in before],
            "after": [[one.hex() for one in told.samples] for told in sealed_told],
        },
    }
    control = Seen()
    samples = {"data": features[-500:], "weights": max(weights, key=len)[-500:]}
    control.memory = leave_plaintext(folder, samples)
    control.stop()
    report["control"] = control.report(secret)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
