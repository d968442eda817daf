"""SIMULATED evidence, for laptops and tests. It has the form of real evidence and proves nothing.

Its authority says SIMULATED in its name, and a policy must name that authority. The label of an
AttestedWorker made from it also says SIMULATED.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from sealring.attest.evidence.chains import verify_chain
from sealring.attest.evidence.encoding import from_hex
from sealring.attest.evidence.evidence import (
    REPORT_DATA_BYTES,
    Challenge,
    DeviceEvidence,
    Evidence,
)
from sealring.attest.evidence.rules import (
    ROOTS,
    MinimumTcb,
    TableForm,
    measurements,
    minimum_of,
    numbers,
)
from sealring.attest.evidence.trust import Trust
from sealring.attest.evidence.worker import Claims
from sealring.core.identity.certificates import CLOCK_SKEW, make_authority
from sealring.errors import ForgedEvidence, MalformedEvidence, UntrustedChain
from sealring.formats.strict import read_object

KIND: Final = "simulated"
NAME: Final = "SIMULATED sealring evidence"
_FIELDS: Final = {
    "simulated": str,
    "report_data": str,
    "measurement": str,
    "tcb": int,
    "debug": bool,
}


@dataclass(frozen=True, slots=True)
class Simulator:
    """Makes SIMULATED evidence. Anybody who has it can claim anything."""

    certificate: x509.Certificate
    key: Ed25519PrivateKey

    @classmethod
    def create(cls, now: datetime, lifetime: timedelta = timedelta(days=30)) -> Simulator:
        key = Ed25519PrivateKey.generate()
        serial = x509.random_serial_number()
        certificate = make_authority(key, NAME, serial, now - CLOCK_SKEW, now + lifetime)
        return cls(certificate, key)

    @property
    def fingerprint(self) -> str:
        return self.certificate.fingerprint(SHA256()).hex()

    def attest(
        self,
        challenge: Challenge,
        measurement: bytes,
        *,
        tcb: int = 1,
        debug: bool = False,
        devices: tuple[DeviceEvidence, ...] = (),
    ) -> Evidence:
        statement = json.dumps(
            {
                "simulated": "SIMULATED",
                "report_data": challenge.report_data(KIND, devices).hex(),
                "measurement": measurement.hex(),
                "tcb": tcb,
                "debug": debug,
            }
        ).encode()
        parts = {"statement": statement, "signature": self.key.sign(statement)}
        chain = (self.certificate.public_bytes(Encoding.DER),)
        return Evidence(KIND, challenge, parts, chain, devices)


def verify_simulated(evidence: Evidence, challenge: Challenge | None, trust: Trust) -> Claims:
    statement, signature = evidence.only("statement", "signature")
    chain = verify_chain(evidence.chain, trust.simulated, trust)
    names = chain.leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(evidence.chain) != 1 or [name.value for name in names] != [NAME]:
        raise UntrustedChain(f"the one certificate of simulated evidence is named {NAME!r}")
    key = chain.leaf.public_key()
    if not isinstance(key, Ed25519PublicKey):
        raise UntrustedChain("the key of simulated evidence is an Ed25519 key")
    try:
        key.verify(signature, statement)
    except InvalidSignature:
        raise ForgedEvidence("the SIMULATED statement is not signed by its authority") from None
    fields = _parse_statement(statement)
    refusal = MalformedEvidence("the SIMULATED statement holds no report data")
    bound = from_hex(fields["report_data"], REPORT_DATA_BYTES, refusal)
    evidence.check_bound(bound, challenge, "the SIMULATED statement")
    return Claims(
        product="SIMULATED",
        measurement=fields["measurement"],
        tcb={"simulated": fields["tcb"]},
        debug=fields["debug"],
        **chain.standing,
    )


def _parse_statement(statement: bytes) -> dict[str, Any]:
    refusal = MalformedEvidence("the SIMULATED statement does not have its fields")
    fields = read_object(statement, refusal)
    kinds = {name: type(value) for name, value in fields.items()}
    if kinds != _FIELDS or fields["simulated"] != "SIMULATED":
        raise refusal
    return fields


SIMULATED_FORM: Final = TableForm(
    rules=(
        ROOTS,
        measurements(),
        MinimumTcb("minimum_tcb", minimum_of("SIMULATED", numbers({"simulated"}, 255))),
    ),
    one_of=(("roots",), ("measurements",)),
)
