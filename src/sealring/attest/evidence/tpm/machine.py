"""This machine's TPM: its identity, and evidence from it.

machine.introduction()   ->  the EKs' chains and the AK, for the verifier to make credentials
machine.attest(...)      ->  evidence, with the credentials opened

A TPM has an EK for each kind of key. All EKs that have a certificate are shown, so that a verifier
recognizes the machine by any of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding

from sealring.attest.evidence.chains import chain_of, load_certificate
from sealring.attest.evidence.encoding import first_value, unknown_evidence
from sealring.attest.evidence.evidence import (
    QUALIFYING_BYTES,
    Challenge,
    DeviceEvidence,
    Evidence,
)
from sealring.attest.evidence.tpm.commands import EITHER_POLICY, Tpm
from sealring.attest.evidence.tpm.credential import joint_secret, subject
from sealring.attest.evidence.tpm.event_log import PCR_NAMES, matching_log, read_log
from sealring.attest.evidence.tpm.ima import matching_ima
from sealring.attest.evidence.tpm.structures import (
    BANKS,
    canonical_signature,
    digest_of_pcrs,
    parse_public,
    parse_quote,
)
from sealring.attest.evidence.tpm.verify import KIND, RESETTABLE, registers
from sealring.core.identity.loading import certificates_from_pem
from sealring.errors import (
    AttestationError,
    TpmFailed,
)

_LOG = logging.getLogger("sealring")
EVENT_LOG: Final = Path("/sys/kernel/security/tpm0/binary_bios_measurements")
QUOTED: Final = tuple(pcr for pcr in range(24) if pcr not in RESETTABLE)
_TRIES: Final = 8

# TCG EK Credential Profile. Templates L-1 (RSA 2048) and L-2 (P-256) have the policy that asks for
# the endorsement hierarchy's password; in H-3 (P-384) and H-6 (RSA 3072) it is one branch of the
# policy. `_EKS` lists where a certificate and a persistent key of each may be.
_POLICY: Final = bytes.fromhex("837197674484b3f81a90cc8d46a5d724fd52d76e06520b64f2a1da1b331469aa")
_AES_128_CFB: Final = bytes.fromhex("000600800043")
_EK_HEAD: Final = bytes.fromhex("000b000300b20020") + _POLICY + _AES_128_CFB
EK_RSA: Final = (
    b"\x00\x01" + _EK_HEAD + bytes.fromhex("0010080000000000") + b"\x01\x00" + bytes(256)
)
EK_P256: Final = (
    b"\x00\x23" + _EK_HEAD + bytes.fromhex("001000030010") + 2 * (b"\x00\x20" + bytes(32))
)
_EK_HIGH: Final = bytes.fromhex("000c000300f20030") + EITHER_POLICY + bytes.fromhex("000601000043")
EK_P384: Final = b"\x00\x23" + _EK_HIGH + bytes.fromhex("001000040010") + bytes(4)
EK_RSA_3072: Final = b"\x00\x01" + _EK_HIGH + bytes.fromhex("00100c0000000000") + bytes(2)
_EKS: Final = (
    (0x01C0000A, 0x8101000A, EK_P256),
    (0x01C00002, 0x81010001, EK_RSA),
    (0x01C00016, 0x81010016, EK_P384),
    (0x01C0001C, 0x8101001C, EK_RSA_3072),
)
_EK_KINDS: Final = {
    "secp256r1": EK_P256, "rsa2048": EK_RSA, "secp384r1": EK_P384, "rsa3072": EK_RSA_3072,
}  # fmt: skip
# A restricted ECDSA key on P-256. Its name uses SHA-256.
AK_TEMPLATE: Final = bytes.fromhex("0023000b00050472000000100018000b0003001000000000")


@dataclass(frozen=True, slots=True)
class Introduction:
    chain: tuple[bytes, ...]
    """The EK's certificate and its issuers, root last."""
    ak: bytes
    others: tuple[tuple[bytes, ...], ...] = ()
    """The chains of the TPM's other EKs, for those whose issuers' certificates are at hand."""


@dataclass(frozen=True, slots=True)
class Endorsement:
    """An EK: its certificate, and its handle or the template to make it again."""

    certificate: bytes
    handle: int | None
    template: bytes


class TpmMachine:
    def __init__(
        self,
        tpm: Tpm,
        issuers: Sequence[bytes],
        certificate: bytes | None = None,
        logs: Logs | None = None,
    ) -> None:
        """`issuers` are the TPM maker's certificates (DER), root last: TPMs seldom hold them.

        If `certificate` is not given, the EK's certificate is read from the TPM.
        """
        self._tpm, self._logs = tpm, logs or Logs()
        found = list(self._endorsements(certificate))
        if not found:
            raise TpmFailed(
                "the TPM holds no certificate for an endorsement key of its own: have one issued"
            )
        self._first, *others = found
        chain, missing = chain_of(self._first.certificate, issuers)
        self._chain = (self._first.certificate, *issuers) if missing else chain
        chains = [(one, chain_of(one.certificate, issuers)) for one in others]
        self._others = [(one, chain) for one, (chain, missing) in chains if not missing]

    def introduction(self) -> Introduction:
        with self._tpm.primary(AK_TEMPLATE) as (_, ak):
            return Introduction(self._chain, ak, tuple(chain for _, chain in self._others))

    def attest(
        self,
        nonce: bytes,
        public_key: bytes,
        blob: bytes,
        devices: tuple[DeviceEvidence, ...] = (),
        others: Sequence[bytes | None] = (),
    ) -> Evidence:
        """Makes evidence. `blob` is the verifier's credential for the introduction.

        `others` are the credentials for the other EKs. None for one that the verifier refused.
        """
        with self._tpm.primary(AK_TEMPLATE) as (ak_handle, ak):
            secrets, shown = [self._opened(self._first, ak_handle, blob)], []
            for (one, _), sealed in zip(self._others, others, strict=False):
                if sealed is None:
                    continue
                try:
                    secrets.append(self._opened(one, ak_handle, sealed))
                    shown.append(one.certificate)
                except TpmFailed as problem:
                    _LOG.warning("sealring: another endorsement key is not shown: %s", problem)
            credential = subject(self._chain[0], ak, shown) + joint_secret(secrets)
            challenge = Challenge(nonce, public_key, credential)
            bound = challenge.report_data(KIND, devices)
            parts = {"ak": ak} | quoted_parts(self._tpm, ak_handle, ak, bound, self._logs)
        if shown:
            parts["endorsements"] = b"".join(shown)
        return Evidence(KIND, challenge, parts, self._chain, devices)

    def _opened(self, one: Endorsement, ak_handle: int, sealed: bytes) -> bytes:
        with self._ek(one) as (ek_handle, _):
            return self._tpm.activate(ak_handle, ek_handle, sealed)

    def _ek(self, one: Endorsement) -> AbstractContextManager[tuple[int, bytes]]:
        if one.handle is not None:
            return nullcontext((one.handle, b""))
        return self._tpm.primary(one.template)

    def _endorsements(self, given: bytes | None) -> Iterator[Endorsement]:
        """The EKs that have a certificate. If `given`, only the EK of that certificate."""
        for index, handle, template in _EKS:
            found = given or self._tpm.read_nv(index)
            if found is None:
                continue
            der = first_der(found)
            try:
                key = load_certificate(der).public_key()
            except AttestationError as problem:
                _LOG.warning("sealring: an endorsement key's certificate is not used: %s", problem)
                continue
            if _EK_KINDS.get(_kind_of(key)) is not template:
                continue
            public = self._tpm.read_public(handle)
            if public is not None and _key_bytes(key) in public:
                yield Endorsement(der, handle, template)
                continue
            with self._tpm.primary(template) as (_, made):
                own = _key_bytes(key) in made
            if own:
                yield Endorsement(der, None, template)


def quoted_parts(tpm: Tpm, handle: int, ak: bytes, bound: bytes, logs: Logs) -> dict[str, bytes]:
    """The parts of evidence that come from a quote with this attestation key, and from the logs."""
    bank = tpm.bank()
    for _ in range(_TRIES):
        quote, signature = tpm.quote(handle, bound[:QUALIFYING_BYTES], QUOTED, bank)
        values = tpm.read_pcrs(QUOTED, bank)
        # The kernel may extend a PCR between the quote and the reading.
        if digest_of_pcrs(signature, values) == parse_quote(quote).digest:
            signature = canonical_signature(signature, parse_public(ak).key)
            parts = {"quote": quote, "signature": signature, "pcrs": values}
            return parts | logs.matching(values)
    raise TpmFailed("the PCRs change faster than they can be quoted")


@dataclass(frozen=True, slots=True)
class Logs:
    """The paths of the logs that explain the PCRs."""

    events: Path = EVENT_LOG
    files: Path | None = None
    """The kernel's list of measured files (IMA), if the policy asks for it."""

    def matching(self, values: bytes) -> dict[str, bytes]:
        """The parts of evidence that explain how the quoted PCRs came to their values."""
        size = len(values) // len(QUOTED)
        (bank,) = [bank for bank, bytes_each in BANKS.items() if bytes_each == size]
        quoted = {pcr: values[size * n :][:size] for n, pcr in enumerate(QUOTED)}
        log = matching_log(read_log(self.events), registers(quoted), bank, PCR_NAMES)
        found = {"event_log": log}
        if self.files is not None:
            found["ima_log"] = matching_ima(quoted, bank, self.files)
        return {name: log for name, log in found.items() if log}


def read_issuers(pem: bytes) -> tuple[bytes, ...]:
    """A chain's certificates, as DER, from the PEM text that the maker publishes."""
    found = certificates_from_pem(pem, ValueError("no certificates in PEM"))
    return tuple(one.public_bytes(Encoding.DER) for one in found)


def _kind_of(key: object) -> str:
    if isinstance(key, rsa.RSAPublicKey):
        return f"rsa{key.key_size}"
    return key.curve.name if isinstance(key, ec.EllipticCurvePublicKey) else ""


def _key_bytes(key: object) -> bytes:
    """The part of a public key that appears unchanged in a TPMT_PUBLIC."""
    if isinstance(key, rsa.RSAPublicKey):
        return key.public_numbers().n.to_bytes(key.key_size // 8, "big")
    if isinstance(key, ec.EllipticCurvePublicKey):
        return key.public_numbers().x.to_bytes(key.key_size // 8, "big")
    raise unknown_evidence("the endorsement key is neither RSA nor on a curve")


def first_der(data: bytes) -> bytes:
    """The certificate in an index. Some makers fill the index up after it."""
    try:
        return first_value(data)
    except ValueError:
        return data


# Google keeps an AK's certificate and template here, first for P-256, then for RSA.
AKS: Final = ((0x01C10002, 0x01C10003), (0x01C10000, 0x01C10001))


class CertifiedTpmMachine:
    kind: Final = KIND

    def __init__(self, tpm: Tpm, issuers: Sequence[bytes], logs: Logs | None = None) -> None:
        """`issuers` are those of the AK's certificate (DER), root last."""
        self._tpm, self._logs = tpm, logs or Logs()
        certificate, self._template = self._find()
        self._chain = (certificate, *issuers)

    def attest(
        self, nonce: bytes, public_key: bytes, devices: tuple[DeviceEvidence, ...] = ()
    ) -> Evidence:
        challenge = Challenge(nonce, public_key)
        bound = challenge.report_data(KIND, devices)
        with self._tpm.primary(self._template) as (handle, ak):
            parts = {"ak": ak} | quoted_parts(self._tpm, handle, ak, bound, self._logs)
        return Evidence(KIND, challenge, parts, self._chain, devices)

    def _find(self) -> tuple[bytes, bytes]:
        for certificate_index, template_index in AKS:
            found = self._tpm.read_nv(certificate_index)
            template = self._tpm.read_nv(template_index)
            if found is None or template is None:
                continue
            certificate = first_der(found)
            with self._tpm.primary(template) as (_, ak):
                if parse_public(ak).key == load_certificate(certificate).public_key():
                    return certificate, template
        raise TpmFailed("the TPM holds no certificate for an attestation key of its own")
