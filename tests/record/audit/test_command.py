"""What `sealring audit` prints, and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from typer.testing import CliRunner

from sealring.cli import app
from sealring.cli.terminal import harmless
from sealring.errors import ConfigurationError
from tests.record.audit.folder_lies import cut
from tests.record.audit.made_runs import MODEL, RAW, MadeRun
from tests.record.audit.stated_lies import one_link


def options(folder: Path, made: MadeRun) -> list[str]:
    pem = made.authority.certificate.public_bytes(Encoding.PEM)
    (folder / "ca.pem").write_bytes(pem)
    public = made.owner.public_key()
    (folder / "owner.pub").write_bytes(
        public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    (folder / "claims.toml").write_text(
        f'version = 1\ntrained_only_on = ["{RAW.sha256}"]\nno_gaps = true\n'
    )
    (folder / "model.bin").write_bytes(MODEL)
    return [
        "audit", "check", str(folder / "run"), "--authority", str(folder / "ca.pem"),
        "--owner", str(folder / "owner.pub"), "--policy", made.signer.verifier.encode(),
        "--claims", str(folder / "claims.toml"), "--model", str(folder / "model.bin"),
    ]  # fmt: skip


def run(arguments: list[str]) -> tuple[int, str]:
    done = CliRunner().invoke(app, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def as_json(arguments: list[str]) -> tuple[int, Any]:
    status, text = run([*arguments, "--json"])
    return status, json.loads(text)


def test_an_honest_run(tmp_path: Path) -> None:
    made = MadeRun()
    made.write(tmp_path / "run")
    arguments = [*options(tmp_path, made), "--html", str(tmp_path / "page.html")]
    status, found = as_json(arguments)
    assert status == found["status"] == 0
    assert {one["claim"]: one["answer"] for one in found["claims"]} == {
        "trained_only_on": "yes", "no_gaps": "yes", "model": "yes",
    }  # fmt: skip
    assert found["findings"] == []
    assert (found["statements"], found["ranks"], found["intervals"]) == (15, 4, 3)
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    status, text = run(arguments)
    assert status == 0
    assert "Every claim is shown" in text


def test_without_claims_none_is_said_to_be_shown(tmp_path: Path) -> None:
    """The terminal once said that every claim is shown, and the page that nothing was claimed."""
    made = MadeRun()
    made.write(tmp_path / "run")
    arguments = [*options(tmp_path, made), "--html", str(tmp_path / "page.html")]
    at = arguments.index("--claims")
    at_model = arguments.index("--model")
    for place in sorted((at, at_model), reverse=True):
        del arguments[place : place + 2]
    status, text = run(arguments)
    assert status == 0
    verdict = "No claims were given, so none is shown, and no record contradicts another."
    assert verdict in text
    assert verdict in (tmp_path / "page.html").read_text()


def test_a_lie(tmp_path: Path) -> None:
    made = MadeRun()
    one_link(made)
    made.write(tmp_path / "run")
    status, found = as_json(options(tmp_path, made))
    assert status == found["status"] == 1
    (finding,) = found["findings"]
    assert finding["parties"] == ["rank 1", "rank 2"]
    assert finding["records"] == [made.digests[1, 1]]
    assert finding["contradicted_by"] == [made.digests[2, 1]]
    assert finding["found_by"] == "contradiction"
    status, text = run(options(tmp_path, made))
    assert status == 1
    assert made.digests[1, 1][:12] in text


def test_a_checkpoint_that_was_seen_elsewhere(tmp_path: Path) -> None:
    made = MadeRun()
    folder = made.write(tmp_path / "run")
    (tmp_path / "seen").write_bytes((folder.log / "checkpoint").read_bytes())
    cut(made, folder)
    status, found = as_json([*options(tmp_path, made), "--seen", str(tmp_path / "seen")])
    assert status == 1
    assert "log.truncated_log" in found["findings"][0]["text"]


def test_something_that_is_not_shown(tmp_path: Path) -> None:
    made = MadeRun()
    made.write(tmp_path / "run")
    arguments = options(tmp_path, made)
    privacy = 'version = 1\nprivacy = { epsilon = "8", delta = "0" }\n'
    (tmp_path / "claims.toml").write_text(privacy)
    status, found = as_json(arguments)
    assert status == found["status"] == 2
    assert found["claims"][0]["answer"] == "not shown"


def test_whom_to_believe_must_be_said(tmp_path: Path) -> None:
    made = MadeRun()
    made.write(tmp_path / "run")
    arguments = options(tmp_path, made)
    at = arguments.index("--policy")
    with pytest.raises(ConfigurationError, match="whom to believe"):
        run(arguments[:at] + arguments[at + 2 :])


@pytest.mark.parametrize(
    ("options_given", "said"),
    [
        (["--replay-tolerance", "1e-3"], "--replay-tolerance: for --replay"),
        (["--replay-seed", "ab"], "--replay-seed: for --replay"),
        (["--", "vault"], "arguments of a script: for --replay"),
        (["--replay", "1", "--replay-tolerance", "1e-3"], "--replay-vault DIR"),
        (["--replay", "1", "--replay-tolerance", "inf"], "finite number"),
        (["--replay", "1", "--replay-tolerance", "1", "--replay-vault", "v"], "--key FILE"),
        (["--replay", "1", "--replay-seed", "ab"], "64 hexadecimal digits"),
        (["--replay", "1", "--replay-seed", "x" * 64], "64 hexadecimal digits"),
    ],
)
def test_options_of_replay_that_cannot_be_used(
    options_given: list[str], said: str, tmp_path: Path
) -> None:
    made = MadeRun(world=1, count=1)
    made.write(tmp_path / "run")
    with pytest.raises(ConfigurationError, match=said):
        run([*options(tmp_path, made), *options_given])


@pytest.mark.parametrize("name", ["[/red]", "[bold", "[link=file:///]x[/link]", "a\x1b[2Jb"])
@pytest.mark.threat("A14")
def test_a_name_of_a_run_that_is_markup_is_printed_as_text(name: str, tmp_path: Path) -> None:
    made = MadeRun(world=2, count=2)
    head = made.write(tmp_path / "run").path / "run.json"
    head.write_text(json.dumps({**json.loads(head.read_text()), "run": name}))
    status, text = run(options(tmp_path, made))
    assert status == 1  # all statements are of another run
    assert f"Claims about {name.replace(chr(27), '?')}" in " ".join(text.split())


@pytest.mark.threat("A14")
def test_a_name_of_a_file_does_not_steer_the_terminal(tmp_path: Path) -> None:
    made = MadeRun(world=2, count=2)
    (made.write(tmp_path / "run").path / "a\x1b[2J\u202e[x").write_bytes(b"")
    command = [sys.executable, "-m", "sealring.cli", *options(tmp_path, made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("log.malformed_run: ")
    assert done.stderr.replace("\n", "").isprintable()


def test_an_error_that_names_a_strange_file_does_not_steer_the_terminal() -> None:
    assert harmless("one\x1b[2J\u202e\ntwo\r\udcff") == "one?[2J?\ntwo??"


def test_a_page_takes_the_place_of_no_device(tmp_path: Path) -> None:
    made = MadeRun(world=2, count=2)
    made.write(tmp_path / "run")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigurationError, match="is not a regular file, and is not replaced"):
        run([*options(tmp_path, made), "--html", str(pipe)])
    assert pipe.is_fifo()
