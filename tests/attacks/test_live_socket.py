"""Attacks on the socket that tells a worker's status."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sealring.errors import ConfigurationError
from sealring.observe.directory import PrivateDirectory
from sealring.observe.server import StatusServer
from sealring.observe.status import WorkerStatus, read_all
from tests.attacks.unprivileged import USER, needs_unprivileged, start

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Makes a folder that other users can reach."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


CONNECT = """
import socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(10)
try:
    sock.connect(sys.argv[1])
    sock.sendall(b"status\\n")
    print("got", sock.recv(100))
except OSError as problem:
    print(type(problem).__name__)
"""


def as_another_user(path: Path) -> str:
    process = start([sys.executable, "-c", CONNECT, str(path)], stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=60)
    return str(output).strip()


@needs_root
@needs_unprivileged
@pytest.mark.threat("K8")
def test_another_user_gets_no_answer(folder: Path) -> None:
    directory = PrivateDirectory(folder / "live", create=True)
    server = StatusServer(directory, {"status": lambda: b"mine\n"})
    try:
        assert as_another_user(server.path) == "PermissionError"
        # Even if file modes let the other user in, the server asks the kernel who connects.
        (folder / "live").chmod(0o711)
        server.path.chmod(0o777)
        assert as_another_user(server.path) in (
            "got b''", "ConnectionResetError", "BrokenPipeError",
        )  # fmt: skip
    finally:
        server.close()


@needs_root
@pytest.mark.threat("K9")
def test_a_directory_of_another_user_is_refused(folder: Path) -> None:
    (folder / "live").mkdir(mode=0o700)
    os.chown(folder / "live", USER, USER)
    with pytest.raises(ConfigurationError, match=f"belongs to user {USER} and not to user 0"):
        PrivateDirectory(folder / "live", create=True)
    with pytest.raises(ConfigurationError, match=f"belongs to user {USER}"):
        read_all(WorkerStatus, folder / "live")


@pytest.mark.threat("K9")
def test_a_symbolic_link_in_place_of_the_directory_is_refused(folder: Path) -> None:
    (folder / "real").mkdir(mode=0o700)
    (folder / "live").symlink_to(folder / "real")
    with pytest.raises(ConfigurationError, match="cannot be used"):
        PrivateDirectory(folder / "live", create=True)


def test_a_directory_that_is_open_to_others_is_refused(folder: Path) -> None:
    (folder / "live").mkdir()
    (folder / "live").chmod(0o750)
    with pytest.raises(ConfigurationError, match="chmod 700"):
        PrivateDirectory(folder / "live", create=True)


def test_a_file_in_place_of_the_directory_is_refused(folder: Path) -> None:
    (folder / "live").touch()
    with pytest.raises(ConfigurationError, match="cannot be used"):
        PrivateDirectory(folder / "live", create=True)


@pytest.mark.threat("K10")
def test_a_flood_of_readers_is_not_accepted_and_a_reader_after_it_is_served(folder: Path) -> None:
    directory = PrivateDirectory(folder / "live", create=True)
    computed: list[int] = []
    server = StatusServer(directory, {"status": lambda: computed.append(1) or b"mine\n"})
    flood: list[socket.socket] = []
    refused = 0
    try:
        for _ in range(1000):
            sock = socket.socket(socket.AF_UNIX)
            sock.setblocking(False)
            flood.append(sock)
            try:
                sock.connect(str(server.path))
                sock.send(b"status\n")
            except BlockingIOError:
                refused += 1
            except OSError:
                continue
        assert refused > 500
        assert len(server.connections()) <= 16
        for sock in flood:
            sock.close()
        with socket.socket(socket.AF_UNIX) as late:
            late.connect(str(server.path))
            late.settimeout(20)
            late.sendall(b"status\n")
            assert late.recv(100) == b"mine\n"
        assert len(computed) < 100
    finally:
        for sock in flood:
            sock.close()
        server.close()


FORK = """
import os, sys
from pathlib import Path
from sealring.observe import server
from sealring.observe.directory import PrivateDirectory
from sealring.observe.status import WorkerStatus, read_all
from tests.observe.scenes import group_made

live = Path(sys.argv[1])
server.show(live, group_made())
mine = server.socket_path()
before = set(os.listdir("/proc/self/fd"))
child = os.fork()
if child == 0:
    assert server.socket_path() is None
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd != "9"
             and os.path.lexists(f"/proc/self/fd/{fd}")]
    assert not any(link.startswith("socket:") for link in links), links
    sys.exit(0)  # runs what is registered for a process's end
assert os.waitpid(child, 0)[1] == 0
assert mine.is_socket()
assert [each.pid for each in read_all(WorkerStatus, live).answers] == [os.getpid()]
print("served")
"""


@pytest.mark.threat("K11")
def test_a_forked_child_does_not_answer_and_does_not_remove_the_socket(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, str(folder / "live")],
        capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("served\n", "")
    assert os.listdir(folder / "live") == []


@pytest.mark.threat("K9")
def test_training_goes_on_where_the_directory_cannot_be_used(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from sealring.observe import server
    from tests.observe.scenes import group_made

    (folder / "live").touch()
    server.show(folder / "live", group_made())
    assert server.socket_path() is None
    (line,) = [each.message for each in caplog.records if each.name == "sealring"]
    assert "`sealring top` will not show this worker" in line
