"""`sealring bench handshake`, `scale` and `attest`: how long groups take to form."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from sealring.bench.handshake import measure_handshake
from sealring.cli.bench import tables
from sealring.cli.bench.options import AsJson, Transport, check_ranks, check_transport, several
from sealring.cli.terminal import console, errors, print_json
from sealring.errors import ConfigurationError


def handshake(
    ranks: Annotated[int, typer.Option(help="Workers on this machine.")] = 16,
    transport: Transport = "shm",
    json: AsJson = False,
) -> None:
    """How long a group takes to form, and to do its first all-reduce."""
    check_transport(transport)
    with errors.status(f"{check_ranks(ranks)} workers start and meet"):
        result = measure_handshake(ranks, transport)
    if json:
        print_json(result.as_json())
        return
    table = Table(title="Forming a group")
    for column in ("ranks", "TLS handshakes", "transport", "formed", "first all-reduce"):
        table.add_column(column, justify="right")
    table.add_row(
        str(result.ranks),
        str(result.handshakes),
        result.transport,
        f"{result.seconds:.2f} s",
        f"{result.first_all_reduce_seconds:.2f} s",
    )
    console.print(table)


def scale(
    ranks: Annotated[
        str, typer.Option(help="Numbers of ranks, from few to many.")
    ] = "2,4,8,16,32,64,128,256",
    json: AsJson = False,
) -> None:
    """What forming groups costs as ranks grow: light workers, many in a process, without torch."""
    from sealring.bench.scale import growth, measure_scale

    numbers = sorted(several(ranks, int)) if re.fullmatch(r"\d{1,6}(,\d{1,6})*", ranks) else []
    if not numbers or numbers[0] < 2:
        raise ConfigurationError(
            f"--ranks is {ranks!r}: write numbers from 2 on with commas between them, as 2,16,64"
        )
    with errors.status("light workers start") as status:
        cases = measure_scale(numbers, status.update)
    if json:
        print_json({"cases": [asdict(case) for case in cases], "growth": growth(cases)})
        return
    console.print(tables.scale(cases, growth(cases)))


def attest(
    workers: Annotated[int, typer.Option(min=1, help="How many join at once.")] = 256,
    json: AsJson = False,
) -> None:
    """Time judging evidence of each kind, and workers joining through one broker at once."""
    from sealring.bench.attest import verify_ms
    from sealring.bench.joins import measure_joins

    with errors.status(f"judging evidence, then {workers} SIMULATED workers join one broker"):
        taken = verify_ms()
        joined = measure_joins(workers)
    if json:
        print_json({"verify_ms": taken, "join": joined.as_json()})
        return
    table = Table(title="Attestation on this machine")
    table.add_column("what")
    table.add_column("took", justify="right")
    for kind, milliseconds in taken.items():
        table.add_row(f"verify {kind}", f"{milliseconds:g} ms")
    table.add_row(f"{workers} SIMULATED workers join", f"{joined.seconds:g} s")
    console.print(table)
