"""`sealring run`: torchrun's own launcher, with an identity for every worker."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from sealring.cli import terminal
from sealring.cli.cause import print_cause
from sealring.cli.placement import PORT, Placement, placement
from sealring.cli.terminal import errors
from sealring.cli.variables import unknown_variables
from sealring.errors import ConfigurationError, NoIdentity
from sealring.group.settings import Transport, read_settings
from sealring.identity.process import shut_out_debuggers
from sealring.identity.secret import OF_THE_RUN, read_secret
from sealring.last_words import LAUNCHED
from sealring.live.worker import sweep
from sealring.sealed_only.guard import require_sealed

# Whatever follows the script's name is the script's, options and all.
PASS_ON: Final[dict[str, Any]] = {
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "ignore_unknown_options": False,
    # torchrun takes its options in both spellings: --node-rank and --node_rank.
    "token_normalize_func": lambda name: name.replace("_", "-"),
}


Text = str | None
COUNTED: Final = ("auto", "gpu", "cpu")


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="The training script; its arguments follow it.")],
    nproc: Annotated[
        Text,
        typer.Option(
            "-n",
            "--nproc-per-node",
            help="Workers here: a number, auto, gpu or cpu. Default: as the scheduler says, or 1.",
        ),
    ] = None,
    nnodes: Annotated[
        int | None, typer.Option(min=1, help="How many machines take part. Default: as above.")
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option("--node-rank", min=0, help="Which of them this is, from 0."),
    ] = None,
    rdzv_endpoint: Annotated[
        Text,
        typer.Option("--rdzv-endpoint", help="host:port of machine 0, the same on all."),
    ] = None,
    master_addr: Annotated[Text, typer.Option("--master-addr", help="The endpoint's host.")] = None,
    master_port: Annotated[
        int | None, typer.Option("--master-port", help="The endpoint's port.")
    ] = None,
    standalone: Annotated[
        bool, typer.Option("--standalone", help="This machine alone, whatever a scheduler says.")
    ] = False,
    join_timeout: Annotated[
        int, typer.Option(min=1, help="Seconds to wait for the other machines.")
    ] = 600,
    secret_file: Annotated[
        Path | None, typer.Option(help="The job's secret (mode 0600), the same on all machines.")
    ] = None,
    broker: Annotated[
        Text, typer.Option(help="https://HOST:PORT of the job's broker; several with commas.")
    ] = None,
    authority: Annotated[
        Path | None, typer.Option(help="With --broker: its authority's certificate.")
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(help="With --broker: what this machine's workers demand of peers."),
    ] = None,
    job: Annotated[Text, typer.Option(help="The job's name, the same everywhere.")] = None,
    transport: Annotated[
        Transport | None, typer.Option(help="How workers are linked; auto if not given.")
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts",
            envvar="PET_MAX_RESTARTS",
            min=0,
            help="How often all workers are started again when one fails.",
        ),
    ] = 0,
    log_dir: Annotated[
        Text, typer.Option("--log-dir", envvar="PET_LOG_DIR", help="torchrun's: where logs go.")
    ] = None,
    redirects: Annotated[
        Text,
        typer.Option(
            "-r",
            "--redirects",
            envvar="PET_REDIRECTS",
            help="torchrun's: streams that go to logs only.",
        ),
    ] = None,
    tee: Annotated[
        Text,
        typer.Option(
            "-t",
            "--tee",
            envvar="PET_TEE",
            help="torchrun's: streams that go to logs as well.",
        ),
    ] = None,
    local_ranks_filter: Annotated[
        Text,
        typer.Option(
            "--local-ranks-filter",
            envvar="PET_LOCAL_RANKS_FILTER",
            help="torchrun's: workers whose output is shown.",
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module's name.")
    ] = False,
    no_python: Annotated[bool, typer.Option("--no-python", help="SCRIPT is a program.")] = False,
    record: Annotated[
        Path | None,
        typer.Option(help="Each worker signs what it does, into this folder (docs/provenance.md)."),
    ] = None,
) -> None:
    """Run a training script with one worker per process, each with an identity of its own.

    Every process group of the script is sealed, whichever backend it names (docs/sealed-only.md).
    """
    shut_out_debuggers()  # the job's secret may be made here
    for sentence in unknown_variables(os.environ):
        errors.print(f"sealring: {sentence}", markup=False, highlight=False, soft_wrap=True)
    given = Placement() if standalone else placement(os.environ)
    for name in [each for each in os.environ if each.startswith("PET_")]:
        del os.environ[name]  # torchrun would take them for options that we pass as well
    machines = nnodes if nnodes is not None else given.machines
    machine = node_rank if node_rank is not None else given.machine
    workers = _check_workers(nproc if nproc is not None else given.workers)
    endpoint = rdzv_endpoint or given.endpoint
    if master_addr is not None or master_port is not None:
        endpoint = f"{master_addr or 'localhost'}:{master_port or PORT}"
    if not 0 <= machine < machines:
        raise ConfigurationError(
            f"--node-rank is {machine}, and --nnodes is {machines}: machines are numbered from 0 "
            f"to {machines - 1}"
        )
    if job is not None:
        os.environ["SEALRING_JOB"] = job
    # Empty where the environment says it all.
    brokered = _brokered(broker, authority, policy, secret_file)
    os.environ.update(_identity(machines, secret_file) if brokered is None else brokered)
    require_sealed()
    if transport is not None:
        os.environ["SEALRING_TRANSPORT"] = transport
    if record is not None:
        os.environ["SEALRING_RECORD"] = str(record.absolute())
    read_settings(os.environ)
    if machines == 1:
        # All workers are here: any free port will do, and no other run has this name.
        endpoint, run_id = "localhost:0", secrets.token_hex(16)
    elif endpoint is not None:
        run_id = os.environ.get("SEALRING_JOB", "sealring")
    else:
        raise ConfigurationError(
            "several machines need a place to meet: pass --rdzv-endpoint HOST:PORT, with a host "
            "that all of them reach, the same on every machine"
        )
    _check_script(script, module=module, no_python=no_python)
    arguments = [
        "--nproc-per-node", workers,
        "--nnodes", str(machines),
        "--max-restarts", str(max_restarts),
        "--rdzv-backend", "sealring",
        "--rdzv-endpoint", endpoint,
        "--rdzv-id", run_id,
        "--rdzv-conf", f"rank={machine},timeout={join_timeout}",
    ]  # fmt: skip
    passed_on = {
        "--log-dir": log_dir, "--redirects": redirects, "--tee": tee,
        "--local-ranks-filter": local_ranks_filter,
    }  # fmt: skip
    for option, value in passed_on.items():
        if value is not None:
            _check_passed_on(option, value)
            arguments += [option, value]
    arguments += ["--module"] * module + ["--no-python"] * no_python
    arguments += [script, *context.args]
    with ExitStack() as launched:
        if log_dir is None and redirects is None and tee is None:
            # torchrun makes a folder for its workers' error files, and leaves it behind.
            folder = launched.enter_context(_errors_folder())
            arguments = ["--log-dir", folder, *arguments]
        _launch(arguments, several=workers != "1")


def _errors_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="sealring-run-", ignore_cleanup_errors=True)
    except OSError as problem:
        raise ConfigurationError(
            f"no folder for temporary files can be made ({problem.strerror}): free some space, or "
            "set TMPDIR to a folder that this user may write to"
        ) from None


def _launch(arguments: list[str], several: bool) -> None:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.run import main as torchrun

    failures: Any = ProcessFailure
    read_error_file = failures.__post_init__

    def tolerate_error_file(failure: ProcessFailure) -> None:
        try:
            read_error_file(failure)
        except Exception:  # a worker can write anything there, which would end the launcher
            failure.error_file = ""
            read_error_file(failure)

    failures.__post_init__ = tolerate_error_file
    if not terminal.debug:
        os.environ[LAUNCHED] = "1"
    if several:
        # What torch's launcher sets, and warns of.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # It reports failed workers as well; what there is to say of them is said below.
    for name in ("multiprocessing", "multiprocessing.errors"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        torchrun(arguments)
    except SignalException as stopped:
        # The launcher has ended every worker by now; as a shell has it, 128 and the signal.
        raise typer.Exit(128 + stopped.sigval) from None
    except ChildFailedError as failed:
        print_cause(failed)
        raise typer.Exit(1) from None
    finally:
        sweep(os.environ)


def _check_script(script: str, *, module: bool, no_python: bool) -> None:
    """Here, once: each worker would say it, and the launcher of each."""
    if module:
        return
    if no_python:
        if shutil.which(script) is None:
            raise ConfigurationError(f"there is no program {script}")
    elif not Path(script).exists():
        raise ConfigurationError(
            f"there is no script {script} in {Path.cwd()}. A module is started with --module, "
            "another program with --no-python"
        )


_STREAMS: Final = (
    r"[0-3]|\d+:[0-3](,\d+:[0-3])*",
    "1 for standard output, 2 for errors, 3 for both, or so for some workers: 0:3,1:2",
)
_PASSED_ON: Final = {
    "--redirects": _STREAMS,
    "--tee": _STREAMS,
    "--local-ranks-filter": (r"\d+(,\d+)*", "the local ranks of workers: 0,1"),
}
"""What torchrun takes for its options, and the same in words."""


def _check_passed_on(option: str, value: str) -> None:
    if option not in _PASSED_ON:
        return
    form, words = _PASSED_ON[option]
    if re.fullmatch(form, value) is None:
        raise ConfigurationError(f"{option} is {value!r}; pass {words}")


def _check_workers(text: str) -> str:
    """What torchrun takes: a number, or what it counts by itself."""
    if text == "gpu":
        import torch

        if not torch.cuda.is_available():
            raise ConfigurationError(
                "--nproc-per-node is 'gpu', and torch finds no GPU here: pass a number, or see "
                "what `sealring doctor` says of GPUs"
            )
    if text in COUNTED or (text.isdecimal() and int(text) > 0):
        return text
    raise ConfigurationError(
        f"--nproc-per-node is {text!r}; pass a number from 1, or {', '.join(COUNTED)}"
    )


def _brokered(
    broker: str | None, authority: Path | None, policy: Path | None, secret_file: Path | None
) -> dict[str, str] | None:
    """The environment of workers that join through a broker; None if there is none."""
    if broker is None and not os.environ.get("SEALRING_BROKER"):
        for option, path in (("--authority", authority), ("--policy", policy)):
            if path is not None:
                # Without effect, a user would believe that peers are held to it.
                raise ConfigurationError(
                    f"{option} is for workers that join through a broker, and there is none: pass "
                    "--broker too, or leave it out (certificates have SEALRING_AUTHORITY)"
                )
        return None
    if secret_file is not None:
        raise ConfigurationError(
            "--secret-file is given and there is a broker: a worker has one identity, leave out "
            "one of them"
        )
    chosen = {} if broker is None else {"SEALRING_BROKER": broker}
    for name, path in (("SEALRING_AUTHORITY", authority), ("SEALRING_POLICY", policy)):
        if path is not None:
            chosen[name] = str(path.resolve())
    from sealring.broker.enrolment import read_settings

    read_settings({**os.environ, **chosen})  # better refused here than once per worker
    return chosen


def _identity(machines: int, secret_file: Path | None) -> dict[str, str]:
    """What to add to the workers' environment so that they can prove who they are."""
    if secret_file is not None:
        chosen = {"SEALRING_SECRET_FILE": str(secret_file.resolve())}
        # What is wrong is better refused here than once per worker.
        for other in ("SEALRING_SECRET", "SEALRING_CERTIFICATE"):
            if other in os.environ:
                raise ConfigurationError(
                    f"--secret-file is given and {other} is set: leave out one of them"
                )
        read_secret(chosen)
        return chosen
    if read_secret(os.environ) is not None or "SEALRING_CERTIFICATE" in os.environ:
        return {}
    if machines > 1:
        raise NoIdentity(
            "workers on several machines need a common identity. Make a secret once "
            "(umask 077; openssl rand -hex 32 > job.secret), copy it to every machine and pass "
            "--secret-file job.secret, or give each worker a certificate (sealring ca --help)."
        )
    # All workers are our own children: a secret that lives as long as they do is enough.
    return {"SEALRING_SECRET": secrets.token_hex(32), OF_THE_RUN: "1"}
