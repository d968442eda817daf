"""Checkpoints of one process: what comes back, what is refused, and crashes at every step."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from sealring.errors import (
    ConfigurationError,
    ForeignPart,
    MissingPart,
    NoSuchObject,
    RolledBack,
    SealringError,
    TamperedChunk,
    TruncatedFile,
    Unsupported,
    VaultBusy,
    VaultError,
    named,
)
from sealring.vault import (
    CheckpointReader,
    CheckpointWriter,
    Vault,
    export_safetensors,
    export_torch,
    import_safetensors,
    keys,
    signing,
    trees,
)
from tests.codes import coded
from tests.crashes import killed_at
from tests.workers import SECRET

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
OTHER_SECRET = SECRET[::-1]


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    monkeypatch.setenv("SEALRING_JOB", "tests")


def state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "model": {"weight": torch.randn(300, 70), "half": torch.randn(9).bfloat16()},
        "transposed": torch.randn(6, 7).t(),
        "scalar": torch.tensor(float(seed)),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False, True]),
        "step": seed,
        "schedule": {"rates": [0.1, 0.2], "name": "cosine"},
    }


def blank() -> dict[str, Any]:
    return {
        "model": {"weight": torch.zeros(300, 70), "half": torch.zeros(9).bfloat16()},
        "transposed": torch.zeros(7, 6),
        "scalar": torch.tensor(-1.0),
        "empty": torch.empty(0, 3),
        "flags": torch.zeros(3, dtype=torch.bool),
        "step": -1,
        "schedule": {"rates": [0.0, 0.0], "name": ""},
    }


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from flat(inner, f"{path}/{name}")
    else:
        yield path, value


def same(one: Any, other: Any) -> bool:
    first, second = dict(flat(one)), dict(flat(other))
    assert first.keys() == second.keys()
    return all(
        torch.equal(value, second[name]) if isinstance(value, torch.Tensor)
        else value == second[name]
        for name, value in first.items()
    )  # fmt: skip


def save(vault: Vault, seed: int = 0, **options: Any) -> None:
    dcp.save(state(seed), storage_writer=CheckpointWriter(vault, "run", **options))


def load(vault: Vault, **options: Any) -> dict[str, Any]:
    into = blank()
    dcp.load(into, storage_reader=CheckpointReader(vault, "run", **options))
    return into


def error_of(action: Callable[[], Any]) -> BaseException:
    """torch wraps each rank's error."""
    with pytest.raises(CheckpointException) as raised:
        action()
    (wrapped,) = raised.value.failures.values()
    return wrapped[0]


def refused(action: Callable[[], Any], error: type[SealringError] | str, words: str) -> None:
    """`error` is a class, or the code of an error."""
    found = error_of(action)
    met = named(found) if isinstance(error, str) else type(found)
    assert met == error, repr(found)
    assert words in str(found)


@pytest.mark.parametrize("helper", [False, True])
def test_what_was_saved_is_loaded(vault: Vault, helper: bool) -> None:
    for seed in (1, 2):
        save(vault, seed, helper=helper)
    assert same(load(vault), state(2))
    assert same(load(vault, version=1), state(1))


@pytest.mark.threat("V44")
def test_a_checkpoint_shows_nothing_on_the_disk(vault: Vault) -> None:
    before = state(3)
    save(vault, 3)
    on_disk = b"".join(path.read_bytes() for path in vault.path.local.rglob("*") if path.is_file())
    weights = before["model"]["weight"].numpy().tobytes()
    assert all(weights[at : at + 16] not in on_disk for at in range(0, len(weights) - 16, 512))
    for word in (b"cosine", b"weight", b"schedule", b"float32", b"run"):
        assert word not in on_disk


def test_another_dtype_is_converted_as_torch_does(vault: Vault) -> None:
    save(vault, 4)
    into = blank() | {"transposed": torch.zeros(7, 6, dtype=torch.float64)}
    dcp.load(into, storage_reader=CheckpointReader(vault, "run"))
    assert torch.equal(into["transposed"].float(), state(4)["transposed"])


def test_tensors_that_lie_apart_in_memory_are_filled(vault: Vault) -> None:
    save(vault, 5)
    into = blank() | {"transposed": torch.zeros(6, 7).t()}
    dcp.load(into, storage_reader=CheckpointReader(vault, "run"))
    assert torch.equal(into["transposed"], state(5)["transposed"])


def test_old_checkpoints_are_removed_if_asked(vault: Vault) -> None:
    for seed in range(4):
        save(vault, seed, keep=2)
    assert same(load(vault), state(3))
    assert same(load(vault, version=3), state(2))
    with pytest.raises(NoSuchObject):
        vault.find("run", 2)
    with pytest.raises(ConfigurationError, match="at least one"):
        CheckpointWriter(vault, "run", keep=0)


def test_a_job_goes_on_after_a_rotation_under_it(vault: Vault, key: Path) -> None:
    writer = CheckpointWriter(vault, "run")
    dcp.save(state(1), storage_writer=writer)
    operator = Vault.open(vault.path, keys.key_file(key))
    trees.rotate(operator, lambda _: None)
    assert same(load(vault), state(1))
    dcp.save(state(2), storage_writer=writer)
    assert same(load(Vault.open(vault.path, keys.key_file(key))), state(2))


def test_a_rotation_in_the_middle_of_a_load(
    vault: Vault, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy that the load began with is gone; the new one holds the same."""
    save(vault, 9)
    reader = CheckpointReader(vault, "run")
    real = reader.prepare_local_plan

    def rotate_first(plan: Any) -> Any:
        trees.rotate(Vault.open(vault.path, keys.key_file(key)), lambda _: None)
        return real(plan)

    monkeypatch.setattr(reader, "prepare_local_plan", rotate_first)
    into = blank()
    dcp.load(into, storage_reader=reader)
    assert same(into, state(9))


def test_a_rotation_in_the_middle_of_a_save(
    vault: Vault, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CheckpointWriter(vault, "run")
    real = writer.prepare_local_plan

    def rotate_first(plan: Any) -> Any:
        trees.rotate(Vault.open(vault.path, keys.key_file(key)), lambda _: None)
        return real(plan)

    monkeypatch.setattr(writer, "prepare_local_plan", rotate_first)
    dcp.save(state(3), storage_writer=writer)
    assert same(load(Vault.open(vault.path, keys.key_file(key))), state(3))


@pytest.mark.parametrize("step", ["write_data", "finish"])
@pytest.mark.parametrize("change", ["revoke", "rotate"])
@pytest.mark.threat("V25")
def test_a_new_key_in_the_middle_of_a_save(
    step: str, change: str, vault: Vault, key: Path, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    """A holder that is revoked meanwhile may know the key under which the save began."""
    keys.make_key_file(tmp_path / "second")
    vault.grant("second", keys.key_file(tmp_path / "second"))
    save(vault, 1)
    writer = CheckpointWriter(vault, "run", keep=1)
    real = getattr(writer, step)

    def change_first(*arguments: Any, **named: Any) -> Any:
        operator = Vault.open(vault.path, keys.key_file(key))
        if change == "revoke":
            operator.revoke("second")
        else:
            trees.rotate(operator, lambda _: None)
        return real(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(writer, step, change_first)
        refused(lambda: dcp.save(state(2), storage_writer=writer), VaultBusy, "save it again")
    assert same(load(vault), state(1))
    dcp.save(state(3), storage_writer=writer)
    assert same(load(vault), state(3))


def test_a_save_that_fails_holds_nothing(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the vault's keys could not be changed before the process ends."""
    monkeypatch.setattr("sealring.vault.files.LONGEST_WAIT", 0.1)

    def broken(*arguments: object) -> Any:
        raise OSError(28, "no room")

    writer = CheckpointWriter(vault, "run")
    with monkeypatch.context() as patch:
        patch.setattr(writer, "seal", broken)
        assert "no room" in str(error_of(lambda: dcp.save(state(1), storage_writer=writer)))
    vault.rekey()
    with vault.held(alone=False), pytest.raises(VaultBusy, match=r"held by another process"):
        vault.rekey()


def test_views_that_are_conjugate_or_negative_are_saved_as_they_look(vault: Vault) -> None:
    complex_ones = torch.randn(5, dtype=torch.complex64)
    saved = {"conjugate": complex_ones.conj(), "negative": complex_ones.conj().imag}
    dcp.save(dict(saved), storage_writer=CheckpointWriter(vault, "views"))
    into = {name: torch.zeros_like(tensor).contiguous() for name, tensor in saved.items()}
    dcp.load(into, storage_reader=CheckpointReader(vault, "views"))
    assert all(torch.equal(into[name], saved[name]) for name in saved)


def test_a_reader_with_a_persons_key(vault: Vault, tmp_path: Path) -> None:
    save(vault, 6)
    person = keys.make_identity(tmp_path / "me")
    vault.grant("me", keys.PublicKey(person.public))
    assert same(load(Vault.open(vault.path, person)), state(6))
    with pytest.raises(VaultError, check=coded("vault.not_granted")):
        CheckpointWriter(Vault.open(vault.path, person), "run")


# ---- what is refused -----------------------------------------------------------------------------


class Runs:
    """A pickle that would run code."""

    def __reduce__(self) -> Any:
        return os.system, ("echo owned > owned",)


@pytest.mark.threat("P9")
def test_a_pickle_that_runs_code_is_neither_saved_nor_loaded(
    vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bad = {"entry": Runs()}
    refused(
        lambda: dcp.save(bad, storage_writer=CheckpointWriter(vault, "run")),
        "vault.unsafe_entry",
        "the entry 'entry'",
    )
    # By a worker that does not check what it saves.
    with monkeypatch.context() as patch:
        patch.setattr("sealring.vault.checkpoint_form.load_entry", lambda *_: None)
        dcp.save(bad, storage_writer=CheckpointWriter(vault, "run"))
    reader = CheckpointReader(vault, "run")
    refused(
        lambda: dcp.load({"entry": None}, storage_reader=reader), "vault.unsafe_entry", "'entry'"
    )
    assert not (tmp_path / "owned").exists()


@pytest.mark.threat("P1")
def test_parts_that_are_missing_cut_exchanged_or_changed(vault: Vault) -> None:
    for seed in (1, 2):
        save(vault, seed)
    part = vault.find("run").copy.folder / "rank-00000"
    older = vault.find("run", 1).copy.folder / "rank-00000"
    good = part.local.read_bytes()
    whose = "part rank-00000 of 'run' version 2"
    for content, error in [
        (None, MissingPart),
        (good[:-1], TruncatedFile),
        (good + b"x", TruncatedFile),
        (older.local.read_bytes(), ForeignPart),
        (bytes([good[0] ^ 1]) + good[1:], TamperedChunk),
        (good[:30000] + bytes([good[30000] ^ 1]) + good[30001:], TamperedChunk),
    ]:
        part.local.unlink()
        if content is not None:
            part.local.write_bytes(content)
        refused(lambda: load(vault), error, whose)
        part.local.write_bytes(good)
    assert same(load(vault), state(2))


@pytest.mark.threat("V11")
def test_an_older_checkpoint_put_back_is_seen(vault: Vault) -> None:
    for seed in (1, 2):
        save(vault, seed)
    shutil.rmtree(vault.find("run").copy.folder.parent.local)
    refused(lambda: load(vault), RolledBack, "last written as version 2")
    assert same(load(vault, version=1), state(1))  # by its number


def test_loading_says_what_a_local_ledger_proves(
    vault: Vault, caplog: pytest.LogCaptureFixture, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, key: Path,
) -> None:  # fmt: skip
    save(vault)
    for _ in range(2):
        load(vault)
    said = [one.getMessage() for one in caplog.records if one.name == "sealring"]
    assert len(said) == 1
    assert "detects accidents, not an attacker" in said[0]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("SEALRING_VAULT_LEDGER", str(tmp_path / "elsewhere"))
    Vault.open(vault.path, keys.key_file(key))
    caplog.clear()
    load(Vault.open(vault.path, keys.key_file(key)))
    assert not [one for one in caplog.records if one.name == "sealring"]


def test_the_error_of_a_missing_checkpoint(vault: Vault) -> None:
    refused(lambda: load(vault), NoSuchObject, "'run' is not in")


@pytest.mark.threat("P2")
def test_a_manifest_by_a_worker_of_another_authority(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the vault's key, and is no worker of this job."""
    monkeypatch.setenv("SEALRING_SECRET", OTHER_SECRET)
    save(vault)
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    refused(lambda: load(vault), "vault.unadmitted_signer", "handshake.unknown_authority")


@pytest.mark.threat("P2")
def test_a_manifest_of_another_job(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALRING_JOB", "other")
    save(vault)
    monkeypatch.setenv("SEALRING_JOB", "tests")
    refused(lambda: load(vault), "vault.unadmitted_signer", "handshake.wrong_job")
    assert same(load(vault, job="other"), state())


def rewritten(vault: Vault, change: Callable[[dict[str, Any]], None]) -> None:
    """The newest manifest, changed by a holder of the vault's key."""
    stored = vault.find("run")
    manifest = stored.manifest
    content = json.loads(manifest.content)
    change(content)
    vault.commit(stored.copy, "checkpoint", "run", manifest.parts, json.dumps(content))


def change_statement(signed: dict[str, Any], old: str, new: str) -> None:
    assert old in signed["statement"]
    signed["statement"] = signed["statement"].replace(old, new)


@pytest.mark.threat("P2")
def test_statements_that_are_changed_exchanged_or_left_out(vault: Vault) -> None:
    for seed in (1, 2):
        save(vault, seed)
    older = json.loads(vault.find("run", 1).manifest.content)

    def forged(content: dict[str, Any]) -> None:
        change_statement(content["contributions"][0], '"rank": 0', '"rank": 1')

    def left_out(content: dict[str, Any]) -> None:
        content["contributions"] = []

    def of_another(content: dict[str, Any]) -> None:
        content |= older

    def other_paths(content: dict[str, Any]) -> None:
        first, second, *_ = content["paths"]
        content["paths"] |= {first: content["paths"][second], second: content["paths"][first]}

    good = json.loads(vault.find("run").manifest.content)
    for change, error, words in [
        (forged, "vault.unadmitted_signer", "not over what it says"),
        (left_out, "vault.unadmitted_signer", "no rank has signed"),
        (of_another, "vault.foreign_part", "another checkpoint"),
        (other_paths, "vault.foreign_part", "another plan"),
    ]:
        rewritten(vault, change)
        refused(lambda: load(vault), error, words)
        rewritten(vault, lambda content: content.update(good))
    assert same(load(vault), state(2))


@pytest.mark.threat("P2")
def test_a_signature_outside_the_certificates_dates() -> None:
    credentials = signing.credentials_of(0, 1)
    late = signing.sign(credentials, 1, {"time": "2199-01-01T00:00:00+00:00"})
    with pytest.raises(
        VaultError, match=r"handshake\.certificate_expired", check=coded("vault.unadmitted_signer")
    ):
        signing.check(late, credentials.authorities, "tests", "it")
    never = signing.sign(credentials, 1, {"time": "2199-01-01"})
    with pytest.raises(
        VaultError, match="not over what it says", check=coded("vault.unadmitted_signer")
    ):
        signing.check(never, credentials.authorities, "tests", "it")


def test_planners_that_reuse_plans_are_refused(vault: Vault) -> None:
    writer = CheckpointWriter(vault, "run")
    for attempt in range(2):
        planner = DefaultSavePlanner(enable_plan_caching=True)

        def action(planner: DefaultSavePlanner = planner) -> None:
            dcp.save(state(1), storage_writer=writer, planner=planner)

        if attempt == 0:
            action()
        else:
            refused(action, Unsupported, "enable_plan_caching")
    assert same(load(vault), state(1))


@pytest.mark.threat("P13")
def test_a_writer_does_not_travel(vault: Vault) -> None:
    import pickle

    with pytest.raises(Unsupported, match="helper=True"):
        pickle.dumps(CheckpointWriter(vault, "run"))
    with pytest.raises(Unsupported, match="stays in its process"):
        pickle.dumps(CheckpointReader(vault, "run"))


@pytest.mark.threat("V40")
def test_a_full_disk_is_told_and_the_checkpoint_before_stays(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(vault, 1)

    @contextmanager
    def full(self: object, name: str) -> Iterator[int]:
        with open("/dev/full", "wb", buffering=0) as file:
            yield file.fileno()

    with monkeypatch.context() as patch:
        patch.setattr("sealring.vault.objects.Copy.new_part", full)
        assert "cannot be written" in str(error_of(lambda: save(vault, 2)))
        assert "cannot be written" in str(error_of(lambda: save(vault, 2, helper=True)))
    assert same(load(vault), state(1))
    save(vault, 3)
    assert same(load(vault), state(3))


@pytest.mark.threat("V40")
def test_killed_at_every_step_of_a_save_the_one_before_is_whole(
    vault: Vault, key: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)  # the child has none of torch's threads
    save(vault, 1)
    place = tmp_path / "copy"

    def opened() -> Vault:
        return Vault.open(place, keys.key_file(key))

    outcomes = set()
    for step in range(1000):
        shutil.copytree(vault.path.local, place)
        killed = killed_at(step, lambda: save(opened(), 2))
        loaded = load(opened())
        newest = int(loaded["step"])
        assert same(loaded, state(newest))
        outcomes.add((killed, newest))
        save(opened(), 3)  # and the next one succeeds
        assert same(load(opened()), state(3))
        shutil.rmtree(place)
        if not killed:
            break
    assert outcomes == {(True, 1), (True, 2), (False, 2)}


# ---- other forms ---------------------------------------------------------------------------------


def test_export_in_torch_s_form(vault: Vault, tmp_path: Path) -> None:
    save(vault, 7)
    out = tmp_path / "out.pt"
    export_torch(CheckpointReader(vault, "run"), out)
    assert same(torch.load(out, weights_only=True), state(7))
    assert out.stat().st_mode & 0o777 == 0o600
    with pytest.raises(VaultError, check=coded("vault.output_exists")):
        export_torch(CheckpointReader(vault, "run"), out)


def test_export_by_command(
    vault: Vault, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding
    from typer.testing import CliRunner

    from sealring.cli import app

    save(vault, 8)
    credentials = signing.credentials_of(0, 1)
    authority = tmp_path / "authority.pem"
    authority.write_bytes(credentials.authorities[0].public_bytes(Encoding.PEM))
    for name in ("SEALRING_SECRET", "SEALRING_JOB"):
        monkeypatch.delenv(name)
    out = tmp_path / "out.pt"

    def export(*options: str) -> Any:
        where = [str(vault.path), "run", "--key", str(key), "--out", str(out)]
        return CliRunner().invoke(app, ["vault", "open", *where, *options])

    assert isinstance(export().exception, SealringError)  # no identity says whose it must be
    trusted = ["--authority", str(authority), "--job"]
    assert named(export(*trusted, "other").exception) == "vault.unadmitted_signer"
    assert isinstance(export(*trusted[:2]).exception, ConfigurationError)
    assert isinstance(export("--format", "onnx").exception, ConfigurationError)
    assert not out.exists()
    assert export(*trusted, "tests").exit_code == 0
    assert same(torch.load(out, weights_only=True), state(8))
    refusal = export(*trusted, "tests").exception
    assert isinstance(refusal, VaultError)
    assert refusal.code == "vault.output_exists"


def test_one_entry_of_a_checkpoint_is_exported_and_the_rest_is_named(
    vault: Vault, key: Path, tmp_path: Path
) -> None:
    theirs = pytest.importorskip("safetensors.torch", reason="the package safetensors")
    from typer.testing import CliRunner

    from sealring.cli import app

    model: dict[str, Any] = {"layers": {"0.weight": torch.randn(40, 50)}, "bias": torch.arange(5)}
    whole = {"model": model, "optimizer": {"momentum": torch.randn(400, 500)}, "step": 7}
    dcp.save(whole, storage_writer=CheckpointWriter(vault, "run"))
    out = tmp_path / "model.safetensors"

    def export(*options: str) -> Any:
        where = [str(vault.path), "run", "--key", str(key), "--out", str(out)]
        return CliRunner().invoke(app, ["vault", "open", *where, *options])

    refused = export("--format", "safetensors").exception
    assert type(refused) is Unsupported
    assert "`--only model`" in str(refused)
    refused = export("--format", "safetensors", "--only", "modell").exception
    assert type(refused) is ConfigurationError
    assert "no entry 'modell': it has model, optimizer, step" in str(refused)
    done = export("--format", "safetensors", "--only", "model")
    assert done.exit_code == 0
    assert "Left out: optimizer, step.\n" in done.stdout
    flat = {"layers.0.weight": model["layers"]["0.weight"], "bias": model["bias"]}
    assert same(theirs.load_file(out), flat)
    reader = CheckpointReader(vault, "run")
    assert export_torch(reader, tmp_path / "m.pt", only="model") == ["optimizer", "step"]
    assert same(torch.load(tmp_path / "m.pt", weights_only=True), model)
    assert reader.bytes_needed < 10_000  # the optimizer is not read
    left = export_torch(CheckpointReader(vault, "run"), tmp_path / "l.pt", only="model.layers")
    assert left == ["model.bias", "optimizer", "step"]
    assert same(torch.load(tmp_path / "l.pt", weights_only=True), model["layers"])


def test_an_export_of_one_entry_drops_nothing_below_it(vault: Vault, tmp_path: Path) -> None:
    """A tensor whose name has a dot was neither written nor named among what is left out."""
    one = torch.ones(1)
    state = {"model": {"a.b": one, "a": {"c": one}, "list": [one, one]}, "model.a.d": one}
    dcp.save(state, storage_writer=CheckpointWriter(vault, "run"))
    reader = CheckpointReader(vault, "run")
    assert export_torch(reader, tmp_path / "a.pt", only="model.a") == ["model.list"]
    assert sorted(torch.load(tmp_path / "a.pt")) == ["b", "c", "d"]
    with pytest.raises(ConfigurationError, match=r"'model\.list\.1' is in the list 'model\.list'"):
        export_torch(reader, tmp_path / "b.pt", only="model.list.1")


def test_export_of_a_job_that_ran_under_a_secret_file(
    vault: Vault, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from sealring.cli import app

    secret, other = tmp_path / "secret", tmp_path / "other"
    for path in (secret, other):
        path.write_text(secrets.token_hex(32))
        path.chmod(0o600)
    for name in ("SEALRING_SECRET", "SEALRING_JOB"):
        monkeypatch.delenv(name)
    with monkeypatch.context() as patch:
        patch.setenv("SEALRING_SECRET_FILE", str(secret))
        save(vault, 8)
    out = tmp_path / "out.pt"

    def export(*options: str) -> Any:
        where = [str(vault.path), "run", "--key", str(key), "--out", str(out)]
        return CliRunner().invoke(app, ["vault", "open", *where, *options])

    assert named(export("--authority", str(other)).exception) == "vault.unadmitted_signer"
    assert type(export("--job", "other").exception) is ConfigurationError
    wrong = export("--authority", str(secret), "--job", "other").exception
    assert named(wrong) == "vault.unadmitted_signer"
    secret.chmod(0o644)
    assert export("--authority", str(secret)).exception.code == "configuration.bad_secret"
    secret.chmod(0o600)
    done = export("--authority", str(secret))
    assert done.exit_code == 0
    assert secret.read_text() not in done.output
    assert same(torch.load(out, weights_only=True), state(8))


def test_the_name_can_come_from_torch(vault: Vault) -> None:
    writer = CheckpointWriter(vault, "run")
    dcp.save(state(1), storage_writer=writer, checkpoint_id="other")
    with pytest.raises(NoSuchObject):
        vault.find("run")
    into = blank()
    dcp.load(into, storage_reader=CheckpointReader(vault, "run"), checkpoint_id="other")
    assert same(into, state(1))


def test_safetensors_in_and_out(vault: Vault, tmp_path: Path) -> None:
    theirs = pytest.importorskip("safetensors.torch", reason="the package safetensors")
    tensors = {
        "a.weight": torch.randn(40, 50),
        "b": torch.randn(7).bfloat16(),
        "c": torch.arange(5),
        "d": torch.tensor(1.5),
        "e": torch.empty(0, 4),
    }
    theirs.save_file(tensors, tmp_path / "in.safetensors")
    import_safetensors(CheckpointWriter(vault, "model"), tmp_path / "in.safetensors")
    export_safetensors(CheckpointReader(vault, "model"), tmp_path / "out.safetensors")
    assert same(theirs.load_file(tmp_path / "out.safetensors"), tensors)
    save(vault)
    with pytest.raises(Unsupported, match="safetensors cannot hold it"):
        export_safetensors(CheckpointReader(vault, "run"), tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x40\0\0\0\0\0\0\0" + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}'.ljust(64),
        b"\x40\0\0\0\0\0\0\0" + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(64),
        b"\x40\0\0\0\0\0\0\0" + b'{"a":{"dtype":"X","shape":[],"data_offsets":[0,0]}}'.ljust(64),
    ],
)
def test_files_that_are_no_safetensors(content: bytes, vault: Vault, tmp_path: Path) -> None:
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="is not a safetensors file"):
        import_safetensors(CheckpointWriter(vault, "model"), path)


def test_a_name_that_safetensors_keeps_for_itself(vault: Vault, tmp_path: Path) -> None:
    tensors = {"__metadata__": torch.ones(2), "b": torch.ones(2)}
    dcp.save(tensors, storage_writer=CheckpointWriter(vault, "model"))
    with pytest.raises(Unsupported, match="no tensor named '__metadata__'"):
        export_safetensors(CheckpointReader(vault, "model"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    described = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    text = json.dumps({"__metadata__": described}).encode()
    (tmp_path / "in").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(ConfigurationError, match="__metadata__ is no table of strings"):
        import_safetensors(CheckpointWriter(vault, "model"), tmp_path / "in")


def test_tensors_without_content_are_refused_by_name(vault: Vault) -> None:
    def action() -> None:
        dcp.save({"m": torch.ones(2, device="meta")}, storage_writer=CheckpointWriter(vault, "run"))

    refused(action, Unsupported, "m is on the device 'meta'")
