"""Verifies a TPM's quote for the verifier's nonce and the worker's key.

The TPM's maker vouches for the TPM. Any program can reset PCR 16 and PCR 23, so they are never
used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from sealring.attest.evidence.chains import load_certificate
from sealring.attest.evidence.encoding import not_bound
from sealring.attest.evidence.evidence import Challenge, Evidence
from sealring.attest.evidence.rules import (
    ROOTS,
    Events,
    Need,
    Registers,
    Rule,
    TableForm,
    digest_lists,
    refused_unless,
)
from sealring.attest.evidence.tpm.credential import (
    certifies,
    check_ak,
    machine_name,
    split_certificates,
    subject,
    verify_tpm_chain,
)
from sealring.attest.evidence.tpm.event_log import PCR_NAMES, check_log
from sealring.attest.evidence.tpm.ima import IMA, IMA_NEEDS, replay_ima
from sealring.attest.evidence.tpm.structures import (
    BANKS,
    PublicKey,
    TpmQuote,
    check_signature,
    digest_of_pcrs,
    parse_quote,
)
from sealring.attest.evidence.trust import Trust
from sealring.attest.evidence.worker import Claims
from sealring.errors import ForgedEvidence, MalformedEvidence

KIND: Final = "tpm"
RESETTABLE: Final = frozenset({16, 23})


def verify_tpm(evidence: Evidence, challenge: Challenge | None, trust: Trust) -> Claims:
    raw, signature, ak, values, log, others, ima = evidence.only(
        "quote", "signature", "ak", "pcrs", optional=("event_log", "endorsements", "ima_log")
    )
    key = check_ak(ak).key
    quote, pcrs = verify_quote(raw, signature, key, values)
    other_keys = split_certificates(others)
    chain = verify_tpm_chain(evidence.chain, trust)
    certified = certifies(chain, key)
    if certified and other_keys:
        raise MalformedEvidence("a certified attestation key comes without endorsement keys")
    if challenge is not None and certified:
        # A certified key opens no credential, even if the verifier has prepared one.
        challenge = replace(challenge, credential=b"")
    elif challenge is not None:
        made_for, secret = challenge.credential[:32], challenge.credential[32:]
        if not secret or made_for != subject(evidence.chain[0], ak, other_keys):
            raise not_bound("no credential was made for this TPM and this attestation key")
    evidence.check_bound(quote.extra_data, challenge, "the TPM quote")
    return Claims(
        product="2.0",
        machine=machine_name(chain.leaf),
        also_known_as=tuple(machine_name(load_certificate(one)) for one in other_keys),
        registers=registers(pcrs) | {"firmware": f"{quote.firmware:016x}"},
        **logged(log, ima, pcrs, quote.bank),
        guest={"resets": quote.resets, "ak_certificate": int(certified)},
        **chain.standing,
    )


def verify_quote(
    raw: bytes, signature: bytes, key: PublicKey, values: bytes
) -> tuple[TpmQuote, dict[int, bytes]]:
    """The quote and the PCRs that it covers, except those that programs can reset."""
    check_signature(key, signature, raw)
    quote = parse_quote(raw)
    size = BANKS[quote.bank]
    if len(values) != size * len(quote.pcrs):
        raise MalformedEvidence(f"the quote is over {len(quote.pcrs)} PCRs of {size} bytes")
    if digest_of_pcrs(signature, values) != quote.digest:
        raise ForgedEvidence("the PCRs' values are not the ones that the TPM signed")
    found = {pcr: values[size * n :][:size] for n, pcr in enumerate(quote.pcrs)}
    return quote, {pcr: value for pcr, value in found.items() if pcr not in RESETTABLE}


def registers(pcrs: dict[int, bytes]) -> dict[str, str]:
    return {f"pcr{pcr}": value.hex() for pcr, value in pcrs.items()}


def logged(log: bytes, ima: bytes, pcrs: dict[int, bytes], bank: int) -> dict[str, Any]:
    """The fields of Claims that explain how the PCRs came to their values, from the given logs."""
    told: dict[str, Any] = {}
    if log:
        told["events"] = check_log(log, registers(pcrs), bank, PCR_NAMES)
    if ima:
        found = replay_ima(ima, pcrs, bank)
        told["ima_entries"], told["ima_violations"] = found.entries, found.violations
        told["ima_files"] = found.files
    return told


_PCR_BYTES: Final = {str(pcr): tuple(BANKS.values()) for pcr in range(24) if pcr not in RESETTABLE}
_PASSES: Final = {
    "pcr0": "any firmware passes, and firmware can bring every other PCR to the listed values",
    "pcr4": "any boot loader passes, and it can bring the PCRs above 7 to the listed values",
    "pcr7": "a machine with Secure Boot off, or with other keys for it, passes",
}


def booted(*pcrs: int) -> tuple[tuple[Rule, ...], tuple[Need, ...]]:
    """The rules for what a machine booted, and the need to state these PCRs.

    A policy states a PCR by its values, by the events that extend it, or by both.
    """
    return (
        Registers(
            "pcrs",
            digest_lists(_PCR_BYTES),
            "What was measured at boot, by PCR.",
            prefix="pcr",
            written=tuple(map(str, pcrs)),
        ),
        Events("events", digest_lists(_PCR_BYTES), prefix="pcr"),
        IMA,
    ), (*(Need(f"pcr{pcr}", _PASSES[f"pcr{pcr}"]) for pcr in pcrs), *IMA_NEEDS)


_BOOTED: Final = booted(0, 4, 7)
TPM_FORM: Final = TableForm(
    rules=(
        ROOTS,
        *_BOOTED[0],
        refused_unless(
            "ak_certificates",
            "ak_certificate",
            "quotes pass whose key an issuer, not this verifier, found in a TPM.",
        ),
    ),
    needs=_BOOTED[1],
    one_of=(("roots",), ("pcrs", "events")),
)
