"""Several ranks' records as one Chrome trace, and the command that makes it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sealring.cli import app
from sealring.errors import ConfigurationError
from sealring.observe import CollectiveAccount, GroupAccount, MessageAccount, ProcessAccount
from sealring.observe.trace import chrome_trace, clock_offsets_ns, read_flight_records

T0 = 1_800_000_000_000_000_000


def collective(number: int | None, began_us: int, **changes: Any) -> CollectiveAccount:
    """Return a collective that waits for 2 µs and runs for 5."""
    values: dict[str, Any] = {
        "number": number, "operation": "all_reduce", "algorithm": "ring", "bytes": 64,
        "dtype": "float32", "reduction": "sum", "root": None, "state": "done",
        "queued_ns": T0 + (began_us - 2) * 1000, "started_ns": T0 + began_us * 1000,
        "ended_ns": T0 + (began_us + 5) * 1000, "sealed_bytes": 48, "opened_bytes": 50,
        "error": None,
    }  # fmt: skip
    return CollectiveAccount(**{**values, **changes})


def process(rank: int, *collectives: CollectiveAccount, **changes: Any) -> ProcessAccount:
    group = GroupAccount(
        "00ff", "default", rank, [0, 1, 2], "open", 48, 50, 0, [0.0] * 3, list(collectives), []
    )
    values: dict[str, Any] = {
        "job": "tests", "rank": rank, "host": f"host-{rank}", "pid": 100 + rank,
        "written_ns": T0 + 100_000, "groups": [group],
    }  # fmt: skip
    return ProcessAccount(**{**values, **changes})


def message(posted_us: int, **changes: Any) -> MessageAccount:
    """Return a message that takes 5 µs."""
    values: dict[str, Any] = {
        "operation": "send", "peer": 1, "tag": 9, "bytes": 64, "dtype": "float32",
        "state": "done", "posted_ns": T0 + posted_us * 1000,
        "ended_ns": T0 + (posted_us + 5) * 1000, "error": None,
    }  # fmt: skip
    return MessageAccount(**{**values, **changes})


def with_messages(rank: int, *messages: MessageAccount) -> ProcessAccount:
    account = process(rank, collective(1, 10))
    account.groups[0].messages.extend(messages)
    return account


def test_messages_have_tracks_of_their_own() -> None:
    waits = message(6, operation="recv", peer=None, state="waiting", ended_ns=None)
    trace = chrome_trace([with_messages(0, message(3), waits)])
    events = [e for e in trace["traceEvents"] if e.get("name", "").startswith(("send", "recv"))]
    sent, sent_end, received, received_end = events
    assert (sent["name"], sent["ph"], sent["ts"]) == ("send to rank 1", "b", 0.0)
    assert (sent_end["ph"], sent_end["ts"], sent_end["id"]) == ("e", 5.0, sent["id"])
    assert sent["args"]["tag"] == 9
    assert (received["name"], received["id"] != sent["id"]) == ("recv from anyone", True)
    assert received_end["ts"] == 97.0, "what has not ended lasts until the record was written"


@pytest.mark.parametrize("extra", [[], ["--messages"]])
def test_show_of_ranks_that_did_nothing_yet_is_empty(extra: list[str], tmp_path: Path) -> None:
    save(tmp_path, process(0), process(1))
    done = CliRunner().invoke(app, ["top", "trace", str(tmp_path), *extra, "--json"])
    assert (done.exit_code, done.stdout) == (0, "[]\n"), done.output
    done = CliRunner().invoke(app, ["top", "trace", str(tmp_path), *extra, "--group", "other"])
    assert isinstance(done.exception, ConfigurationError)
    assert str(done.exception) == "no rank has a group named 'other': there is 'default'"


def test_a_narrow_terminal_and_a_poor_encoding_hide_no_state(tmp_path: Path) -> None:
    save(tmp_path, process(0, collective(1, 10)))
    done = subprocess.run(
        [Path(sys.executable).parent / "sealring", "top", "trace", tmp_path],
        env={**os.environ, "COLUMNS": "40", "PYTHONIOENCODING": "ascii"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].split()[-2:] == ["state", "took"]
    assert re.search(r" ring +done +5 \?s", done.stdout), done.stdout


def test_a_number_is_not_a_messages(tmp_path: Path) -> None:
    save(tmp_path, with_messages(0, message(3)))
    done = CliRunner().invoke(app, ["top", "trace", str(tmp_path), "--messages", "--number", "1"])
    assert isinstance(done.exception, ConfigurationError)
    assert str(done.exception) == "--number is a collective's: leave it out with --messages"


def test_show_lists_messages_when_asked(tmp_path: Path) -> None:
    lost = message(6, peer=2, state="failed", error="group.peer_lost: \x1b[31mgone")
    save(tmp_path, with_messages(0, message(3), lost), with_messages(1))
    done = CliRunner().invoke(app, ["top", "trace", str(tmp_path), "--messages"])
    assert done.exit_code == 0, done.output
    assert "send to 1" in done.stdout
    assert "\x1b[31m" not in done.stdout
    listed = CliRunner().invoke(app, ["top", "trace", str(tmp_path), "--messages", "--json"])
    rows = json.loads(listed.stdout)
    assert [(row["rank"], row["message"]["peer"]) for row in rows] == [(0, 1), (0, 2)]
    assert rows[1]["message"]["error"] == "group.peer_lost: \x1b[31mgone"


def save(directory: Path, *accounts: ProcessAccount) -> None:
    for account in accounts:
        name = f"{account.job}-rank-{account.rank}-{account.pid}.flight.json"
        (directory / name).write_text(account.to_json())


def slices(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_a_slice_for_each_collective_with_what_was_sealed() -> None:
    trace = chrome_trace([process(0, collective(1, 10), collective(2, 20))])
    first, second = slices(trace)
    assert (first["name"], first["ts"], first["dur"]) == ("all_reduce", 2.0, 5.0)
    assert second["ts"] == 12.0
    assert first["args"]["sealed_bytes"] == 48
    assert first["args"]["number"] == 1
    assert "error" not in first["args"]
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 0 (host-0, process 100)"]
    waits = [(e["ph"], e["ts"]) for e in trace["traceEvents"] if e["ph"] in "be"]
    assert waits == [("b", 0.0), ("e", 2.0), ("b", 10.0), ("e", 12.0)]


def test_what_is_not_over_lasts_until_the_record_was_written() -> None:
    running = collective(2, 20, state="running", ended_ns=None)
    queued = collective(None, 30, state="queued", started_ns=None, ended_ns=None)
    trace = chrome_trace([process(0, collective(1, 10), running, queued)])
    assert [each["dur"] for each in slices(trace)] == [5.0, 80.0]
    assert [e["ts"] for e in trace["traceEvents"] if e["ph"] == "e"] == [2.0, 12.0, 92.0]


def test_arrows_join_what_the_ranks_did_together() -> None:
    trace = chrome_trace([process(r, collective(1, 10 + r), collective(7 + r, 30)) for r in (0, 1)])
    arrows = [e for e in trace["traceEvents"] if e["ph"] in "sf"]
    assert [(e["ph"], e["pid"], e["ts"]) for e in arrows] == [("s", 0, 2.0), ("f", 1, 3.0)]
    assert len({e["id"] for e in arrows}) == 1


def test_clocks_are_aligned_by_the_ends_of_what_all_left_together() -> None:
    hour = 3_600_000_000
    here = process(0, *(collective(n, 10 * n) for n in range(1, 6)))
    there = process(1, *(collective(n, 10 * n + hour + n % 2) for n in range(1, 6)))
    alone = process(2, collective(99, 10))
    offsets = clock_offsets_ns([here, there, alone])
    assert offsets == {0: 0, 1: (hour + 1) * 1000}
    aligned = slices(chrome_trace([here, there], offsets))
    assert max(event["ts"] for event in aligned) < 100


def test_merge_writes_one_trace_of_a_directory(tmp_path: Path) -> None:
    save(tmp_path, *(process(rank, collective(1, 10), collective(2, 20)) for rank in (2, 0, 1)))
    output = tmp_path / "all.json"
    done = CliRunner().invoke(app, ["top", "trace", str(tmp_path), "-o", str(output), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {
        "output": str(output), "ranks": [0, 1, 2], "clock_ahead_s": [0, 0, 0],
    }  # fmt: skip
    trace = json.loads(output.read_text())
    assert Counter(event["pid"] for event in slices(trace)) == {0: 2, 1: 2, 2: 2}
    assert os.stat(output).st_mode & 0o777 == 0o600
    assert list(tmp_path.glob(".*")) == []


def test_show_puts_a_number_side_by_side(tmp_path: Path) -> None:
    other = collective(2, 20, operation="broadcast", root=1, state="failed",
                       error="group.out_of_step: \x1b[2Jranks disagree")  # fmt: skip
    save(tmp_path, process(0, collective(1, 10), collective(2, 20)), process(1, other))
    shown = CliRunner().invoke(
        app, ["top", "trace", str(tmp_path), "--number", "2"], env={"COLUMNS": "200"}
    )
    assert shown.exit_code == 0, shown.output
    rows = [line for line in shown.stdout.splitlines() if "default" in line]
    assert "all_reduce sum" in rows[0]
    assert "64 B float32" in rows[0]
    assert "broadcast from 1" in rows[1].replace(" sum", "")
    assert "\x1b[2J" not in shown.stdout
    as_json = CliRunner().invoke(
        app, ["top", "trace", str(tmp_path), "--number", "1", "--json"]
    )  # fmt: skip
    found = json.loads(as_json.stdout)
    assert [each["collective"] and each["collective"]["number"] for each in found] == [1, None]


def test_show_fits_80_columns_and_cuts_no_name(tmp_path: Path) -> None:
    long = collective(104_217, 20, operation="reduce_scatter", bytes=25 * 2**20, dtype="bfloat16")
    save(tmp_path, process(1023, long))
    shown = CliRunner().invoke(app, ["top", "trace", str(tmp_path)], env={"COLUMNS": "80"})
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for word in ("1023", "default", "104217", "reduce_scatter", "25 MiB", "bfloat16", "µs"):
        assert any(word in line for line in lines), word


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no"):
        read_flight_records([tmp_path])
    with pytest.raises(ConfigurationError, match="there is no file"):
        read_flight_records([tmp_path / "none.flight.json"])
    save(tmp_path, process(0, collective(1, 10)))
    (tmp_path / "copy.flight.json").write_text(process(0, collective(1, 10)).to_json())
    with pytest.raises(ConfigurationError, match="of one process"):
        read_flight_records([tmp_path])
    (tmp_path / "copy.flight.json").write_text(process(1, job="another").to_json())
    with pytest.raises(ConfigurationError, match="different jobs"):
        read_flight_records([tmp_path])


def test_clocks_that_cannot_be_aligned_are_an_error(tmp_path: Path) -> None:
    save(tmp_path, process(0, collective(1, 10)), process(1, collective(2, 20)))
    done = CliRunner().invoke(
        app, ["top", "trace", str(tmp_path), "-o", str(tmp_path / "t"), "--align"]
    )
    assert isinstance(done.exception, ConfigurationError)
    assert "clock of rank 1 cannot be aligned" in str(done.exception)
