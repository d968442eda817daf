"""Stock KBS clients: one written from the protocol's text is attested and given a data key."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from sealring.attest.broker import audit
from sealring.attest.evidence import Trust
from sealring.attest.evidence.guest import AK
from sealring.attest.evidence.tpm.commands import OWNER, PASSWORD, Tpm
from tests.attest.broker import guest_evidence
from tests.attest.broker.guest_evidence import AMD, CASES, GPU, SNP, snp
from tests.attest.broker.kbs_client import KbsClient, KbsRefusal
from tests.attest.broker.local import Place, Running, running
from tests.attest.broker.test_every_kind import at
from tests.attest.evidence import swtpm
from tests.attest.evidence.test_making import RSA_AK
from tests.attest.minting.tpm import AzureGuest

PATH = "gpt/key/dataset"
CONTENT = b"the key of a vault"
GUESTS = f'[[resources]]\npath = "{PATH}"\nguests = true\n'


def kbs(directory: Path, trust: Trust, policy: str, resources: str = GUESTS) -> Place:
    place = at(directory, (None, trust, policy + resources))
    put(place, PATH, CONTENT)
    return place


def put(place: Place, path: str, content: bytes) -> None:
    file = place.data_keys / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    file.chmod(0o600)


def client(broker: Running, tee: str = "snp", prove: Any = snp, **more: Any) -> KbsClient:
    return KbsClient(broker.port, broker.place.authority, tee, prove, **more)


def entries(broker: Running) -> list[dict[str, Any]]:
    public = broker.place.keys.audit_key.verifier
    return broker.store.submit(lambda view: audit.check(view, public)).result().entries


@pytest.mark.parametrize("name", CASES)
def test_each_kind_is_attested_and_given_its_key(name: str, tmp_path: Path) -> None:
    tee, prove, trust, policy = CASES[name]
    with running(kbs(tmp_path, trust, policy)) as broker:
        guest = client(broker, tee, prove)
        # Like guest-components' client: ask, be refused, attest, ask again.
        with pytest.raises(KbsRefusal) as refusal:
            guest.fetch(PATH)
        assert (refusal.value.status, refusal.value.type) == (401, "TokenNotFound")
        guest.handshake()
        assert guest.fetch(PATH) == CONTENT
        assert guest.fetch(PATH, token=True) == CONTENT
        log = entries(broker)
    assert [entry["event"] for entry in log] == ["attested", "gave", "gave"]
    assert {entry["guest"] for entry in log} == {log[0]["guest"]}
    assert {entry["what"] for entry in log[1:]} == {PATH}


@pytest.mark.parametrize(
    "key",
    [
        ec.generate_private_key(ec.SECP256R1()),
        ec.generate_private_key(ec.SECP384R1()),
        ec.generate_private_key(ec.SECP521R1()),
        rsa.generate_private_key(65537, 2048),
    ],
    ids=["P-256", "P-384", "P-521", "RSA"],
)
def test_each_type_of_key_opens_what_is_sealed_to_it(key: Any, tmp_path: Path) -> None:
    with running(kbs(tmp_path, AMD.trust(), SNP)) as broker:
        guest = client(broker, key=key)
        guest.handshake()
        assert guest.fetch(PATH) == CONTENT


@swtpm.needs_swtpm
def test_an_azure_guest_whose_virtual_tpm_is_real(tmp_path: Path) -> None:
    with swtpm.running() as address, Tpm.open(address) as tpm:
        with tpm.primary(RSA_AK) as (handle, public):
            tpm.call("EvictControl", 0x120, (OWNER, handle), (PASSWORD,), AK.to_bytes(4, "big"))
        guest = AzureGuest(AMD, modulus=int.from_bytes(public[-256:], "big"))
        swtpm.extend(tpm, 4, b"\x04" * 32)
        policy = guest_evidence.AZ_SNP.replace(guest_evidence.PCR4, tpm.read_pcrs([4]).hex())
        trust = replace(AMD.trust(), issuers=guest_evidence.ISSUERS)
        with running(kbs(tmp_path, trust, policy)) as broker:
            prove = guest_evidence.azure(guest, guest_evidence.by_tpm(tpm, AK))
            one = client(broker, "az-snp-vtpm", prove)
            one.handshake()
            assert one.fetch(PATH) == CONTENT
            swtpm.extend(tpm, 4, b"\x05" * 32)
            refused = (403, "PolicyDeny", "policy.measurement_not_allowed")
            assert one.refused(one.handshake) == refused


def test_gpus_come_as_additional_evidence_and_are_judged(tmp_path: Path) -> None:
    trust = replace(AMD.trust(), nvidia=GPU.trust().nvidia, references=GPU.references())
    with running(kbs(tmp_path, trust, f"{SNP}\n[nvidia]\ngpus = 1\n")) as broker:
        guest = client(broker, additional=guest_evidence.gpus)
        guest.handshake()
        assert guest.fetch(PATH) == CONTENT
        without = client(broker)
        assert without.refused(without.handshake) == (
            403,
            "PolicyDeny",
            "policy.device_not_allowed",
        )
        # The machine vouches for exactly these devices: others, or none, are not bound.
        body = guest.attestation(guest.auth())
        body["tee-evidence"]["additional_evidence"] = ""
        unbound = (401, "AttestationError", "evidence.not_bound")
        assert guest.refused(lambda: guest.attest(body)) == unbound
        recorded = guest_evidence.gpus(bytes(48))
        replayed = client(broker, additional=lambda digest: recorded)
        assert replayed.refused(replayed.handshake) == unbound
        other = client(broker, additional=lambda digest: '{"hygondcu": {}}')
        assert other.refused(other.handshake) == (
            401,
            "AttestationError",
            "evidence.unknown_evidence",
        )


@pytest.mark.threat("B14")
def test_only_what_the_policy_grants_to_guests_is_given(tmp_path: Path) -> None:
    workers_only = '[[resources]]\npath = "gpt/key/workers"\n'
    missing = '[[resources]]\npath = "gpt/key/missing"\nguests = true\n'
    with running(kbs(tmp_path, AMD.trust(), SNP, GUESTS + workers_only + missing)) as broker:
        put(broker.place, "gpt/key/workers", b"not for guests")
        guest = client(broker)
        guest.handshake()
        denied, absent = (
            (403, "PolicyDeny", "broker.resource_not_granted"),
            (404, "InvalidRequestPath"),
        )
        for path in ("gpt/key/workers", "sealring/certificate/worker", "a/b/c"):
            assert guest.refused(lambda path=path: guest.fetch(path)) == denied
        assert guest.refused(lambda: guest.fetch("gpt/key/missing"))[:2] == absent
        events = [(entry["event"], entry.get("what")) for entry in entries(broker)]
    assert events == [
        ("attested", None), ("refused", "gpt/key/workers"),
        ("refused", "sealring/certificate/worker"), ("refused", "a/b/c"),
        ("refused", "gpt/key/missing"),
    ]  # fmt: skip


@pytest.mark.threat("B14")
def test_a_policy_that_grants_nothing_to_guests_attests_none(tmp_path: Path) -> None:
    with running(kbs(tmp_path, AMD.trust(), SNP, f'[[resources]]\npath = "{PATH}"\n')) as broker:
        guest = client(broker)
        assert guest.refused(guest.handshake) == (403, "PolicyDeny", "broker.resource_not_granted")
        assert entries(broker) == []


def test_requests_that_the_protocol_refuses_at_the_first_step(tmp_path: Path) -> None:
    with running(kbs(tmp_path, AMD.trust(), SNP)) as broker:
        guest = client(broker)
        serde = (401, "SerdeError", "broker.malformed_request")
        for changes in (
            {"version": "0.1.1"},
            {"version": "0.5.0"},
            {"version": 4},
            {"tee": 7},
            {"tee": "snp\r\nset-cookie: x"},
            {"extra-params": {"supported-hash-algorithms": ["Sha256"]}},
            {"extra-params": {"supported-hash-algorithms": "Sha384"}},
            {"extra-params": {"unknown": 1}},
        ):
            assert guest.refused(lambda changes=changes: guest.auth(**changes)) == serde
        for extra in ("", {}, None):  # type: ignore[var-annotated]
            assert guest.auth(**{"extra-params": extra})
        assert guest.refused(lambda: guest.ask("GET", "/kbs/v0/auth").good()) == serde
        gone = (404, "InvalidRequestPath", "broker.no_such_resource")
        assert guest.refused(lambda: guest.ask("GET", "/kbs/v0/pkcs11/x").good()) == gone


def test_stock_evidence_that_no_maker_of_hardware_vouches_for(tmp_path: Path) -> None:
    with running(kbs(tmp_path, AMD.trust(), SNP)) as broker:
        for tee in ("sample", "tpm", "cca", "tdx"):
            guest = client(broker, tee, lambda digest: {"svn": "1", "report_data": ""})
            denied = (403, "PolicyDeny", "broker.resource_not_granted")
            assert guest.refused(guest.handshake) == denied
    maker = '[tpm]\nroots = ["' + "00" * 32 + '"]\nunchecked = ["pcr0", "pcr4", "pcr7", "ima"]\n'
    maker += 'pcrs = {1 = ["' + "00" * 32 + '"]}\n'
    with running(kbs(tmp_path / "tpm", AMD.trust(), SNP + maker)) as broker:
        guest = client(broker, "tpm", lambda digest: {"tpm_quote": {}, "ak_public": ""})
        assert guest.refused(guest.handshake) == (
            401,
            "AttestationError",
            "evidence.unknown_evidence",
        )


def test_evidence_that_is_refused(tmp_path: Path) -> None:
    with running(kbs(tmp_path, AMD.trust(), SNP)) as broker:
        for error, status, kind, prove in (
            ("policy.debug_guest", 403, "PolicyDeny", lambda d: snp(d, policy=0x30000 | 1 << 19)),
            (
                "policy.measurement_not_allowed",
                403,
                "PolicyDeny",
                lambda d: snp(d, measurement=bytes(48)),
            ),
            ("evidence.not_bound", 401, "AttestationError", lambda d: snp(bytes(48))),
            ("evidence.not_bound", 401, "AttestationError", lambda d: snp(d[:32])),
            ("evidence.untrusted_chain", 401, "AttestationError", lambda d: snp(d, chain=1)),
            ("evidence.untrusted_chain", 401, "AttestationError", lambda d: snp(d, amd=OTHER)),
            ("evidence.malformed_evidence", 401, "AttestationError", lambda d: {}),
            ("evidence.malformed_evidence", 401, "AttestationError", lambda d: {"quote": ""}),
        ):
            guest = client(broker, prove=prove)
            assert guest.refused(guest.handshake) == (status, kind, error)
            assert guest.refused(lambda guest=guest: guest.fetch(PATH))[0] == 401
        assert entries(broker) == []


OTHER = type(AMD)()


def test_sealrings_own_workers_are_served_by_the_same_broker(place: Place) -> None:
    with running(place) as broker:
        broker.join(0)
        guest = client(broker)
        assert guest.refused(guest.handshake)[0] == 403


def test_the_body_of_an_error_is_the_protocols(tmp_path: Path) -> None:
    with running(kbs(tmp_path, AMD.trust(), SNP)) as broker:
        answer = client(broker).ask("GET", f"/kbs/v0/resource/{PATH}")
    value = json.loads(answer.body)
    assert value == {
        "type": "https://github.com/confidential-containers/kbs/errors/TokenNotFound",
        "detail": "there is no token and no session: attest first",
        "error": "broker.unknown_token",
    }
