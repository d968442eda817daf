"""The commands of docs/attestation.md, taken from it and run as they stand, on three machines.

Each machine has namespaces of its own for network, mounts and host name:

    broker 10.77.0.1 (a bridge) ---- host0 10.77.0.10, with a TPM in software
                                ---- host1 10.77.0.11, with another TPM

Servers on the broker's loopback stand in for the vendors': AMD's gives the TPM maker's list.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from sealring.core.settings import with_settings
from tests.attest import minting
from tests.attest.evidence import swtpm
from tests.attest.minting import pem
from tests.attest.minting.nvidia import Nvidia
from tests.attest.minting.tpm import Maker
from tests.cli.namespaces import PATIENCE, answers, end, machines, tpm_of, vendors

DOCUMENT = Path(__file__).parents[2] / "docs" / "attestation.md"
FENCE = re.compile(r"^( *)```(sh|toml)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
TRAIN = """
import json, pathlib, time, torch, torch.distributed as dist
from sealring.attest.broker import data_key
dist.init_process_group("sealring")
value = torch.full((3,), float(dist.get_rank() + 1))
dist.all_reduce(value)
told = {"sum": value.tolist(), "key": data_key("gpt/key/dataset").hex()}
pathlib.Path("result.new").write_text(json.dumps(told))
pathlib.Path("result.new").rename("result")
while not pathlib.Path("go").exists():
    time.sleep(0.05)
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Block:
    machines: tuple[str, ...]
    text: str


def blocks(language: str) -> list[str]:
    found = FENCE.findall(DOCUMENT.read_text())
    return [textwrap.dedent(text) for _, name, text in found if name == language]


def commands() -> list[Block]:
    """Returns the command blocks; a block's first line names the machines that run it."""
    found = []
    for text in blocks("sh"):
        match = re.match(r"# on (\w+)(?: and (\w+))?\n", text)
        assert match, f"where is this run? {text}"
        found.append(Block(tuple(name for name in match.groups() if name), text))
    return found


def test_every_command_of_the_document_is_in_a_block_that_is_run() -> None:
    """Each block belongs to one step of the test below; a new block must be added there."""
    told = [(block.machines, block.text.splitlines()[1].split(" ")[:3]) for block in commands()]
    hosts, broker = ("host0", "host1"), ("broker",)
    assert told == [
        (hosts, ["sealring", "policy", "attest"]),
        (broker, ["sealring", "policy", "new"]),
        (broker, ["sealring", "policy", "check"]),
        (broker, ["sealring", "ca", "init"]),
        (hosts, ["sealring", "run", "-n"]),
        (broker, ["curl", "-sf", "http://127.0.0.1:8444/"]),
        (broker, ["sealring", "policy", "new"]),
        (broker, ["openssl", "ocsp", "-issuer"]),
    ]


def wait_for(path: Path, *processes: subprocess.Popen[str]) -> None:
    until = time.monotonic() + PATIENCE
    while not path.exists():
        for process in processes:
            if process.poll() is not None and process.stdout is not None:
                pytest.fail(f"it ended before {path.name} was there:\n{process.stdout.read()}")
        assert time.monotonic() < until, f"{path.name} does not come"
        time.sleep(0.05)


@swtpm.needs_swtpm
@pytest.mark.timeout(400)
def test_the_commands_run_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(minting, "NOW", datetime.now(UTC))
    maker, gpu = Maker(), Nvidia()
    attest, new, check, begin, run, watch, simulator, ocsp = (one.text for one in commands())
    more = blocks("toml")[0]
    with ExitStack() as stack:
        made = stack.enter_context(machines(tmp_path))
        broker, hosts = made["broker"], (made["host0"], made["host1"])
        stack.enter_context(vendors(broker, maker, gpu))
        for host in hosts:
            (host.folder / "chain.pem").write_text(pem(maker.signer, maker.root))
            host.environ |= {
                "SEALRING_ATTESTER": "tpm:chain.pem",
                **with_settings({}, tpm=stack.enter_context(tpm_of(maker, host.folder))),
            }
        # Step 1: the evidence of the hosts becomes the policy.
        with ThreadPoolExecutor(2) as both:
            list(both.map(lambda host: host.run(attest), hosts))
        for host in hosts:
            shutil.copy(host.folder / f"{host.name}.json", broker.folder)
        assert "LEFT OPEN tpm: ima is not checked" in broker.run(new)
        # Step 2: the policy is extended and checked.
        policy = broker.folder / "policy.toml"
        policy.write_text(policy.read_text() + "\n" + more)
        told = broker.run(check)
        assert "gpt/key/dataset goes to all ranks of tpm." in told
        # Step 3: the last command of the block runs until the end.
        serving = broker.start(begin)
        stack.callback(end, serving)
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.extend(serving.stdout or ()), daemon=True)
        reader.start()
        answers(broker, 8443)
        # Step 4: the hosts train.
        training = []
        for host in hosts:
            shutil.copy(broker.folder / "ca" / "authority.pem", host.folder)
            shutil.copy(policy, host.folder)
            (host.folder / "train.py").write_text(TRAIN)
            training.append(host.start(run))
            stack.callback(end, training[-1])
        for host in hosts:
            wait_for(host.folder / "result", *training)
            result = json.loads((host.folder / "result").read_text())
            key = (broker.folder / "dataset.key").read_bytes()
            assert result == {"sum": [3.0] * 3, "key": key.hex()}
        # Step 5: the broker's page and list are read while the hosts train.
        told = broker.run(watch)
        page = (broker.folder / "page.html").read_text()
        assert page.count("tpm 2.0") >= 2
        assert told.count("joined") == 2
        assert "Peers learn of it at their next renewal" in told
        for host in hosts:
            (host.folder / "go").touch()
        for process in training:
            out, _ = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, out
        assert any("judged (--without-binding)" in line for line in said)
        # The rest of the document follows.
        assert "[simulated]" in broker.run(simulator)
        broker.run(ocsp)
        assert (broker.folder / "cache" / "gpu0.ocsp").stat().st_size
