"""Targets for every parser of bytes that an adversary may write, and what must always hold.

A target takes bytes. It raises AssertionError, or any other unexpected error, if a parser raises
anything but its documented error, or if the result does not encode to the same again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from sealring import _native
from sealring.attest.broker.envelopes import seal
from sealring.attest.broker.messages import error_of as broker_error_of
from sealring.attest.broker.messages import (
    parse_attestation,
    parse_auth,
    parse_json,
    read_guest_attestation,
)
from sealring.attest.broker.tokens import credential_for
from sealring.attest.evidence import Policy, Trust, judge, nvidia, parse_evidence, parse_policy
from sealring.attest.evidence.agent_evidence import devices_of, evidence_of
from sealring.attest.evidence.az_vtpm import parse_hcl_report
from sealring.attest.evidence.chains import load_certificate
from sealring.attest.evidence.encoding import signed_part, with_sets_in_order
from sealring.attest.evidence.evidence import DeviceEvidence
from sealring.attest.evidence.intel import verify_quote
from sealring.attest.evidence.nvidia_reference import verify_reference
from sealring.attest.evidence.snp import parse_report
from sealring.attest.evidence.tpm.event_log import (
    RTMR_NAMES,
    check_log,
    matching_log,
    parse_event_log,
    replay,
)
from sealring.attest.evidence.tpm.ima import read_entries, replay_ima
from sealring.attest.evidence.tpm.structures import (
    BANKS,
    SHA384,
    check_signature,
    name_of,
    parse_public,
    parse_quote,
)
from sealring.attest.evidence.trust import parse_collateral
from sealring.attest.evidence.worker import parse_claims
from sealring.core.engine.failures import ERROR_BY_CODE, Names, error_from
from sealring.core.handshake.messages import encode_message, parse_hello, parse_message
from sealring.core.handshake.refusals import error_of
from sealring.core.links.memory import offer_of, parse_offer
from sealring.core.links.rendezvous import encode_addresses, parse_addresses
from sealring.core.store.values import Kind as StoredKind
from sealring.core.store.values import StoreKeys, parse_parts
from sealring.errors import (
    AttestationError,
    AttestationUnavailable,
    BadPolicy,
    BrokerError,
    ConfigurationError,
    ForgedEvidence,
    GroupError,
    MalformedEvidence,
    MalformedRequest,
    MalformedSetup,
    PeerIncompatible,
    SealringError,
    StoreError,
)
from sealring.formats.http import Response as BrokerResponse
from sealring.limits import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    PROTOCOL_VERSION,
    RECORD_VERSION,
    TAG_BYTES,
)
from tests.attest.minting import NOW
from tests.attest.minting.amd import Amd
from tests.attest.minting.intel import Intel
from tests.attest.minting.tpm import Maker
from tests.core.engine.attacker import Kind, header
from tests.fuzz.log_targets import LOG_TARGETS
from tests.fuzz.vault_targets import safetensors, vault_header

ALERT_FIXED: Final = struct.Struct("<BiiQ")
ALERT_TEXT_BYTES: Final = 512


def record_header(data: bytes) -> None:
    """The native parser reads 64 bytes or gives None; this restates layout and limits."""
    fields = _native.parse_header(data)
    good = (
        len(data) >= HEADER_BYTES
        and data[:3] == b"SR" + bytes([RECORD_VERSION])
        and data[3] in list(Kind)
        and int.from_bytes(data[4:8], "little") <= MAX_PAYLOAD_BYTES
        and data[19] < 0x80
    )
    assert (fields is not None) == good
    if fields is not None:
        assert header(**fields) == data[:HEADER_BYTES]


def alert(data: bytes) -> None:
    """The native parser makes a failure of any payload, with only plain characters in its text."""
    sender, receiver, ranks = 3, 0, 4
    failure = _native.parse_alert(data, sender, receiver, ranks)
    code, text = failure.code, failure.text
    about, seen_by, collective = failure.peer, failure.reported_by, failure.collective
    assert code in ERROR_BY_CODE
    assert len(text) <= ALERT_TEXT_BYTES
    assert text.isascii()
    assert text.isprintable()
    if len(data) < ALERT_FIXED.size or data[0] not in ERROR_BY_CODE:
        assert (ERROR_BY_CODE[code].__name__, about, seen_by) == ("PeerLost", sender, sender)
    else:
        told = ALERT_FIXED.unpack_from(data)
        witness = told[2] if 0 < told[2] < ranks else sender  # not the receiver
        assert (code, about, seen_by, collective) == (*told[:2], witness, told[3])
        again = ALERT_FIXED.pack(code, about, seen_by, collective) + text.encode()
        assert _native.parse_alert(again, sender, receiver, ranks) == failure
    assert isinstance(error_from(failure, Names(0, (0, 1, 2, 5), {3: "host"})), GroupError)


def hello(data: bytes) -> None:
    try:
        read = parse_hello(data)
    except (MalformedSetup, PeerIncompatible):
        return
    written = {"type": "hello", "version": PROTOCOL_VERSION, **dataclasses.asdict(read)}
    assert parse_hello(encode_message(written)) == read


def refusal(data: bytes) -> None:
    try:
        message = parse_message(data)
        error = error_of(message, "rank 1", 1)
    except MalformedSetup:
        return
    assert isinstance(error, SealringError)
    assert str(error).isprintable()
    assert parse_message(encode_message(message)) == message


def offer(data: bytes) -> None:
    try:
        read = parse_offer(parse_message(data)["shm"])
    except (MalformedSetup, KeyError):
        return
    assert parse_offer(offer_of(read)) == read


def addresses(data: bytes) -> None:
    try:
        read = parse_addresses(data)
    except MalformedSetup:
        return
    assert read
    assert parse_addresses(encode_addresses(read).encode()) == read


def stored(data: bytes) -> None:
    """A sealed store's value may parse, but opens only if it was sealed under the key."""
    try:
        parts = parse_parts(data)
    except StoreError:
        return
    assert b"".join(part.header + part.sealed for part in parts) == data
    assert all(part.kind is StoredKind.APPENDED for part in parts[1:])
    for part in parts:
        assert len(part.sealed) == int.from_bytes(part.header[4:8], "big") + TAG_BYTES
        try:
            _STORE_KEYS.open(part, _STORE_KEYS.value_name("key"))
        except StoreError:
            continue
        raise AssertionError("a forged part was opened")


_STORE_KEYS: Final = StoreKeys.derive(
    _native.Secret(bytes(range(32))), ["nothing was ever sealed under this"]
)


def evidence(data: bytes) -> None:
    try:
        read = parse_evidence(data)
    except MalformedEvidence:
        return
    assert parse_evidence(read.encode()) == read


def snp_report(data: bytes) -> None:
    try:
        read = parse_report(data)
    except MalformedEvidence:
        return
    scalars = read.r.to_bytes(72, "little") + read.s.to_bytes(72, "little")
    assert read.signed + scalars + bytes(368) == data


def policy(data: bytes) -> None:
    try:
        read = parse_policy(data.decode("utf-8", "replace"))
    except BadPolicy:
        return
    assert read.kinds
    for rules in read.kinds.values():
        measured = ("measurements", "signers", "pcrs", "events")
        assert any(rules.get(name) for name in measured)


def tpm_quote(data: bytes) -> None:
    try:
        read = parse_quote(data)
    except MalformedEvidence:
        return
    assert data.endswith(len(read.digest).to_bytes(2, "big") + read.digest)
    assert sorted(set(read.pcrs)) == list(read.pcrs)


def tpm_key(data: bytes) -> None:
    try:
        read = parse_public(data)
    except MalformedEvidence:
        return
    assert read.name == name_of(data)


def tpm_signature(data: bytes) -> None:
    """No bytes are accepted as a signature of a text that was never signed."""
    try:
        check_signature(_MAKER.ak_key.public_key(), data, b"this was never signed")
    except (MalformedEvidence, ForgedEvidence):
        return
    raise AssertionError("a forged signature was accepted")


def event_log(data: bytes) -> None:
    nothing = dict.fromkeys(RTMR_NAMES.values(), "00" * 48)
    with suppress(MalformedEvidence, ForgedEvidence):
        check_log(data, nothing, SHA384, RTMR_NAMES)
    assert matching_log(data, nothing, SHA384, RTMR_NAMES) == b""
    for bank, size in BANKS.items():
        try:
            events = parse_event_log(data, bank)
        except MalformedEvidence:
            continue
        assert data.endswith(b"".join(data[one.start : one.end] for one in events))
        assert all(len(value) == size for value in replay(events, bank).values())


def ima_list(data: bytes) -> None:
    """A list that can be read gives one value of the PCR, and no other number of entries fits."""
    value, ends = bytes(32), []
    with suppress(MalformedEvidence):
        for entry in read_entries(data):
            hashed = b"\xff" * 32 if entry.violation else hashlib.sha256(entry.data).digest()
            value = hashlib.sha256(value + hashed).digest()
            ends.append(entry.end)
    assert ends == sorted(set(ends))
    if ends:
        found = replay_ima(data, {10: value})
        assert (found.entries, found.end) == (len(ends), ends[-1])
        assert found.violations + sum(map(len, found.files.values())) <= len(ends)
    with pytest.raises(AttestationError):
        replay_ima(data, {10: bytes(32)})


def certificate(data: bytes) -> None:
    """Certificates may have sets in another order than DER's, as some makers write them."""
    with suppress(ValueError):
        ordered = with_sets_in_order(data)
        assert len(ordered) == len(data)
        assert with_sets_in_order(ordered) == ordered
    try:
        read = load_certificate(data)
    except MalformedEvidence:
        return
    if read.public_bytes(Encoding.DER) != data:
        assert read.public_bytes(Encoding.DER) == with_sets_in_order(data)
        assert signed_part(data) in data


def hcl_report(data: bytes) -> None:
    try:
        read = parse_hcl_report(data)
    except MalformedEvidence:
        return
    assert data[32 : 32 + 1184] == read.report
    assert data[32 + 1184 + 20 :].startswith(read.text)


def intel_quote(data: bytes) -> None:
    """No input is a quote that this Intel signed."""
    try:
        verify_quote(data, "tdx", _INTEL_TRUST)
    except AttestationError:
        return
    raise AssertionError("a forged quote was accepted")


def intel_collateral(data: bytes) -> None:
    try:
        read = parse_collateral(data.decode("utf-8", "replace"))
    except ConfigurationError:
        return
    assert read.tee in ("tdx", "sgx")


def nvidia_report(data: bytes) -> None:
    try:
        read = nvidia.parse_report(data)
    except MalformedEvidence:
        return
    assert read.signed + read.signature == data
    assert read.vbios.isprintable()
    assert all(read.text(field).isprintable() for field in read.opaque)


def nvidia_reference(data: bytes) -> None:
    """Under any root, only what the signer signed is read."""
    try:
        read = verify_reference(data, Trust(NOW), _ANY_ROOT)
    except AttestationError:
        return
    assert (read.version, read.model) == ("590.12", "GH100")
    assert read.measurements == {n: frozenset({bytes([n]) * 48}) for n in (1, 3)}


class _Everything(frozenset[str]):
    def __contains__(self, root: object) -> bool:
        return True


_ANY_ROOT: Final = _Everything()
_MAKER: Final = Maker()
_AMD_ISSUERS: Final = Amd().chain[1:]
_INTEL_TRUST: Final = Intel().trust()


def broker_request(data: bytes) -> None:
    """A stranger may send such bytes to a broker before the broker knows anything of it."""
    try:
        introduction = parse_auth(data).introduction
    except MalformedRequest:
        pass
    else:
        with suppress(MalformedRequest, AttestationError):
            credential_for(introduction, bytes(32), bytes(32), _MAKER.trust())
    try:
        sent = parse_attestation(data)
    except MalformedRequest:
        return
    # Only a holder of the key gets here, so a worker wrote these fields.
    assert sent.name.rank < sent.world


def kbs_request(data: bytes) -> None:
    """A stock KBS client may send a request with evidence of any kind."""
    try:
        sent = read_guest_attestation(parse_json(data))
    except MalformedRequest:
        return
    # The broker can seal to what passes, and the evidence must be bound to one digest.
    assert set(seal(b"content", sent.jwk)) >= {"protected", "ciphertext"}
    assert len(sent.challenge.report_data("snp")) == 64
    devices: tuple[DeviceEvidence, ...] = ()
    with suppress(AttestationError):
        devices = devices_of(sent.additional)
    for kind in ("snp", "tdx", "sgx", "az-snp-vtpm", "az-tdx-vtpm", "tpm"):
        with suppress(AttestationError, AttestationUnavailable):
            made = evidence_of(kind, sent.primary, sent.challenge, devices, _AMD_ISSUERS)
            assert parse_evidence(made.encode()).parts == made.parts


def broker_answer(data: bytes) -> None:
    """A false broker may choose one of sealring's errors, but can do nothing more."""
    error = broker_error_of(BrokerResponse(400, data), "here")
    assert isinstance(error, BrokerError | AttestationError)
    assert str(error).isprintable()


def attestation_claims(data: bytes) -> None:
    """Claims in a certificate about its holder."""
    try:
        claimed = parse_claims(data)
    except ValueError:
        return
    judge(Policy({}), claimed, 0, "job")
    assert claimed.simulated == (claimed.label == "SIMULATED") or "SIMULATED" in claimed.kind


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    "header": record_header,
    "alert": alert,
    "hello": hello,
    "refusal": refusal,
    "offer": offer,
    "addresses": addresses,
    "stored": stored,
    "evidence": evidence,
    "snp_report": snp_report,
    "policy": policy,
    "vault_header": vault_header,
    "safetensors": safetensors,
    "tpm_quote": tpm_quote,
    "tpm_key": tpm_key,
    "tpm_signature": tpm_signature,
    "event_log": event_log,
    "ima_list": ima_list,
    "certificate": certificate,
    "hcl_report": hcl_report,
    "intel_quote": intel_quote,
    "intel_collateral": intel_collateral,
    "nvidia_report": nvidia_report,
    "nvidia_reference": nvidia_reference,
    "broker_request": broker_request,
    "kbs_request": kbs_request,
    "broker_answer": broker_answer,
    "attestation_claims": attestation_claims,
    **LOG_TARGETS,
}
