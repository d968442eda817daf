"""`sealring run`: torchrun's own launcher, with an identity for every worker."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from sealring.cli.terminal import errors
from sealring.errors import ConfigurationError, NoIdentity
from sealring.group.settings import read_settings
from sealring.identity.process import shut_out_debuggers
from sealring.identity.secret import read_secret
from sealring.last_words import LAUNCHED
from sealring.sealed_only.guard import require_sealed

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

# Whatever follows the script's name is the script's, options and all.
PASS_ON: Final[dict[str, Any]] = {
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "ignore_unknown_options": False,
}


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="The training script; its arguments follow it.")],
    nproc: Annotated[int, typer.Option("-n", "--nproc-per-node", min=1, help="Workers here.")] = 1,
    nnodes: Annotated[int, typer.Option(min=1, help="How many machines take part.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="Which of them this is.")] = 0,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(help="host:port of one machine, the same on all of them.")
    ] = None,
    secret_file: Annotated[
        Path | None, typer.Option(help="The job's secret (mode 0600), the same on all machines.")
    ] = None,
    broker: Annotated[
        str | None, typer.Option(help="https://HOST:PORT of the job's broker; several with commas.")
    ] = None,
    authority: Annotated[
        Path | None, typer.Option(help="With --broker: its authority's certificate.")
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(help="With --broker: what this machine's workers demand of peers."),
    ] = None,
    job: Annotated[str | None, typer.Option(help="The job's name, the same everywhere.")] = None,
    transport: Annotated[str | None, typer.Option(help="auto (the default), tcp or shm.")] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often all workers are started again when one fails.")
    ] = 0,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module's name.")] = False,
) -> None:
    """Run a training script with one worker per process, each with an identity of its own.

    Every process group of the script is sealed, whichever backend it names (docs/sealed-only.md).
    """
    shut_out_debuggers()  # the job's secret may be made here
    if job is not None:
        os.environ["SEALRING_JOB"] = job
    os.environ.update(_brokered(broker, authority, policy) or _identity(nnodes, secret_file))
    require_sealed()
    if transport is not None:
        os.environ["SEALRING_TRANSPORT"] = transport
    read_settings(os.environ)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    arguments = ["--nproc-per-node", str(nproc), "--nnodes", str(nnodes)]
    arguments += ["--max-restarts", str(max_restarts)]
    if rdzv_endpoint is not None:
        run_id = os.environ.get("SEALRING_JOB", "sealring")
    elif nnodes == 1:
        port = _free_port() if os.environ.get("SEALRING_BROKER") else 0
        rdzv_endpoint, run_id = f"localhost:{port}", secrets.token_hex(16)
    else:
        raise ConfigurationError(
            "several machines need a place to meet: pass --rdzv-endpoint HOST:PORT, with a "
            "host that all of them reach, the same on every machine"
        )
    arguments += [
        "--node-rank", str(node_rank),
        "--rdzv-backend", _rendezvous(),
        "--rdzv-endpoint", rdzv_endpoint,
        "--rdzv-id", run_id,
    ]  # fmt: skip
    if module:
        arguments.append("--module")
    os.environ[LAUNCHED] = "1"
    if nproc > 1:
        # What torch's launcher sets, and warns of.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # It reports failed workers as well; what there is to say of them is said below.
    for name in ("multiprocessing", "multiprocessing.errors"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        torchrun([*arguments, script, *context.args])
    except SignalException as stopped:
        # The launcher has ended every worker by now; as a shell has it, 128 and the signal.
        raise typer.Exit(128 + stopped.sigval) from None
    except ChildFailedError as failed:
        _print_first(failed)
        raise typer.Exit(1) from None


def _print_first(failed: ChildFailedError) -> None:
    """The error of the worker that failed first: once, and after all else."""
    rank, failure = failed.get_first_failure()
    others = len(failed.failures) - 1
    ended = f"; {others} more ended with it" if others else ""
    told = failure.message if isinstance(failure.message, dict) else None
    if told is None:
        errors.print(
            f"Rank {rank} ended with exit code {failure.exitcode}{ended}. What it said of it "
            "stands above.",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
        return
    errors.print(
        f"{told['extraInfo']['py_callstack']}{told['message']} (rank {rank}{ended})",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip


def _rendezvous() -> str:
    """How the launchers meet. Their store is sealed wherever there is a secret to seal it under.

    Unsealed, torch's own way (c10d) has launchers unpickle what anybody can put there, and code
    that runs in an attested machine is what a broker is there to keep out. With one they meet
    in the static way, in which nothing is unpickled: the machines are numbered beforehand.
    """
    if os.environ.get("SEALRING_BROKER"):
        return "static"
    return "c10d" if read_secret(os.environ) is None else "sealring"


def _free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _brokered(
    broker: str | None, authority: Path | None, policy: Path | None
) -> dict[str, str] | None:
    """The environment of workers that join through a broker; None if there is none."""
    if broker is None and not os.environ.get("SEALRING_BROKER"):
        return None
    chosen = {} if broker is None else {"SEALRING_BROKER": broker}
    for name, path in (("SEALRING_AUTHORITY", authority), ("SEALRING_POLICY", policy)):
        if path is not None:
            chosen[name] = str(path.resolve())
    from sealring.broker.enrolment import read_settings

    read_settings({**os.environ, **chosen})  # better refused here than once per worker
    return chosen


def _identity(nnodes: int, secret_file: Path | None) -> dict[str, str]:
    """What to add to the workers' environment so that they can prove who they are."""
    if secret_file is not None:
        chosen = {"SEALRING_SECRET_FILE": str(secret_file.resolve())}
        read_secret(chosen)  # a bad file is better refused here than once per worker
        return chosen
    if read_secret(os.environ) is not None or "SEALRING_CERTIFICATE" in os.environ:
        return {}
    if nnodes > 1:
        raise NoIdentity(
            "workers on several machines need a common identity. Make a secret once "
            "(umask 077; openssl rand -hex 32 > job.secret), copy it to every machine and pass "
            "--secret-file job.secret, or give each worker a certificate (sealring ca --help)."
        )
    # All workers are our own children: a secret that lives as long as they do is enough.
    return {"SEALRING_SECRET": secrets.token_hex(32)}
