"""What a stock KBS client sends to be attested (KBS protocol 0.4, "Attestation").

{"init-data": {"format", "body"}, optional, and not read: its digest is in a register of the guest,
 "runtime-data": {"nonce", "tee-pubkey"},
 "tee-evidence": {"primary_evidence": {...}, "additional_evidence": "JSON, by kind of device"}}

Which kind of evidence it is was said when the nonce was asked for, and is part of the session.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any, Final

from sealring.attest.broker.envelopes import check_guest_jwk
from sealring.attest.broker.messages import exactly, read_base64
from sealring.attest.evidence.guest_challenge import GuestChallenge, guest_challenge
from sealring.errors import MalformedRequest

_OLD_SPELLINGS: Final = {"azsnpvtpm": "az-snp-vtpm", "aztdxvtpm": "az-tdx-vtpm"}
"""Of older clients."""


@dataclass(frozen=True, slots=True)
class GuestAttestation:
    challenge: GuestChallenge
    """What the evidence must be bound to, if the nonce is ours."""
    jwk: dict[str, str]
    primary: dict[str, Any]
    additional: str


def read_guest_attestation(fields: dict[str, Any]) -> GuestAttestation:
    if "init-data" in fields:
        fields = dict(fields)
        init = fields.pop("init-data")
        if init is not None:
            values = exactly(init, "format", "body").values()
            if not all(isinstance(one, str) for one in values):
                raise MalformedRequest("init-data has a format and a body, both texts")
    exactly(fields, "runtime-data", "tee-evidence")
    runtime = exactly(fields["runtime-data"], "nonce", "tee-pubkey")
    shown = exactly(fields["tee-evidence"], "primary_evidence", "additional_evidence")
    primary, additional = shown["primary_evidence"], shown["additional_evidence"]
    if not isinstance(primary, dict) or not isinstance(additional, str):
        raise MalformedRequest("primary_evidence is an object, and additional_evidence a text")
    jwk = check_guest_jwk(runtime["tee-pubkey"])
    nonce = read_base64(runtime["nonce"])
    if base64.b64encode(nonce).decode() != runtime["nonce"]:
        raise MalformedRequest("the nonce is not written as it was given out")
    try:
        challenge = guest_challenge(nonce, runtime["nonce"], jwk, additional)
    except ValueError:
        raise MalformedRequest("a text of the request has no encoding") from None
    return GuestAttestation(challenge, jwk, primary, additional)


def kind_of(tee: str) -> str:
    """The kind of evidence that a client's word for its TEE stands for."""
    return _OLD_SPELLINGS.get(tee, tee)
