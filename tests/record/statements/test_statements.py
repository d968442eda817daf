"""Workers' statements are signed with the certificate's key, and read strictly."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from sealring.cli import app
from sealring.core.identity.authority import create_authority, issue_from_directory, open_authority
from sealring.core.identity.certificates import issue, make_authority
from sealring.core.identity.credentials import Credentials, load_credentials
from sealring.core.identity.kept_key import KeptKey
from sealring.core.identity.names import WorkerName
from sealring.core.identity.verification import VerifiedPeer
from sealring.errors import (
    ConfigurationError,
    ForgedStatement,
    MalformedStatement,
    PeerNotAdmitted,
    Unsupported,
)
from sealring.formats.signed import key_id
from sealring.formats.strict import strictly
from sealring.record.statements.forms import Interval, Named, Transformation, parameters_of
from sealring.record.statements.signing import (
    read_owner_key,
    seal,
    sign_statement,
    statement_digest,
    verify_statement,
)
from tests.codes import coded
from tests.record.statements import schema

NOW = datetime(2026, 11, 1, 12, tzinfo=UTC)
AUTHORITY_KEY = Ed25519PrivateKey.generate()


def authority_of(key: Ed25519PrivateKey) -> x509.Certificate:
    start, end = NOW - timedelta(days=9), NOW + timedelta(days=9)
    return make_authority(key, "test", 1, start, end)


AUTHORITY = authority_of(AUTHORITY_KEY)
SUBJECT = Named("weights", "ab" * 32)
GROUP = {"group": "default", "epoch": "e1"}
SENT, RECEIVED = {"records": 3, "sha256": "03" * 32}, {"records": 3, "sha256": "04" * 32}
FIELDS: dict[str, Any] = {
    "run": "run-1", "sequence": 0, "previous": None, "final": False, "world": 2,
    "first_step": 0, "end_step": 9007199254740993, "started": int(NOW.timestamp()) - 60,
    "finished": int(NOW.timestamp()),
    "code": {
        "script": {"name": "train.py", "sha256": "01" * 32}, "packages": "06" * 32,
        "sealring": "1", "python": "3.12", "torch": "2.13", "container": None,
    },
    "configuration": "02" * 32,
    "data": [{
        "name": "corpus", "sha256": "07" * 32, "epoch": 0, "first": 0, "end": 4096, "seed": 1,
        "share": {"period": 8, "offset": 4, "length": 4},
    }],
    "groups": [{"name": "default", "epoch": "e1", "members": [0, 1], "state": "open"}],
    "collectives": [{**GROUP, "kind": "all_reduce", "count": 10}],
    "links": [
        {**GROUP, "peer": 1, "kind": "collective", "sent": SENT, "received": RECEIVED},
        {**GROUP, "peer": 1, "kind": "message", "sent": None, "received": None},
    ],
    "checkpoints_in": [],
    "checkpoints_out": [
        {"name": "weights", "step": 10, "sha256": "ab" * 32, "content": "05" * 32}
    ],
    "privacy": None,
}  # fmt: skip


def worker(
    rank: int = 0,
    authority: Ed25519PrivateKey = AUTHORITY_KEY,
    key: Ed25519PrivateKey | None = None,
) -> Credentials:
    key = key or Ed25519PrivateKey.generate()
    issuer = AUTHORITY if authority is AUTHORITY_KEY else authority_of(authority)
    name, hour = WorkerName("job", rank), timedelta(hours=1)
    certificate = issue(issuer, authority, key.public_key(), name, 2, hour, NOW)
    return Credentials("job", rank, certificate, (issuer,), KeptKey.of(key))


def interval(**changes: Any) -> Interval:
    found: Interval = strictly(Interval, {**FIELDS, **changes}, "interval", "statement")
    return found


def signed(credentials: Credentials | None = None, **changes: Any) -> bytes:
    return sign_statement(interval(**changes), credentials or worker())


def transformation(**changes: Any) -> Transformation:
    fields = {
        "kind": "stage", "name": "tokenise", "inputs": [{"name": "raw", "sha256": "01" * 32}],
        "outputs": [{"name": "tokens", "sha256": "02" * 32}],
        "code": [{"name": "tokenise.py", "sha256": "03" * 32}],
        "parameters": asdict(parameters_of({"vocabulary": 50257})),
        "started": int(NOW.timestamp()), "finished": int(NOW.timestamp()),
    }  # fmt: skip
    found: Transformation = strictly(
        Transformation, {**fields, **changes}, "transformation", "statement"
    )
    return found


def test_a_statement_says_who_and_what_without_losing_a_digit() -> None:
    credentials = worker(1)
    found = verify_statement(signed(credentials), [AUTHORITY], NOW)
    assert isinstance(found.signer, VerifiedPeer)
    assert (found.signer.job, found.signer.rank) == ("job", 1)
    assert found.signer.fingerprint == credentials.fingerprint
    assert found.subjects == (SUBJECT,)
    assert found.content == interval()
    assert interval().end_step == 9007199254740993  # as a double it would be one less


def test_an_interval_without_a_checkpoint_is_about_its_script() -> None:
    found = verify_statement(signed(checkpoints_out=[]), [AUTHORITY])
    assert found.subjects == (Named("train.py", "01" * 32),)


def test_a_chain_names_envelopes_byte_for_byte() -> None:
    first = signed()
    digest = verify_statement(first, [AUTHORITY]).digest
    assert digest == hashlib.sha256(first).hexdigest() == statement_digest(first)
    second = verify_statement(signed(sequence=1, previous=digest), [AUTHORITY])
    assert isinstance(second.content, Interval)
    assert second.content.previous == digest


def test_a_transformation_of_a_worker_and_of_an_owner() -> None:
    by_worker = verify_statement(sign_statement(transformation(), worker(1)), [AUTHORITY])
    assert by_worker.worker is not None
    assert by_worker.worker.rank == 1
    assert by_worker.content == transformation()
    key = Ed25519PrivateKey.generate()
    envelope = sign_statement(transformation(), key)
    by_owner = verify_statement(envelope, [], owners=[key.public_key()])
    assert (by_owner.worker, by_owner.signer) == (None, key_id(key.public_key()))
    assert by_owner.subjects == (Named("tokens", "02" * 32),)
    with pytest.raises(ForgedStatement, match="not an owner's"):
        verify_statement(envelope, [AUTHORITY])
    with pytest.raises(ForgedStatement, match="not an owner's"):
        verify_statement(envelope, [], owners=[Ed25519PrivateKey.generate().public_key()])


@pytest.mark.threat("L12")
def test_an_owner_speaks_for_no_worker() -> None:
    key = Ed25519PrivateKey.generate()
    with pytest.raises(ConfigurationError, match="by the worker"):
        sign_statement(interval(), key)
    payload = base64.b64decode(json.loads(signed())["payload"])
    for content in (
        payload,
        base64.b64decode(json.loads(sign_statement(transformation(), worker()))["payload"]),
    ):
        with pytest.raises(ForgedStatement, match="speaks for a worker"):
            verify_statement(seal(content, key), [], owners=[key.public_key()])


def test_parameters_whose_digest_is_another() -> None:
    with pytest.raises(ConfigurationError, match="digest of the parameters"):
        transformation(parameters={"text": "{}", "sha256": "00" * 32})
    assert parameters_of({"b": 1, "a": 2}) == parameters_of({"a": 2, "b": 1})


def test_what_is_signed_is_the_encoding_of_the_dsse_specification() -> None:
    credentials = worker()
    envelope = json.loads(signed(credentials))
    assert envelope.keys() == {"payload", "payloadType", "signatures"}
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    payload = base64.b64decode(envelope["payload"])
    (signature,) = envelope["signatures"]
    encoded = b"DSSEv1 28 application/vnd.in-toto+json %d %s" % (len(payload), payload)
    key = credentials.certificate.public_key()
    key.verify(base64.b64decode(signature["sig"]), encoded)  # type: ignore[union-attr,call-arg]
    statement = json.loads(payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"] == [{"name": "weights", "digest": {"sha256": "ab" * 32}}]


def test_the_schemas_in_the_documents_are_those_of_the_code() -> None:
    for path, wanted in schema.schemas().items():
        assert json.loads(path.read_text()) == wanted, path.name


def changed(envelope: bytes, change: Callable[[Any], None]) -> bytes:
    value = json.loads(envelope)
    change(value)
    return json.dumps(value, separators=(",", ":")).encode()


def resigned(credentials: Credentials, change: Callable[[Any], None]) -> bytes:
    """Return a statement whose payload the worker itself changed and signed."""
    envelope = json.loads(signed(credentials))
    statement = json.loads(base64.b64decode(envelope["payload"]))
    change(statement)
    payload = json.dumps(statement).encode()
    return with_payload(credentials, payload)


def with_payload(credentials: Credentials, payload: bytes) -> bytes:
    envelope = json.loads(signed(credentials))
    encoded = b"DSSEv1 28 application/vnd.in-toto+json %d %s" % (len(payload), payload)
    key = credentials.private_key
    assert isinstance(key, Ed25519PrivateKey)
    envelope["payload"] = base64.b64encode(payload).decode()
    signature = key.sign(encoded)
    envelope["signatures"][0]["sig"] = base64.b64encode(signature).decode()
    return json.dumps(envelope, separators=(",", ":")).encode()


@pytest.mark.threat("L12")
def test_who_did_not_sign_it() -> None:
    mine, other = worker(0), worker(1)
    envelope = signed(mine)
    (others,) = json.loads(signed(other))["signatures"]

    def payload(value: Any) -> None:
        content = base64.b64decode(value["payload"]).replace(b'"rank":0', b'"rank":1')
        value["payload"] = base64.b64encode(content).decode()

    def anothers_certificate(value: Any) -> None:
        value["signatures"][0] |= {"certificate": others["certificate"], "keyid": others["keyid"]}

    def keyid(value: Any) -> None:
        value["signatures"][0]["keyid"] = others["keyid"]

    for change in (payload, anothers_certificate, keyid):
        with pytest.raises(ForgedStatement):
            verify_statement(changed(envelope, change), [AUTHORITY])
    stranger = worker(0, Ed25519PrivateKey.generate())
    with pytest.raises(ForgedStatement, match="not of an authority"):
        verify_statement(signed(stranger), [AUTHORITY])


@pytest.mark.threat("L12", "L13")
def test_a_worker_that_speaks_for_another() -> None:
    def other_rank(statement: Any) -> None:
        statement["predicate"]["worker"]["rank"] = 1

    def other_job(statement: Any) -> None:
        statement["predicate"]["worker"]["job"] = "other"

    def other_certificate(statement: Any) -> None:
        statement["predicate"]["worker"]["certificate"] = "00" * 32

    def evidence(statement: Any) -> None:
        statement["predicate"]["worker"]["attestation"] = {
            "label": "snp", "evidence": "00" * 32, "policy": "00" * 32,
        }  # fmt: skip

    for change in (other_rank, other_job, other_certificate, evidence):
        with pytest.raises(ForgedStatement, match="is about rank"):
            verify_statement(resigned(worker(0), change), [AUTHORITY])


@pytest.mark.threat("L13")
def test_a_world_that_is_not_the_certificates() -> None:
    for world in (1, 3):
        with pytest.raises(ForgedStatement, match=f"a world of {world}"):
            verify_statement(signed(worker(1), world=world), [AUTHORITY])


@pytest.mark.threat("L13")
def test_subjects_that_the_predicate_does_not_name() -> None:
    def other_subject(statement: Any) -> None:
        statement["subject"] = [{"name": "weights", "digest": {"sha256": "00" * 32}}]

    with pytest.raises(ForgedStatement, match="subjects are not those"):
        verify_statement(resigned(worker(0), other_subject), [AUTHORITY])


@pytest.mark.threat("L12")
def test_the_authority_itself_is_no_worker() -> None:
    credentials = Credentials("job", 0, AUTHORITY, (AUTHORITY,), KeptKey.of(AUTHORITY_KEY))
    with pytest.raises(ForgedStatement, match="not a sealring worker's"):
        signed(credentials)
    payload = base64.b64decode(json.loads(signed())["payload"])
    with pytest.raises(ForgedStatement, match="not a sealring worker's"):
        verify_statement(seal(payload, credentials), [AUTHORITY])


@pytest.mark.threat("L12")
def test_a_certificate_outside_its_dates() -> None:
    later, earlier = NOW + timedelta(hours=2), NOW - timedelta(hours=2)
    second = int(later.timestamp())
    with pytest.raises(PeerNotAdmitted, check=coded("handshake.certificate_expired")):
        verify_statement(signed(finished=second), [AUTHORITY])
    second = int(earlier.timestamp())
    with pytest.raises(PeerNotAdmitted, check=coded("handshake.certificate_not_yet_valid")):
        verify_statement(signed(started=second, finished=second), [AUTHORITY])
    # It stays good for its interval, and is refused by a log that would take it today.
    assert verify_statement(signed(), [AUTHORITY]).content == interval()
    with pytest.raises(PeerNotAdmitted, check=coded("handshake.certificate_expired")):
        verify_statement(signed(), [AUTHORITY], later)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(_type="https://in-toto.io/Statement/v0.1"),
        lambda s: s.update(predicateType="https://sealring.github.io/sealring/interval/v2"),
        lambda s: s.update(more=1),
        lambda s: s.pop("subject"),
        lambda s: s.update(subject=[]),
        lambda s: s.update(subject={}),
        lambda s: s["subject"][0].update(digest={}),
        lambda s: s["subject"][0].update(digest={"sha256": "AB" * 32}),
        lambda s: s["subject"][0].update(digest={"sha256": "ab" * 32, "md5": ""}),
        lambda s: s["subject"][0].update(name=1),
        lambda s: s["predicate"].pop("worker"),
        lambda s: s["predicate"]["interval"].update(more=1),
        lambda s: s["predicate"]["interval"].pop("links"),
        lambda s: s["predicate"]["interval"].update(first_step=1.0),
        lambda s: s["predicate"]["interval"].update(first_step=-1),
        lambda s: s["predicate"]["interval"].update(first_step=True),
        lambda s: s["predicate"]["interval"].update(first_step=1 << 62),
        lambda s: s["predicate"]["interval"].update(finished=0),
        lambda s: s["predicate"]["interval"].update(finished=1 << 62),
        lambda s: s["predicate"]["interval"].update(configuration="none"),
        lambda s: s["predicate"]["interval"]["links"][0]["sent"].update(sha256="0" * 63),
        lambda s: s["predicate"]["interval"]["links"][0].update(kind="other"),
        lambda s: s["predicate"]["interval"]["groups"][0].update(state="unknown"),
        lambda s: s["predicate"]["interval"].update(previous="00" * 32),
        lambda s: s["predicate"]["interval"].update(sequence=1),
        lambda s: s["predicate"]["interval"].update(final=1),
        lambda s: s["predicate"]["interval"].update(run=""),
        lambda s: s["predicate"]["interval"]["data"][0].update(end=0, first=1),
        lambda s: s["predicate"]["interval"]["data"][0]["share"].update(period=0),
        lambda s: s["predicate"]["interval"]["data"][0]["share"].update(length=5),
        lambda s: s["predicate"]["interval"]["code"].update(packages="x"),
        lambda s: s["predicate"]["interval"]["groups"][0].update(members=["0"]),
    ],
)
@pytest.mark.threat("L20")
def test_what_is_not_a_statement(change: Callable[[Any], None]) -> None:
    with pytest.raises(MalformedStatement):
        verify_statement(resigned(worker(), change), [AUTHORITY])


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"null", b"[]", b"{", b'{"a":1,"a":2}', b'{"a":NaN}', b"\xff",
        b"[" * 40000, b'{"a":' * 9000 + b"1" + b"}" * 9000,
    ],
)  # fmt: skip
@pytest.mark.threat("L20")
def test_payloads_that_are_no_json_to_use(payload: bytes) -> None:
    if payload:
        with pytest.raises(MalformedStatement):
            verify_statement(with_payload(worker(), payload), [AUTHORITY])
    with pytest.raises(MalformedStatement):
        verify_statement(payload, [AUTHORITY])


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e.update(payloadType="text/plain"),
        lambda e: e.update(signatures=[]),
        lambda e: e.update(signatures=e["signatures"] * 2),
        lambda e: e.update(more=1),
        lambda e: e.update(payload="!"),
        lambda e: e.update(payload=e["payload"].rstrip("=") + "\n"),
        lambda e: e["signatures"][0].update(certificate=None),
        lambda e: e["signatures"][0].update(more=1),
        lambda e: e["signatures"][0].update(certificate=base64.b64encode(b"no").decode()),
        lambda e: e["signatures"][0].update(
            certificate=base64.b64encode(
                base64.b64decode(e["signatures"][0]["certificate"]) + b"more"
            ).decode()
        ),
        lambda e: e["signatures"][0].update(sig=""),
    ],
)
@pytest.mark.threat("L20")
def test_what_is_not_an_envelope(change: Callable[[Any], None]) -> None:
    with pytest.raises(MalformedStatement):
        verify_statement(changed(signed(), change), [AUTHORITY])


def test_what_cannot_be_signed() -> None:
    many = [{"name": "x" * 50, "step": 1, "sha256": "00" * 32, "content": None}] * 300
    with pytest.raises(Unsupported, match="shorter interval"):
        signed(checkpoints_in=many)
    credentials = worker()
    key = KeptKey.of(generate_private_key(SECP256R1()))
    other = Credentials("job", 0, credentials.certificate, (AUTHORITY,), key)
    with pytest.raises(Unsupported, match="Ed25519"):
        signed(other)


@given(st.binary(max_size=100))
def test_any_bytes_are_refused_by_name(data: bytes) -> None:
    with pytest.raises(MalformedStatement):
        verify_statement(data, [AUTHORITY])


def test_from_a_worker_into_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: object) -> str:
        done = CliRunner().invoke(app, [*map(str, arguments)])
        if done.exception is not None:
            raise done.exception
        return done.stdout

    authority = create_authority(tmp_path / "ca", "test")
    name = WorkerName("job", 0)
    files = issue_from_directory(
        tmp_path / "ca", name, tmp_path, world=2, hours=1, request_file=None
    )
    monkeypatch.setenv("SEALRING_CERTIFICATE", str(files.certificate))
    monkeypatch.setenv("SEALRING_KEY", str(files.key))
    monkeypatch.setenv("SEALRING_AUTHORITY", str(authority))
    now = int(datetime.now(UTC).timestamp())
    envelope, log = tmp_path / "statement.json", tmp_path / "log"
    envelope.write_bytes(
        sign_statement(interval(started=now, finished=now), load_credentials(0, 2))
    )
    shown = run("audit", "verify", envelope, "--authority", authority)
    assert f"{SUBJECT.sha256}  weights" in shown
    read = json.loads(run("audit", "verify", envelope, "--authority", authority, "--json"))
    assert (read["job"], read["rank"]) == ("job", 0)
    vkey = run("audit", "init", log, "--log", "example.com/run").splitlines()[-1]
    run("audit", "append", log, envelope, "--authority", authority)
    run("audit", "proof", log, 0, "--policy", vkey, "-o", tmp_path / "proof")
    run("audit", "verify", envelope, "--proof", tmp_path / "proof", "--policy", vkey)
    # A name chosen by a worker cannot send commands to the terminal.
    odd = tmp_path / "odd.json"
    outputs = [Named("\x1b[2Jname", "00" * 32)]
    run("audit", "init", tmp_path / "owner")
    owner = read_owner_key(tmp_path / "owner")
    odd.write_bytes(sign_statement(replace(transformation(), outputs=outputs), owner))
    (tmp_path / "stage.json").write_text("{}")
    shown = run("audit", "verify", odd, "--owner", tmp_path / "owner.pub")
    assert "stage tokenise" in shown
    assert "\x1b" not in shown
    read = json.loads(run("audit", "verify", odd, "--owner", tmp_path / "owner.pub", "--json"))
    assert read["transformation"]["outputs"] == [asdict(outputs[0])]
    # Such a log refuses everything but workers' statements, even beside a valid one.
    with pytest.raises(MalformedStatement):
        run("audit", "append", log, envelope, tmp_path / "stage.json", "--authority", authority)
    assert json.loads(run("audit", "log", log, "--policy", vkey, "--json"))["size"] == 1
    certificate, _ = open_authority(tmp_path / "ca")
    assert verify_statement(envelope.read_bytes(), [certificate]).subjects == (SUBJECT,)
    assert json.loads(envelope.read_text())["signatures"][0]["keyid"] == key_id(
        x509.load_pem_x509_certificate(files.certificate.read_bytes()).public_key()  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("number", range(4))
def test_an_envelope_has_one_spelling(number: int) -> None:
    """Otherwise a copy written differently would make it look as if its signer signed twice."""
    envelope = signed()
    value = json.loads(envelope)
    (signature,) = value["signatures"]
    backwards = dict(reversed(signature.items()))
    spelled = [
        json.dumps(value).encode(),
        b" " + envelope,
        json.dumps(dict(reversed(value.items())), separators=(",", ":")).encode(),
        json.dumps({**value, "signatures": [backwards]}, separators=(",", ":")).encode(),
    ][number]
    assert json.loads(spelled) == value
    with pytest.raises(MalformedStatement, match="spelled"):
        verify_statement(spelled, [AUTHORITY])


@pytest.mark.parametrize("name", ["groups", "collectives", "links"])
@pytest.mark.threat("L20")
def test_two_accounts_of_one_thing_in_one_statement(name: str) -> None:
    """Readers would differ in which of the two they take."""
    with pytest.raises(ConfigurationError, match="is named twice"):
        interval(**{name: [*FIELDS[name], *FIELDS[name]]})


def test_counts_and_links_of_a_group_that_is_not_named() -> None:
    for name in ("collectives", "links"):
        with pytest.raises(ConfigurationError, match="of a group that is not named"):
            interval(**{name: [{**one, "epoch": "e2"} for one in FIELDS[name]]})
