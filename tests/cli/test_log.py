"""A log under `sealring audit`, with the commands of its owner and its readers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sealring.cli import app
from sealring.errors import (
    ConfigurationError,
    ForkedLog,
    MalformedStatement,
    SealringError,
    TamperedLog,
)
from sealring.formats.log.folder import create_log
from sealring.formats.log.notes import SignatureKind, Signer
from sealring.record.statements.signing import read_signer
from tests.codes import coded


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["audit", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def as_json(*arguments: object) -> Any:
    return json.loads(run(*arguments, "--json"))


@pytest.fixture
def log(tmp_path: Path) -> tuple[Path, str]:
    folder = tmp_path / "log"
    vkey = run("init", folder, "--log", "example.com/run").splitlines()[-1]
    (tmp_path / "lines").write_text("".join(f"line {n}\n" for n in range(300)))
    (tmp_path / "entry").write_bytes(b"\0entry\n")
    return folder, vkey


def test_from_an_empty_log_to_a_proof(log: tuple[Path, str], tmp_path: Path) -> None:
    folder, vkey = log
    assert (tmp_path / "log.key").stat().st_mode & 0o777 == 0o600
    assert as_json("append", folder, "--lines", tmp_path / "lines")["size"] == 300
    appended = as_json("append", folder, tmp_path / "entry", tmp_path / "entry")
    assert (appended["first"], appended["count"], appended["size"]) == (300, 2, 302)
    assert as_json("log", folder, "--policy", vkey)["root"] == appended["root"]
    proof, entry = tmp_path / "entry.tlog-proof", tmp_path / "299"
    run("proof", folder, 299, "--policy", vkey, "--entry", entry)
    assert entry.read_text() == "line 299"
    run("proof", folder, 301, "--policy", vkey, "-o", proof)
    assert run("proof", folder, 301, "--policy", vkey) == proof.read_text()
    shutil.rmtree(folder)  # the rest works offline
    found = as_json("verify", tmp_path / "entry", "--proof", proof, "--policy", vkey)
    assert (found["index"], found["size"]) == (301, 302)
    with pytest.raises(TamperedLog, check=coded("log.not_included")):
        run("verify", tmp_path / "lines", "--proof", proof, "--policy", vkey)


def test_the_verifier_key_lies_beside_the_key_and_is_not_overwritten(
    log: tuple[Path, str], tmp_path: Path
) -> None:
    folder, vkey = log
    public = tmp_path / "log.vkey"
    assert public.read_text() == f"{vkey}\n"
    assert public.stat().st_mode & 0o777 == 0o644
    as_json("log", folder, "--policy", public.read_text().strip())
    (tmp_path / "log.key").rename(tmp_path / "kept.key")
    for there in ("written", "a broken link"):
        if there == "a broken link":
            public.unlink()
            public.symlink_to(tmp_path / "nowhere")
        with pytest.raises(ConfigurationError, match=r"log\.vkey is there already and will not be"):
            run("init", folder, "--log", "example.com/run")
        assert not (tmp_path / "log.key").exists()
    (tmp_path / "taken").touch(0o600)
    with pytest.raises(ConfigurationError, match="taken is there already and will not be"):
        run("init", tmp_path / "other", "--log", "a.b/c", "--key", tmp_path / "taken")
    assert not (tmp_path / "taken.vkey").exists()


def test_a_witness_has_its_verifier_key_beside_its_key(tmp_path: Path) -> None:
    key = tmp_path / "w1.key"
    command = ["audit", "init", str(key), "--witness", "example.org/w1"]
    made = CliRunner().invoke(app, command)
    assert made.exit_code == 0, made.output
    assert (tmp_path / "w1.vkey").read_text().strip() == made.stdout.splitlines()[-1]
    assert read_signer(key).verifier.encode() == made.stdout.splitlines()[-1]
    key.unlink()
    assert isinstance(CliRunner().invoke(app, command).exception, ConfigurationError)
    assert not key.exists()


@pytest.mark.threat("L1")
def test_a_log_against_checkpoints_seen_earlier(log: tuple[Path, str], tmp_path: Path) -> None:
    folder, vkey = log
    run("append", folder, "--lines", tmp_path / "lines")
    shutil.copytree(folder, tmp_path / "short")
    run("append", folder, tmp_path / "entry")
    run("log", folder, "--policy", vkey, "--checkpoint", tmp_path / "seen")
    assert as_json("log", folder, "--policy", vkey, "--seen", tmp_path / "seen")["size"] == 301
    with pytest.raises(ForkedLog, match="ends at 300 entries", check=coded("log.truncated_log")):
        run("log", tmp_path / "short", "--policy", vkey, "--seen", tmp_path / "seen")
    # The owner signs another history with the same key.
    (tmp_path / "log.key.signed").unlink()
    create_log(tmp_path / "other", read_signer(tmp_path / "log.key"))
    (tmp_path / "lines").write_text("".join(f"forged {n}\n" for n in range(400)))
    forged = ("--lines", tmp_path / "lines", "--key", tmp_path / "log.key")
    run("append", tmp_path / "other", *forged)
    with pytest.raises(ForkedLog, match="among the first 301"):
        run("log", tmp_path / "other", "--policy", vkey, "--seen", tmp_path / "seen")


def test_whom_to_believe_must_be_said(log: tuple[Path, str], tmp_path: Path) -> None:
    folder, vkey = log
    with pytest.raises(ConfigurationError, match="whom to believe"):
        run("log", folder)
    with pytest.raises(ConfigurationError, match="there is no file no-policy, and it is no verif"):
        run("log", folder, "--policy", "no-policy")
    with pytest.raises(MalformedStatement, check=coded("log.malformed_note")):
        run("log", folder, "--policy", f"{vkey[:-9]}A")
    with pytest.raises(ConfigurationError, match="name the files"):
        run("append", folder)
    with pytest.raises(ConfigurationError, match="no file"):
        run("append", folder, tmp_path / "missing")


def test_an_age_is_refused_where_no_witness_tells_it(log: tuple[Path, str], tmp_path: Path) -> None:
    folder, vkey = log
    run("append", folder, tmp_path / "entry")
    run("proof", folder, 0, "--policy", vkey, "-o", tmp_path / "proof")
    (tmp_path / "alone.policy").write_text(f"log {vkey}\nquorum none\n")
    for trust in (["--policy", vkey], ["--policy", tmp_path / "alone.policy"]):
        for question in (
            ["log", folder],
            ["verify", tmp_path / "entry", "--proof", tmp_path / "proof"],
        ):
            run(*question, *trust)
            with pytest.raises(ConfigurationError, match="no quorum of them is asked for"):
                run(*question, *trust, "--max-age", 86400)


@pytest.mark.parametrize("age", ["nan", "inf", "-1"])
def test_an_age_that_is_none(log: tuple[Path, str], tmp_path: Path, age: str) -> None:
    folder, vkey = log
    witness = Signer.generate("example.org/w1", SignatureKind.COSIGNATURE).verifier.encode()
    run("policy", tmp_path / "policy", "--log", vkey, "--witness", witness)
    with pytest.raises(ConfigurationError, match="it is a number of seconds, from 0"):
        run("log", folder, "--policy", tmp_path / "policy", f"--max-age={age}")


def test_the_file_of_the_key_is_the_key(log: tuple[Path, str], tmp_path: Path) -> None:
    folder, vkey = log
    run("append", folder, tmp_path / "entry")
    assert run("log", folder, "--policy", tmp_path / "log.vkey") == run(
        "log", folder, "--policy", vkey
    )
    (tmp_path / "log.vkey").write_text("")
    with pytest.raises(SealringError):
        run("log", folder, "--policy", tmp_path / "log.vkey")


def test_a_key_that_others_can_read_is_refused(log: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = log
    (tmp_path / "log.key").chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        run("append", folder, tmp_path / "entry")


def test_a_second_log_does_not_replace_the_first(log: tuple[Path, str]) -> None:
    folder, _ = log
    with pytest.raises(SealringError, match="there already"):
        run("init", folder, "--log", "example.com/run")


@pytest.mark.threat("A14")
def test_an_origin_does_not_steer_the_terminal(tmp_path: Path) -> None:
    shown = run("init", tmp_path / "odd", "--log", "example.com/\u202e\x9b31m\x7f")
    shown += run("log", tmp_path / "odd", "--policy", (tmp_path / "odd.vkey").read_text().strip())
    assert "example.com/??31m?" in shown
    assert all(character.isprintable() or character == "\n" for character in shown)
