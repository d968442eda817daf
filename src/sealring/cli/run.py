"""`sealring run`: starts workers by torchrun's launcher, each with its own identity."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import signal
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from sealring.cli import terminal
from sealring.cli.terminal import warn
from sealring.core.group.settings import read_settings
from sealring.core.identity.process import shut_out_debuggers
from sealring.core.identity.secret import OF_THE_RUN, read_secret
from sealring.core.last_words import LAUNCHED, read_error_files
from sealring.core.sealed_only.guard import require_sealed
from sealring.core.settings import (
    ADVERTISE,
    AUTHORITY,
    BROKER,
    CERTIFICATE,
    JOB,
    POLICY,
    PORTS,
    SECRET,
    SECRET_FILE,
    unknown_variables,
)
from sealring.errors import ConfigurationError
from sealring.observe.server import sweep

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

# Everything after the script's name belongs to the script, options too.
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
    ports: Annotated[
        Text,
        typer.Option(
            metavar="PORTS",
            help="The only ports that workers here listen on: 29600-29663 (docs/reach.md).",
        ),
    ] = None,
    advertise: Annotated[
        Text,
        typer.Option(
            metavar="HOST[:PORTS]",
            help="The address, and the ports if they differ, at which others reach this machine.",
        ),
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
        warn(f"sealring: {sentence}")
    given = LaunchPlacement() if standalone else placement(os.environ)
    for name in [each for each in os.environ if each.startswith("PET_")]:
        if name not in PASSED_ON:  # torchrun reads them as options, which are passed below
            del os.environ[name]
    check_passed_on(os.environ)
    machines = nnodes if nnodes is not None else given.machines
    machine = node_rank if node_rank is not None else given.machine
    workers = check_workers(nproc if nproc is not None else given.workers)
    endpoint = rdzv_endpoint or given.endpoint
    if not 0 <= machine < machines:
        raise ConfigurationError(
            f"--node-rank is {machine}, and --nnodes is {machines}: machines are numbered from 0 "
            f"to {machines - 1}"
        )
    for row, given_text in ((JOB, job), (PORTS, ports), (ADVERTISE, advertise)):
        if given_text is not None:
            os.environ[row.name] = given_text
    if PORTS.read(os.environ) or ADVERTISE.read(os.environ):
        from sealring.core.links.addresses import read_advertised, read_ports

        read_advertised(os.environ, read_ports(os.environ))  # better refused here than per worker
    # Empty if the environment already has everything.
    brokered = broker_environment(broker, authority, policy, secret_file)
    os.environ.update(identity_environment(machines, secret_file) if brokered is None else brokered)
    require_sealed()
    if record is not None:
        from sealring.record.recording.run import FOLDER

        os.environ[FOLDER] = str(record.absolute())
    read_settings(os.environ)
    if machines == 1:
        # All workers are on this machine: any free port is fine, and the name is unique.
        endpoint, run_id = "localhost:0", secrets.token_hex(16)
    elif endpoint is not None:
        run_id = JOB.read(os.environ) or "sealring"
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
    arguments += ["--module"] * module + ["--no-python"] * no_python
    arguments += [script, *context.args]
    with ExitStack() as launched:
        if not {"PET_LOG_DIR", "PET_REDIRECTS", "PET_TEE"} & os.environ.keys():
            # torchrun would make a folder for its workers' error files and not remove it.
            folder = launched.enter_context(errors_folder())
            arguments = ["--log-dir", folder, *arguments]
        _launch(arguments, several=workers != "1")


def errors_folder() -> tempfile.TemporaryDirectory[str]:
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
        except Exception:  # a worker may write anything there; it must not end the launcher
            failure.error_file = ""
            read_error_file(failure)

    failures.__post_init__ = tolerate_error_file
    if not terminal.debug:
        os.environ[LAUNCHED] = "1"
    if several:
        # Torch's launcher would set the same, with a warning.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Torch's launcher reports failed workers, too; print_cause does so below.
    for name in ("multiprocessing", "multiprocessing.errors"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        torchrun(arguments)
    except SignalException as stopped:
        # The launcher has ended every worker by now. As in a shell: 128 plus the signal.
        raise typer.Exit(128 + stopped.sigval) from None
    except ChildFailedError as failed:
        print_cause(failed)
        raise typer.Exit(1) from None
    finally:
        sweep(os.environ)


def _check_script(script: str, *, module: bool, no_python: bool) -> None:
    """Checks that the script exists, so that the error comes once and not from every worker."""
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
PASSED_ON: Final = {
    "PET_LOG_DIR": (".*", "a folder"),
    "PET_REDIRECTS": _STREAMS,
    "PET_TEE": _STREAMS,
    "PET_LOCAL_RANKS_FILTER": (r"\d+(,\d+)*", "the local ranks of workers: 0,1"),
}
"""Variables that torchrun reads itself: the pattern of allowed values, and its description."""


def check_passed_on(environ: Mapping[str, str]) -> None:
    for name in PASSED_ON.keys() & environ.keys():
        form, words = PASSED_ON[name]
        if re.fullmatch(form, environ[name]) is None:
            raise ConfigurationError(f"{name} is {environ[name]!r}; set it to {words}")


def check_workers(text: str) -> str:
    """Checks a number of workers as torchrun takes it: a number, or `auto`, `gpu` or `cpu`."""
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


def broker_environment(
    broker: str | None, authority: Path | None, policy: Path | None, secret_file: Path | None
) -> dict[str, str] | None:
    """The environment of workers that join through a broker; None if there is none."""
    if broker is None and not BROKER.read(os.environ):
        for option, path in (("--authority", authority), ("--policy", policy)):
            if path is not None:
                # Ignoring the option would make a user believe that peers are checked by it.
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
    chosen = {} if broker is None else {BROKER.name: broker}
    for row, path in ((AUTHORITY, authority), (POLICY, policy)):
        if path is not None:
            chosen[row.name] = str(path.resolve())
    from sealring.attest.broker.enrolment import read_settings

    read_settings({**os.environ, **chosen})  # refused here, once, and not by each worker
    return chosen


def identity_environment(machines: int, secret_file: Path | None) -> dict[str, str]:
    """The variables that give the workers their identity, if the environment lacks one."""
    if secret_file is not None:
        chosen = {SECRET_FILE.name: str(secret_file.resolve())}
        # Refused here, once, and not by each worker.
        for other in (SECRET.name, CERTIFICATE.name):
            if other in os.environ:
                raise ConfigurationError(
                    f"--secret-file is given and {other} is set: leave out one of them"
                )
        read_secret(chosen)
        return chosen
    if read_secret(os.environ) is not None or CERTIFICATE.name in os.environ:
        return {}
    if machines > 1:
        raise ConfigurationError(
            "workers on several machines need a common identity. Make a secret once "
            "(umask 077; openssl rand -hex 32 > job.secret), copy it to every machine and pass "
            "--secret-file job.secret, or give each worker a certificate (sealring ca --help).",
            code="configuration.no_identity",
        )
    # All workers are children of this process: a secret for this run is enough.
    return {SECRET.name: secrets.token_hex(32), OF_THE_RUN: "1"}


# ---- the launcher's place in its job, as the scheduler that started it says: Kubeflow's Trainer
# (PET_*, torchrun's own variables), Slurm (inside srun) or SkyPilot. Options take precedence.

PORT: Final = 29400
_PLACES: Final = ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "RDZV_ENDPOINT")
"""The names, after PET_, of torchrun's variables for a launcher's place. One is enough."""


@dataclass(frozen=True, slots=True)
class LaunchPlacement:
    machines: int = 1
    machine: int = 0
    workers: str = "1"
    """The workers on this machine: a number, or auto, gpu or cpu, which torchrun counts itself."""
    endpoint: str | None = None
    """host:port of machine 0."""


def placement(environ: Mapping[str, str]) -> LaunchPlacement:
    if any(f"PET_{name}" in environ for name in _PLACES):
        return _of_torchrun(environ)
    if "SLURM_STEP_NUM_NODES" in environ:
        return _of_slurm(environ)
    if "SKYPILOT_NODE_RANK" in environ:
        return _of_skypilot(environ)
    return LaunchPlacement()


def _of_torchrun(environ: Mapping[str, str]) -> LaunchPlacement:
    machines = environ.get("PET_NNODES", "1")
    least, _, most = machines.partition(":")
    if most not in ("", least):
        raise ConfigurationError(
            f"PET_NNODES is {machines!r}: a job of sealring's has a fixed number of machines"
        )
    endpoint = environ.get("PET_RDZV_ENDPOINT") or None
    if endpoint is None and (host := environ.get("PET_MASTER_ADDR")):
        endpoint = f"{host}:{environ.get('PET_MASTER_PORT', PORT)}"
    return LaunchPlacement(
        _number("PET_NNODES", least),
        _number("PET_NODE_RANK", environ.get("PET_NODE_RANK", "0")),
        environ.get("PET_NPROC_PER_NODE", "1"),
        endpoint,
    )


def _of_slurm(environ: Mapping[str, str]) -> LaunchPlacement:
    machines = _number("SLURM_STEP_NUM_NODES", environ["SLURM_STEP_NUM_NODES"])
    if _number("SLURM_STEP_NUM_TASKS", environ.get("SLURM_STEP_NUM_TASKS", "1")) != machines:
        raise ConfigurationError(
            "`sealring run` starts a machine's workers itself: have srun start it once per machine "
            "(--ntasks-per-node=1), and say how many workers with --nproc-per-node"
        )
    # Jobs that share a machine get different ports; all machines of a job compute the same one.
    port = 20000 + _number("SLURM_JOB_ID", environ["SLURM_JOB_ID"]) % 10000
    return LaunchPlacement(
        machines,
        _number("SLURM_NODEID", environ["SLURM_NODEID"]),
        environ.get("SLURM_GPUS_ON_NODE") or "1",
        f"{first_host(environ['SLURM_STEP_NODELIST'])}:{port}",
    )


def first_host(nodelist: str) -> str:
    """The first host in Slurm's short form: rack1-node01 for rack1-node[01-03,07],gpu5."""
    found = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    if found is None:
        raise ConfigurationError(f"SLURM_STEP_NODELIST is {nodelist!r}, which names no machine")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", found.group())


def _of_skypilot(environ: Mapping[str, str]) -> LaunchPlacement:
    addresses = environ.get("SKYPILOT_NODE_IPS", "").split()
    return LaunchPlacement(
        _number("SKYPILOT_NUM_NODES", environ.get("SKYPILOT_NUM_NODES", str(len(addresses)))),
        _number("SKYPILOT_NODE_RANK", environ["SKYPILOT_NODE_RANK"]),
        environ.get("SKYPILOT_NUM_GPUS_PER_NODE") or "1",
        f"{addresses[0]}:{PORT}" if addresses else None,
    )


def _number(name: str, value: str) -> int:
    if not value.isdecimal():
        raise ConfigurationError(f"{name} is {value!r}, which is not a number")
    return int(value)


# ---- why the job ended; printed last

_OFTEN: Final[dict[int, str]] = {
    signal.SIGKILL: "often the kernel's out-of-memory killer, which `dmesg` shows",
    signal.SIGSEGV: "native code used memory that is not its own",
    signal.SIGBUS: "often a full /dev/shm, or a mapped file that was cut",
    signal.SIGABRT: "native code called abort()",
}
"""Signals that no part of a job sends, and their most common causes."""


def print_cause(failed: ChildFailedError) -> None:
    """Prints the error that probably caused the others, once, after all other output."""
    told = read_error_files(failed.get_first_failure()[1].error_file)
    silent = sorted(failed.failures.keys() - {each.rank for each in told})
    # The launcher ends the others by SIGTERM. Such an end is a cause only if no other is known.
    by_themselves = [rank for rank in silent if failed.failures[rank].exitcode != -signal.SIGTERM]
    if by_themselves or told:
        silent = by_themselves
    causes = [each for each in told if not each.follows]
    others = len({*failed.failures, *(each.rank for each in told)}) - 1
    ended = f"; {others} more ended with it" if others else ""
    if not causes and silent:
        # A worker was killed, or ended without an error; the other errors follow from that.
        text = _without_error(silent[0], failed.failures[silent[0]].exitcode, ended)
    else:
        first = (causes or told)[0]
        above = ". Its traceback is above." if first.printed else ""
        text = f"{first.text} (rank {first.failed}{ended}){above}"
    warn(text)


def _without_error(rank: int, code: int, ended: str) -> str:
    """Describes the end of a worker that wrote no error."""
    if code >= 0:
        return f"Rank {rank} ended with exit code {code}{ended}. What it printed is above, if any."
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal, which has only a number
        name = f"signal {-code}"
    often = f"; {_OFTEN[-code]}" if -code in _OFTEN else ""
    return f"Rank {rank} was killed by {name}{often}{f' ({ended[2:]})' if ended else ''}."
