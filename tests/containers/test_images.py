"""The images that `make containers` built: they start, are healthy, and run as a plain user."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

# Low limits: a machine may not let a container raise them.
LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096")
ENGINES = (("podman",), ("podman", "--runtime", "runc", "--cgroup-manager", "cgroupfs"))
SECONDS = 300
pytestmark = pytest.mark.timeout(5 * SECONDS)


@cache
def engine(image: str) -> tuple[str, ...]:
    """How containers are run on this machine; skips where none can be."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed: make container-deps")
    if subprocess.run(["podman", "image", "exists", image], capture_output=True).returncode:
        pytest.skip(f"there is no image {image}: make containers")
    for command in ENGINES:
        tried = [*command, "run", "--rm", "--network", "none", *LIMITS, "--entrypoint", "true"]
        done = subprocess.run([*tried, image], capture_output=True, text=True, timeout=SECONDS)
        if done.returncode == 0:
            return command
    pytest.skip(f"containers do not run here: {done.stderr.strip().splitlines()[-1]}")


@dataclass(frozen=True)
class Image:
    name: str
    state: str
    """A volume, mounted where the image keeps what must last."""

    def command(self, *arguments: str, options: tuple[str, ...] = ()) -> list[str]:
        volume = ("--volume", f"{self.state}:/sealring")
        return [
            *engine(self.name), "run", "--network", "none", *LIMITS, *volume, *options, self.name,
            *arguments,
        ]  # fmt: skip

    def run(self, *arguments: str, options: tuple[str, ...] = ()) -> str:
        return ask(*self.command(*arguments, options=("--rm", *options)))


def ask(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture
def volume() -> Iterator[str]:
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed: make container-deps")
    name = f"sealring-test-{uuid.uuid4().hex[:8]}"
    ask("podman", "volume", "create", name)
    yield name
    ask("podman", "volume", "rm", "--force", name)


@pytest.fixture
def broker(volume: str) -> Image:
    return Image("localhost/sealring-broker", volume)


@pytest.fixture
def worker(volume: str) -> Image:
    return Image("localhost/sealring-worker", volume)


@pytest.fixture
def policy(broker: Image, tmp_path: Path) -> Path:
    broker.run("ca", "init", "/sealring/ca")
    stanza = broker.run("policy", "new", "--simulator", "/sealring/simulator")
    path = tmp_path / "policy.toml"
    path.write_text("version = 1\n" + stanza[stanza.index("[simulated]") :])
    tmp_path.chmod(0o755)
    return path


@pytest.fixture
def serving(broker: Image, policy: Path) -> Iterator[str]:
    """A broker's container that was started as the image says; its name."""
    name = f"{broker.state}-broker"
    mount = ("--volume", f"{policy}:/etc/sealring/policy.toml:ro")
    ask(*broker.command(options=("--detach", "--name", name, *mount)))
    yield name
    ask(*engine(broker.name), "rm", "--force", "--time", "5", name)


def healthy(image: Image, name: str) -> bool:
    """What the image's own health check says."""
    done = subprocess.run(
        [*engine(image.name), "healthcheck", "run", name], capture_output=True, timeout=SECONDS
    )
    return done.returncode == 0


def test_the_broker_starts_and_passes_its_health_check(broker: Image, serving: str) -> None:
    until = time.monotonic() + SECONDS
    while not healthy(broker, serving):
        assert time.monotonic() < until, ask(*engine(broker.name), "logs", serving)
        time.sleep(0.5)
    (found,) = json.loads(ask(*engine(broker.name), "inspect", serving))
    assert found["State"]["Running"] is True
    # Another broker's authority: the same process is not healthy any more.
    move = "mv /sealring/ca/authority.pem /sealring/kept && cp /sealring/simulator/*.pem"
    ask(*engine(broker.name), "exec", serving, "sh", "-c", f"{move} /sealring/ca/authority.pem")
    assert not healthy(broker, serving)
    ask(
        *engine(broker.name), "exec", serving,
        "mv", "/sealring/kept", "/sealring/ca/authority.pem",
    )  # fmt: skip
    assert healthy(broker, serving)
    ask(*engine(broker.name), "stop", "--time", "30", serving)
    (found,) = json.loads(ask(*engine(broker.name), "inspect", serving))
    assert found["State"]["ExitCode"] == 0, ask(*engine(broker.name), "logs", serving)


def test_the_broker_has_no_torch_and_no_compiler(broker: Image) -> None:
    code = "import importlib.util as u, shutil as s; print(u.find_spec('torch'), s.which('cc'))"
    assert broker.run("-c", code, options=("--entrypoint", "python")).strip() == "None None"


@pytest.mark.parametrize("role", ["broker", "worker"])
def test_it_runs_as_a_plain_user_that_cannot_change_the_program(role: str, volume: str) -> None:
    image = Image(f"localhost/sealring-{role}", volume)
    script = "id -u; touch /usr/local/sealring/bin/sealring 2>&1 || true"
    user, refused = image.run("-c", script, options=("--entrypoint", "sh")).splitlines()
    assert user == "10001"
    assert "Permission denied" in refused


def test_a_worker_trains_and_notices_an_attack(worker: Image) -> None:
    """`sealring demo`: two ranks, a tapped link, a flipped bit."""
    told = json.loads(worker.run("demo", "--json", "--steps", "4", "--ranks", "2"))
    assert told["as_promised"], told["surprises"]
