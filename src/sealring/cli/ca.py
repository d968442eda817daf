"""`sealring ca`: an operator's own authority, and certificates from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from sealring.cli.options import AsJson
from sealring.cli.terminal import console, print_json, say, table
from sealring.core.identity import authority
from sealring.core.identity.certificates import check_rank, claims_of
from sealring.core.identity.loading import certificates_from_pem
from sealring.core.identity.names import WorkerName
from sealring.errors import BadCredential, ConfigurationError
from sealring.formats.files import read_public
from sealring.limits import CERTIFICATE_HOURS

app = typer.Typer(
    name="ca",
    help="Make an authority and issue certificates to workers.",
    no_args_is_help=True,
)

Job = Annotated[str, typer.Option("--job", help="The job that the certificate is for.")]
Ranks = Annotated[
    str, typer.Option("--rank", help="The worker's rank in the job, or several: 0-7, or 0,2,4-6.")
]
Out = Annotated[Path, typer.Option("--out", help="The directory to write to.")]


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(help="Where to keep it.")] = Path("sealring-ca"),
    name: Annotated[str, typer.Option(help="The authority's name.")] = "sealring authority",
) -> None:
    """Make a new authority; its key stays in DIRECTORY."""
    path = authority.create_authority(directory, name)
    say(f"The authority is in {directory}; guard {directory / 'authority.key'}.")
    say(f"Give every worker {path} as SEALRING_AUTHORITY.")


@app.command()
def request(
    job: Job,
    rank: Ranks,
    world_size: Annotated[
        int | None, typer.Option(help="How many workers the job has, for the command to issue.")
    ] = None,
    out: Out = Path(),
) -> None:
    """On the worker's machine: make its key, and a request to take to the authority."""
    check_rank(max(ranks_of(rank)), world_size)
    made = [authority.request(WorkerName(job, each), out) for each in ranks_of(rank)]
    files = ", ".join(str(csr) for csr, _ in made)
    several = len(made) > 1
    pattern = f"{job}-rank-{{rank}}.csr" if several else made[0][0].name
    say(
        f"Take {files} to the authority: sealring ca issue --job {job} --rank {rank} "
        f"--world-size {world_size or 'N'} --request '{pattern}'"
        + ("" if world_size else ", with N the number of all workers of the job.")
    )
    keys = ", ".join(str(key) for _, key in made)
    setting = str(out / f"{job}-rank-{{rank}}.key") if several else keys
    say(f"The key stays here: SEALRING_KEY='{setting}'")


@app.command()
def issue(
    job: Job,
    rank: Ranks,
    ca: Annotated[Path, typer.Option("--ca", help="The authority.")] = Path("sealring-ca"),
    world_size: Annotated[
        int | None, typer.Option(help="Bind the certificate to a world of this size.")
    ] = None,
    request_file: Annotated[
        str | None,
        typer.Option(
            "--request",
            help="The worker's request; {rank} in its name is the rank. Else a key is made.",
        ),
    ] = None,
    hours: Annotated[float, typer.Option(help="How long it is valid.")] = CERTIFICATE_HOURS,
    out: Out = Path(),
) -> None:
    """Issue a worker's certificate."""
    ranks = ranks_of(rank)
    if len(ranks) > 1 and request_file is not None and "{rank}" not in request_file:
        raise ConfigurationError(
            f"--request is {request_file!r} for {len(ranks)} ranks: each has a request of its own. "
            "Write {rank} where its number stands in the name"
        )
    # Before the first key is written, because an existing key is never replaced.
    check_rank(max(ranks), world_size)
    for each in ranks:
        file = None if request_file is None else Path(request_file.replace("{rank}", str(each)))
        issued = authority.issue_from_directory(
            ca, WorkerName(job, each), out, world=world_size, hours=hours, request_file=file
        )
        until = issued.not_after.isoformat()
        say(f"SEALRING_CERTIFICATE={issued.certificate}, valid until {until}")
        if issued.key is not None:
            say(
                f"SEALRING_KEY={issued.key}: the key was made on this machine, move it to the "
                "worker over a channel you trust (`sealring ca request` there avoids that)."
            )


def ranks_of(text: str) -> list[int]:
    """Parses a list of ranks: "0-3,7" is 0, 1, 2, 3, 7."""
    ranks: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        if found is None or int(found[1]) > int(found[2] or found[1]):
            raise ConfigurationError(f"--rank is {text!r}: write a number, 0-7, or 0,2,4-6")
        ranks += range(int(found[1]), int(found[2] or found[1]) + 1)
    if len(set(ranks)) < len(ranks):
        raise ConfigurationError(f"--rank is {text!r}, which has a rank twice")
    return ranks


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A PEM file with certificates.")],
    as_json: AsJson = False,
) -> None:
    """Show what a certificate says."""
    content = read_public(file, "the certificate", BadCredential)
    found = certificates_from_pem(content, BadCredential(f"{file} holds no PEM certificate"))
    rows = [_described(one) for one in found]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        cells = [(label, "-" if value is None else str(value)) for label, value in row.items()]
        # Folded, not cut, because users compare fingerprints.
        console.print(table(("field", "value"), cells, wrap=("value",)))


def _described(certificate: x509.Certificate) -> dict[str, str | int | None]:
    row: dict[str, str | int | None] = {
        "kind": "worker",
        "job": None,
        "rank": None,
        "world_size": None,
        "attestation": None,
        "subject": certificate.subject.rfc4514_string() or None,
        "issuer": certificate.issuer.rfc4514_string(),
        "not_before": certificate.not_valid_before_utc.isoformat(),
        "not_after": certificate.not_valid_after_utc.isoformat(),
        "sha256": certificate.fingerprint(SHA256()).hex(),
    }
    try:
        claims = claims_of(certificate)
    except ValueError as problem:
        row["kind"] = "authority" if _is_authority(certificate) else f"not a worker's: {problem}"
        return row
    return row | {
        "job": claims.name.job,
        "rank": claims.name.rank,
        "world_size": claims.world,
        "attestation": _attestation(certificate),
    }


def _attestation(certificate: x509.Certificate) -> str | None:
    """The attestation in a broker's certificate. Simulated evidence is labelled SIMULATED."""
    from sealring.attest.evidence.worker import claims_in

    try:
        claimed = claims_in(certificate)
    except ValueError as problem:
        return str(problem)
    return None if claimed is None else f"{claimed.label}, measurement {claimed.measurement}"


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (ValueError, x509.ExtensionNotFound):
        return False
