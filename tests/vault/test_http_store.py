"""A vault behind an HTTP server: what the server's failures, redirects and pages can do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from sealring.errors import (
    ConfigurationError,
    NotAVault,
    SealringError,
    StoreFailed,
    TamperedChunk,
    TruncatedFile,
    Unsupported,
)
from sealring.vault import Vault, keys, requests
from tests.vault.http_store import Answer, HttpStore, serving
from tests.vault.test_checkpoints import load, refused, same, save, state
from tests.workers import SECRET

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture
def server(vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpStore]:
    """It has two versions of one checkpoint. Those who load it have a ledger that knows neither."""
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    monkeypatch.setenv("SEALRING_JOB", "tests")
    save(vault, 1)
    save(vault, 2)
    (tmp_path / "fresh").mkdir()
    monkeypatch.setenv("SEALRING_VAULT_LEDGER", str(tmp_path / "fresh"))
    with serving(tmp_path) as server:
        yield server


def opened(server: HttpStore, key: Path) -> Vault:
    return Vault.open(f"{server.address}/vault", keys.key_file(key))


def loaded(server: HttpStore, key: Path) -> int:
    """The version that a new process would load."""
    into = load(opened(server, key))
    assert same(into, state(into["step"]))
    return int(into["step"])


def in_newest(path: str) -> bool:
    return "/0000000002/" in path


def test_a_checkpoint_is_loaded(server: HttpStore, key: Path) -> None:
    assert loaded(server, key) == 2


@pytest.mark.parametrize("ledger", ["fresh", "known"])
@pytest.mark.parametrize("name", ["key.json", "manifest", "rank-00000", ""])
@pytest.mark.parametrize(
    "fault",
    ["503", "403", "401", "429", "200 without a length", "lost", "204", "300", "302", "304"],
)
@pytest.mark.threat("V27")
def test_an_outage_yields_no_older_version(
    fault: str, name: str, ledger: str, server: HttpStore, key: Path
) -> None:
    """It was version 1, and with a ledger that knows version 2 a false `RolledBack`."""
    if ledger == "known":
        assert loaded(server, key) == 2
    found = Answer(int(fault[:3])) if fault != "lost" else Answer(lost=True)
    if fault.startswith("200"):
        found.headers["Content-Length"] = "none"

    def answer(method: str, path: str) -> Answer | None:
        return found if in_newest(path) and path.endswith(f"/{name}") else None

    server.answer = answer
    refused(lambda: load(opened(server, key)), StoreFailed, server.address)
    server.answer = lambda method, path: None
    assert loaded(server, key) == 2


@pytest.mark.threat("V27")
def test_a_question_whose_second_attempt_fails(server: HttpStore, key: Path) -> None:
    """The client asks with HEAD and then with GET: the last answer decides."""
    statuses = {"HEAD": 404, "GET": 503}

    def answer(method: str, path: str) -> Answer | None:
        return Answer(statuses[method]) if in_newest(path) and "manifest" in path else None

    server.answer = answer
    refused(lambda: load(opened(server, key)), StoreFailed, "503")
    statuses = {"HEAD": 503, "GET": 404}  # so the version is not complete
    assert loaded(server, key) == 1


@pytest.mark.threat("V27")
def test_a_server_that_is_down_has_no_word_on_the_vault(server: HttpStore, key: Path) -> None:
    """It was told that `sealring vault init` makes one."""
    server.answer = lambda method, path: Answer(503)
    with pytest.raises(StoreFailed, match="503"):
        opened(server, key)
    with serving(server.directory) as other:
        gone = f"{other.address}/vault"
    with pytest.raises(StoreFailed, match="cannot be used: Cannot connect"):
        Vault.open(gone, keys.key_file(key))


@pytest.mark.parametrize("status", [404, 410])
def test_what_a_server_says_is_gone_is_gone(status: int, server: HttpStore, key: Path) -> None:
    def answer(method: str, path: str) -> Answer | None:
        return Answer(status) if in_newest(path) and path.endswith("manifest") else None

    server.answer = answer
    assert loaded(server, key) == 1
    server.answer = lambda method, path: Answer(status)
    with pytest.raises(NotAVault, match="there is no vault in"):
        opened(server, key)


@pytest.mark.parametrize("url", ["gs://b/v", "sftp://h/v", "simplecache::http://h/v", "zip://v"])
@pytest.mark.threat("V27")
def test_a_kind_of_store_that_cannot_tell_failure_from_absence(url: str, key: Path) -> None:
    with pytest.raises(Unsupported, match="may call a file absent that it could not read"):
        Vault.open(url, keys.key_file(key))


@pytest.mark.parametrize(
    "url",
    [
        "http://me:hunter2@127.0.0.1:1/vault",
        "https://hunter2@127.0.0.1:1/vault",
        "http://127.0.0.1:1/vault?token=hunter2",
        "http://me:hunter2/x@127.0.0.1/vault",
        "http://[me:hunter2@127.0.0.1/vault",
        "s3://me:hunter2@bucket/vault",
    ],
)
@pytest.mark.threat("V30")
def test_a_password_in_a_url_is_neither_shown_nor_recorded(
    url: str, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ledgers").mkdir()
    monkeypatch.setenv("SEALRING_VAULT_LEDGER", str(tmp_path / "ledgers"))
    with pytest.raises(ConfigurationError, match="a user name, a password, a query") as failed:
        Vault.open(url, keys.key_file(key))
    assert "hunter2" not in str(failed.value)
    assert list((tmp_path / "ledgers").iterdir()) == []


def test_credentials_of_a_server_are_given_to_its_client(server: HttpStore, key: Path) -> None:
    """As the error of a URL with a password says."""
    env = {**os.environ, "FSSPEC_HTTP": '{"headers": {"Authorization": "Basic abc"}}'}
    command = ["vault", "ls", f"{server.address}/vault", "--key", str(key)]
    subprocess.run([sys.executable, "-m", "sealring.cli", *command], env=env, check=True)
    assert {headers.get("Authorization") for _, _, headers, _ in server.requests} == {"Basic abc"}


def a_page(*names: str) -> bytes:
    return "".join(f'<li><a href="{one}">x</a></li>' for one in names).encode()


TRICKS = [
    "../../../etc/passwd", "/etc/passwd", "..", ".", "", "/", "//", "http://127.0.0.1:9/0000000009",
    "file:///etc/passwd", "0000000009\0", "0000000009%00", "0000000009/..", "..%2f0000000009",
    "0000000009?x", "0000000009#x", "000000000९", "00000000\u0660\u0661", "0000000002/",
    "0000000002", "A" * 5000, "0" * 5000, "\u202e2000000000", "javascript:0000000009",
    "0000000009\n", "-000000009",
]  # fmt: skip


@pytest.mark.threat("V32")
def test_names_in_a_listing_that_lead_elsewhere(server: HttpStore, key: Path) -> None:
    """Only names of the vault's own form are used, and only below the vault's folder."""

    def answer(method: str, path: str) -> Answer | None:
        folder = server.directory / path.strip("/")
        if path.endswith("/vault/objects/") or not path.endswith("/") or not folder.is_dir():
            return None
        genuine = sorted(one.name for one in folder.iterdir())
        return Answer(body=a_page(*TRICKS, *genuine, *genuine, *map(str.upper, genuine)))

    server.answer = answer
    assert loaded(server, key) == 2
    for _, path, _, _ in server.requests:
        assert path.startswith("/vault/")
        assert ".." not in path
        assert "%" not in path


@pytest.mark.parametrize("body", [b"<a" + b" " * 100_000, b"<a href" * 100_000, b"href=" * 100_000])
@pytest.mark.threat("V33")
def test_a_listing_that_takes_hours_to_read(body: bytes, server: HttpStore, key: Path) -> None:
    """fsspec looks for links with an expression whose time grows with the third power."""
    pages = {"/vault/objects/": body}
    server.answer = lambda method, path: Answer(body=pages[path]) if path in pages else None
    assert list(opened(server, key).newest()) == []


@pytest.mark.parametrize("name", ["vault.json", "objects/", "manifest", "rank-00000"])
@pytest.mark.threat("V27")
def test_an_answer_without_an_end(
    name: str, server: HttpStore, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "OVERHEAD", 1 << 20)

    def answer(method: str, path: str) -> Answer | None:
        # HEAD tells a length that is allowed.
        if method != "GET" or not path.endswith(name if name[-1] != "/" else "/"):
            return None
        return Answer(body=b"<a href='0000000009'>" * 3000, endless=True)

    server.answer = answer
    with pytest.raises((StoreFailed, CheckpointException)) as failed:
        load(opened(server, key))
    assert "an answer has more than" in str(failed.value)


@pytest.mark.parametrize("name", ["vault.json", "/", "manifest", "rank-00000"])
@pytest.mark.threat("V33")
def test_a_byte_a_second(
    name: str, server: HttpStore, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No silence is long enough for a limit on silence: the whole answer has one."""
    monkeypatch.setattr(requests, "SILENT_SECONDS", 2.0)

    def answer(method: str, path: str) -> Answer | None:
        slow = method == "GET" and path.endswith(name)
        return Answer(body=bytes(1000), slowly=0.2) if slow else None

    server.answer = answer
    with pytest.raises((StoreFailed, CheckpointException)) as failed:
        load(opened(server, key))
    assert "did not answer within 2 seconds" in str(failed.value)


@pytest.mark.parametrize("length", [0, 1, 10_000, -1])
@pytest.mark.parametrize("name", ["vault.json", "key.json", "manifest", "rank-00000"])
@pytest.mark.threat("V27")
def test_a_length_that_is_not_the_files(
    name: str, length: int, server: HttpStore, key: Path
) -> None:
    """No older version is taken. What is no length is asked for again, with GET."""

    def answer(method: str, path: str) -> Answer | None:
        newest = "objects" not in path or in_newest(path)
        lies = method == "HEAD" and path.endswith(name) and newest
        return Answer(headers={"Content-Length": str(length)}) if lies else None

    server.answer = answer
    if length == -1:
        assert loaded(server, key) == 2
        return
    error: type[Exception] = TruncatedFile if name == "rank-00000" else StoreFailed
    with pytest.raises((SealringError, CheckpointException)) as failed:
        load(opened(server, key))
    found = failed.value
    if isinstance(found, CheckpointException):
        found = found.failures[0][0]
    assert type(found) is error


@pytest.mark.threat("V27")
def test_a_file_that_changes_between_two_ranges(server: HttpStore, key: Path) -> None:
    """With another ETag and the same length: the older version's part behind the newer's start."""
    older, newer = (
        (server.directory / "vault").glob(f"objects/*/{number}/*/rank-00000")
        for number in ("0000000001", "0000000002")
    )
    content, other = next(newer), next(older).read_bytes()

    def answer(method: str, path: str) -> Answer | None:
        if method == "GET" and in_newest(path) and path.endswith("rank-00000"):
            count.append(path)
            if len(count) > 2:  # its head has been read, and opened
                content.write_bytes(other)
        return None

    count: list[str] = []
    server.answer = answer
    refused(lambda: load(opened(server, key)), TamperedChunk, "part rank-00000 of 'run' version 2")
    assert len(count) > 2
