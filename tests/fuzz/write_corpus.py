"""Writes the corpus's first entries: well-formed input, and input at the limits.

Run it with `python -m tests.fuzz.write_corpus`. Finds of the fuzzer are added beside these entries
by hand.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sealring.attest.broker.envelopes import new_key, public_jwk
from sealring.attest.broker.messages import response_of, write_attestation, write_auth
from sealring.attest.evidence import verify_evidence
from sealring.attest.evidence.worker import encode_claims
from sealring.core.handshake.messages import encode_message, write_hello
from sealring.core.handshake.refusals import refusal_of
from sealring.core.identity.names import WorkerName
from sealring.core.links.descriptors import Address
from sealring.core.links.memory import offer_of
from sealring.core.links.rendezvous import encode_addresses
from sealring.errors import BrokerRefusal, PolicyRefusal, WrongPeer
from sealring.limits import MAX_PAYLOAD_BYTES
from tests.attest.broker.guest_evidence import CASES, gpus, snp
from tests.attest.broker.kbs_client import KbsClient
from tests.attest.broker.kbs_client import public_jwk as rsa_jwk
from tests.attest.evidence.ima_lists import GOOD, PYTHON, File, listed
from tests.attest.evidence.minting import CHALLENGE, Amd
from tests.attest.evidence.test_policy import EVERY_KIND, ONLY_SNP, POLICY
from tests.attest.evidence.test_tpm_makers import unordered
from tests.attest.minting import tpm
from tests.attest.minting.intel import Intel, sgx_body, tdx_body
from tests.attest.minting.nvidia import MEASUREMENTS, Nvidia
from tests.attest.minting.tpm import AzureGuest
from tests.core.engine.attacker import EVERYONE, Kind, header
from tests.core.handshake.meeting import terms
from tests.fuzz.log_corpus import LOG_CORPUS
from tests.fuzz.targets import ALERT_FIXED
from tests.fuzz.vault_corpus import safetensors_files, vault_headers

CORPUS = Path(__file__).parent / "corpus"


def headers() -> Iterator[tuple[str, bytes]]:
    for kind in Kind:
        yield kind.name.lower(), header(kind=kind, length=16, sender=1, receiver=2, collective=7)
    plain = header(kind=Kind.PAIR)
    yield "published", header(kind=Kind.GROUP, receiver=EVERYONE, length=1, total=1)
    yield "longest", header(kind=Kind.PAIR, length=MAX_PAYLOAD_BYTES)
    yield "too-long", header(kind=Kind.PAIR, length=MAX_PAYLOAD_BYTES + 1)
    yield "header-lane", header(kind=Kind.PAIR, lane=0x80000000)
    yield "all-ones", plain[:4] + b"\xff" * 60
    yield "version-2", plain[:2] + b"\x02" + plain[3:]
    yield "kind-0", plain[:3] + b"\x00" + plain[4:]
    yield "kind-9", plain[:3] + b"\x09" + plain[4:]
    yield "short", plain[:63]
    yield "longer", plain + b"payload"
    yield "empty", b""


def alerts() -> Iterator[tuple[str, bytes]]:
    for code in range(9):
        yield f"code-{code}", ALERT_FIXED.pack(code, 1, 2, 3) + b"what happened"
    yield "about-no-rank", ALERT_FIXED.pack(7, -1, 0, 0)
    yield "short", ALERT_FIXED.pack(1, 1, 2, 3)[:-1]
    yield "extremes", struct.pack("<BIIQ", 1, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)
    yield "terminal-escape", ALERT_FIXED.pack(1, 1, 2, 3) + b"\x1b[2J\x00\xff\n"
    yield "too-much-text", ALERT_FIXED.pack(1, 1, 2, 3) + b"a" * 600
    view = b"{operation=1 algorithm=99 dtype=3 reduction=255 bytes=18446744073709551615}"
    yield "view", ALERT_FIXED.pack(4, 1, 2, 3) + b"rank 1 is in collective 1 " + view
    yield "huge-view", ALERT_FIXED.pack(4, 1, 2, 3) + view.replace(b"=1 ", b"=" + b"9" * 300 + b" ")
    yield "empty", b""


def hellos() -> Iterator[tuple[str, bytes]]:
    good = write_hello(terms(1, instance="0" * 32), 0)
    yield "good", good
    fields = json.loads(good)
    for name, value in {
        "version-4": {"version": 4},
        "version-true": {"version": True},
        "no-suites": {"suites": []},
        "world-0": {"world": 0},
        "world-huge": {"world": 1 << 60},
        "float": {"world": 4.0},
        "unprintable": {"host": "\x1b[2J"},
        "surrogate": {"host": "\ud800"},
        "nested": {"settings": {"a": {"b": 1}}},
        "more": {"more": 1},
    }.items():
        yield name, json.dumps(fields | value).encode()
    yield "repeated-key", good.replace(b'"world":4', b'"world":4,"world":4')
    yield "not-a-number", good.replace(b'"world":4', b'"world":NaN')
    yield "many-digits", good.replace(b'"world":4', b'"world":' + b"4" * 5000)
    yield "deep", b"[" * 8000
    yield "too-long", b'{"type":"hello","version":3,"host":"' + b"a" * (16 << 10) + b'"}'
    yield "not-utf-8", b'{"type":"\xff"}'
    yield "empty", b""


def refusals() -> Iterator[tuple[str, bytes]]:
    yield "good", encode_message(refusal_of(WrongPeer("it is rank 3", code="handshake.wrong_rank")))
    codes = ("configuration.unsupported", "sealring", "SystemExit", "__class__", "")
    for number, code in enumerate(codes):
        message = {"type": "refusal", "error": code, "text": "\x1b[2J" + "a" * 700}
        yield f"error-{number}", encode_message(message)
    yield "no-text", b'{"type":"refusal","error":"handshake.wrong_rank"}'
    yield "list", b'{"type":"refusal","error":["handshake.wrong_rank"],"text":""}'
    yield "long-type", encode_message({"type": "\x1b" * 1000})


def offers() -> Iterator[tuple[str, bytes]]:
    good = offer_of(Address(bytes(32), bytes(range(32))))
    for name, change in {
        "good": {},
        "socket-short": {"socket": "0" * 62},
        "socket-number": {"socket": 1},
        "socket-upper": {"socket": "A" * 64},
        "token-long": {"token": "0" * 66},
        "token-null": {"token": None},
        "more": {"more": 1},
    }.items():
        yield name, encode_message({"type": "link", "group_key": "0" * 64, "shm": good | change})  # type: ignore[operator]
    yield "none", encode_message({"type": "link", "group_key": "0" * 64, "shm": None})


def address_lists() -> Iterator[tuple[str, bytes]]:
    yield "one", encode_addresses([("127.0.0.1", 29500)]).encode()
    yield "both", encode_addresses([("10.0.0.1", 1), ("2001:db8::1", 65535)]).encode()
    yield "mapped", b'[["::ffff:10.0.0.1",1]]'
    for name, text in {
        "port-0": '[["127.0.0.1",0]]',
        "port-true": '[["127.0.0.1",true]]',
        "name": '[["localhost",1]]',
        "scope": '[["fe80::1%eth0",1]]',
        "any": '[["0.0.0.0",1]]',
        "multicast": '[["224.0.0.1",1]]',
        "number": "[[2130706433,1]]",
        "nothing": "[]",
        "nine": json.dumps([["127.0.0.1", 1]] * 9),
        "deep": "[" * 1000,
        "infinite": '[["127.0.0.1",Infinity]]',
    }.items():
        yield name, text.encode()
    yield "not-ascii", '[["\uff11.1.1.1",1]]'.encode()
    yield "too-long", b" " * 1100


def stored_values() -> Iterator[tuple[str, bytes]]:
    def part(kind: int, value: bytes, length: int | None = None) -> bytes:
        head = struct.pack(">2sBBI", b"SV", 1, kind, len(value) if length is None else length)
        return head + bytes(range(16)) + (1).to_bytes(8, "big") + bytes(32) + value + bytes(16)

    first, appended, counter = part(1, b"value"), part(2, b"more"), part(3, b"")
    yield "value", first
    yield "empty-value", part(1, b"")
    yield "appended", first + appended + appended
    yield "only-appended", appended
    yield "counter", counter
    yield "counter-appended", counter + appended
    yield "two-values", first + first
    yield "kind-0", part(0, b"value")
    yield "kind-4", part(4, b"value")
    yield "version-2", first[:2] + b"\x02" + first[3:]
    yield "too-long", part(1, b"value", (1 << 30) + 1)
    yield "longest", part(1, b"value", 0xFFFFFFFF)
    yield "cut", first[:-1]
    yield "trailing", first + b"\x00"
    yield "number", b"17"


def evidence() -> Iterator[tuple[str, bytes]]:
    good = Amd().evidence().encode()
    yield "good", good
    fields = json.loads(good)
    for name, change in {
        "version-2": {"version": 2},
        "version-true": {"version": True},
        "no-parts": {"parts": {}},
        "long-chain": {"chain": fields["chain"] * 3},
        "loose-base64": {"chain": ["QR=="]},
        "upper-nonce": {"challenge": fields["challenge"] | {"nonce": "AB" * 32}},
        "credential": {"challenge": fields["challenge"] | {"credential": "ab" * 64}},
        "short-credential": {"challenge": fields["challenge"] | {"credential": "ab" * 63}},
        "devices": {"devices": [Nvidia().evidence(bytes(32)).as_json()]},
        "device-of-text": {"devices": ["nvidia"]},
        "kind-with-dashes": {"kind": "az-snp-vtpm"},
        "kind-of-dashes": {"kind": "--"},
        "more": {"more": 1},
    }.items():
        yield name, json.dumps(fields | change).encode()
    yield "repeated-key", good.replace(b'"kind"', b'"version": 1, "kind"')
    yield "deep", b"[" * 8000
    yield "empty", b""


def snp_reports() -> Iterator[tuple[str, bytes]]:
    amd = Amd()
    for version in (1, 2, 3, 4, 5):
        yield f"version-{version}", amd.report(version=version)
    yield "algorithm-2", amd.report(algorithm=2)
    yield "short", amd.report()[:-1]
    yield "tail", amd.report()[:-1] + b"\x01"
    yield "empty", b""


def policies() -> Iterator[tuple[str, bytes]]:
    yield "good", POLICY.encode()
    yield "only-snp", ONLY_SNP.encode()
    yield "every-kind", EVERY_KIND.encode()
    yield "nothing", b"version = 1"
    yield "dotted", b"version = 1\nsnp.vmpl = 4"
    yield "deep", b"a = " + b"[" * 2000
    yield "empty", b""


def tpm_quotes() -> Iterator[tuple[str, bytes]]:
    values = tpm.pcr_values(tpm.BOOT)
    good = tpm.quote(values, bytes(32))
    yield "good", good
    yield "few", tpm.quote({4: values[4]}, b"")
    yield "magic", tpm.quote(values, bytes(32), magic=0)
    yield "certify", tpm.quote(values, bytes(32), kind=0x8017)
    yield "short", good[:-1]
    yield "longer", good + b"\0"


def tpm_keys() -> Iterator[tuple[str, bytes]]:
    good = tpm.Maker().ak
    yield "p256", good
    rsa = bytes.fromhex("0001000b0005047200000010") + bytes.fromhex("0014000b080000000000")
    yield "rsa", rsa + tpm.sized(b"\xc1" + bytes(254) + b"\x01")
    yield "even-rsa", rsa + tpm.sized(b"\xc0" + bytes(255))
    yield "small-rsa", rsa + tpm.sized(b"\x03")
    yield "not-a-point", good[:-1] + bytes([good[-1] ^ 1])
    yield "sha1", good[:2] + b"\0\4" + good[4:]
    yield "keyed-hash", b"\0\x08" + good[2:]
    yield "short", good[:-1]


def tpm_signatures() -> Iterator[tuple[str, bytes]]:
    yield "ecdsa", tpm.sign(tpm.Maker().ak_key, b"another")
    yield "rsassa", bytes.fromhex("0014000b") + tpm.sized(bytes(256))
    yield "zeros", bytes.fromhex("0018000b") + 2 * tpm.sized(bytes(32))
    yield "empty-numbers", bytes.fromhex("0018000b00000000")
    yield "sha1", bytes.fromhex("00180004") + 2 * tpm.sized(bytes(32))
    yield "hmac", bytes.fromhex("0005000b") + bytes(32)


def event_logs() -> Iterator[tuple[str, bytes]]:
    good = tpm.event_log(tpm.BOOT)
    yield "good", good
    yield "banks", tpm.event_log(tpm.BOOT, ((4, 20), (11, 32), (12, 48)))
    yield "no-events", tpm.event_log(())
    yield "sha384", tpm.event_log(tpm.BOOT, ((12, 48),))
    yield "filled", good + b"\xff" * 64
    yield "sha1", tpm.event_log(tpm.BOOT, ((4, 20),))
    yield "pcr-24", tpm.event_log((tpm.Measured(24, 1, b""),))
    yield (
        "huge-event",
        good + bytes.fromhex("0400000001000000010000000b00") + bytes(32) + b"\xff" * 4,
    )
    yield "short", good[:-1]


def ima_lists() -> Iterator[tuple[str, bytes]]:
    yield "good", listed(*GOOD)
    yield "violation", listed(*GOOD, File("/changed", violation=True))
    yield "sha1", listed(replace(PYTHON, algorithm="sha1"))
    yield "old-template", listed(replace(PYTHON, template="ima"))
    yield "pcr-11", listed(replace(PYTHON, pcr=11))
    yield "short", listed(*GOOD)[:-1]
    yield "longer", listed(*GOOD) + b"\n"
    yield "huge-entry", PYTHON.entry[:34] + b"\xff" * 8
    yield "empty", b""


def certificates() -> Iterator[tuple[str, bytes]]:
    maker = tpm.Maker()
    leaf, root = unordered()
    yield "good", maker.ek.der
    yield "vcek", Amd().chain[0]
    yield "unordered", leaf
    yield "its-root", root
    yield "short", leaf[:-1]
    yield "deep", b"\x30\x80" * 40


def hcl_reports() -> Iterator[tuple[str, bytes]]:
    guest = AzureGuest(Amd())
    yield "good", guest.hcl_report()
    yield "version-2", guest.hcl_report(version=2)
    yield "no-key", guest.hcl_report(b'{"keys": []}')
    yield "two-keys", guest.hcl_report(guest.text.replace(b"]", b', {"kid": "HCLAkPub"}]', 1))
    yield "not-json", guest.hcl_report(b"[" * 500)
    yield "tail", guest.hcl_report() + b"\1"
    yield "short", guest.hcl_report(pad=0)[:-1]


def intel_quotes() -> Iterator[tuple[str, bytes]]:
    intel = Intel()
    tdx = intel.quote(tdx_body(bytes(64)))
    yield "tdx", tdx
    yield "sgx", intel.quote(sgx_body(bytes(64)))
    yield "debug", intel.quote(tdx_body(bytes(64), attributes=1))
    yield "version-5", b"\5" + tdx[1:48] + b"\2\0" + (584).to_bytes(4, "little") + tdx[48:]
    yield "version-6", b"\6" + tdx[1:]
    yield "no-chain", tdx[: tdx.index(b"-----BEGIN")]
    yield "longer", tdx + b"\0"


def intel_collaterals() -> Iterator[tuple[str, bytes]]:
    intel = Intel()
    for kind in ("tdx", "sgx"):
        yield kind, intel.collateral(kind).text.encode()
    yield "not-json", b"[" * 3000
    yield "nothing", b"{}"
    yield "numbers", b'{"tcb_info": 1, "qe_identity": 2}'


def nvidia_reports() -> Iterator[tuple[str, bytes]]:
    gpu, switch = Nvidia(), Nvidia("LS_10")
    few = {n: MEASUREMENTS[n] for n in range(3)}
    good = gpu.report(bytes(32), measurements=few)
    yield "gpu", good
    yield "switch", switch.report(bytes(32), measurements=few)
    yield "whole", gpu.report(bytes(32))
    yield "no-measurements", gpu.report(bytes(32), measurements={})
    yield "no-fields", gpu.report(bytes(32), measurements=few, opaque={})
    yield "escape", gpu.report(bytes(32), measurements=few, opaque={3: b"\x1b[2J", 6: b"\xff"})
    yield "version-12", gpu.report(bytes(32), measurements=few, version=0x12)
    yield "short", good[:-1]
    yield "longer", good + b"\0"


def nvidia_references() -> Iterator[tuple[str, bytes]]:
    gpu = Nvidia()
    good = gpu.reference_file("590.12", {n: MEASUREMENTS[n] for n in (1, 3)})
    yield "good", good
    yield "unsigned", good[: good.index(b"<ds:Signature")] + b"</SoftwareIdentity>"
    yield "wrapped", b"<a>" + good + b"</a>"
    yield "entity", b'<!DOCTYPE a [<!ENTITY b "c">]>' + good
    yield "not-xml", b"<" * 100


def broker_requests() -> Iterator[tuple[str, bytes]]:
    key, name = Ed25519PrivateKey.generate(), WorkerName("job", 1)
    jwk = public_jwk(new_key())
    good = write_attestation(bytes(32), jwk, name, 4, key, Amd().evidence().encode())
    fields = json.loads(good)
    yield "attest", good
    yield "unsigned", json.dumps(fields | {"signature": ""}).encode()
    yield (
        "more-evidence",
        json.dumps(
            fields | {"tee-evidence": fields["tee-evidence"] | {"additional_evidence": "[]"}}
        ).encode(),
    )
    yield "auth", write_auth("snp", {})
    maker = tpm.Maker()
    shown = [base64.b64encode(one).decode() for one in maker.chain]
    yield "auth-tpm", write_auth("tpm", {"chain": shown, "ak": base64.b64encode(maker.ak).decode()})
    yield "auth-odd", write_auth("tpm", {"chain": [7], "ak": None})
    yield "empty", b""
    yield "deep", b"[" * 8000


def kbs_requests() -> Iterator[tuple[str, bytes]]:
    for name, (tee, prove, _, _) in CASES.items():
        if name != "azure, older spelling":
            guest = KbsClient(0, Path(), tee, prove)
            body = guest.attestation(base64.b64encode(bytes(32)).decode())
            yield name.replace(" ", "-"), json.dumps(body).encode()
    gpu = KbsClient(0, Path(), "snp", snp, additional=gpus)
    body = gpu.attestation(base64.b64encode(bytes(32)).decode())
    yield "gpu", json.dumps(body).encode()
    body["runtime-data"]["tee-pubkey"] = rsa_jwk(rsa.generate_private_key(65537, 2048))
    body["tee-evidence"] = {"primary_evidence": {}, "additional_evidence": ""}
    yield "rsa", json.dumps(body).encode()
    yield "init-data", json.dumps(body | {"init-data": {"format": "toml", "body": ""}}).encode()
    number = {"attestation_report": {"measurement": 1 << 31}}
    body["tee-evidence"] = {"primary_evidence": number, "additional_evidence": "[]"}
    yield "number", json.dumps(body).encode()
    yield "empty", b"{}"


def broker_answers() -> Iterator[tuple[str, bytes]]:
    for number, error in enumerate(
        (
            BrokerRefusal("taken", code="broker.rank_taken"),
            PolicyRefusal("no", code="policy.kind_not_allowed"),
        )
    ):
        yield f"refusal-{number}", response_of(error).body
    yield "unknown", b'{"type": "x", "detail": "x", "error": "SystemExit"}'
    yield "terminal-escape", b'{"type": "x", "detail": "\\u001b[2J", "error": "broker.rank_taken"}'
    yield "numbers", b'{"type": 1, "detail": 2, "error": 3}'
    yield "list", b"[]"


def attestation_claims() -> Iterator[tuple[str, bytes]]:
    amd, gpu = Amd(), Nvidia()
    device = gpu.evidence(CHALLENGE.device_nonce("snp"))
    trust = replace(amd.trust(), nvidia=gpu.trust().nvidia, references=gpu.references())
    for name, evidence, trusted in (
        ("snp", amd.evidence(), amd.trust(amd.revocation_list())),
        ("gpu", amd.evidence(devices=(device,)), trust),
    ):
        worker = verify_evidence(evidence, CHALLENGE, trusted)
        yield name, encode_claims(worker, "ab" * 32, "cd" * 32)
    claims = json.loads(encode_claims(worker, "ab" * 32, "cd" * 32))
    for name, when in (("far-future", 1.8e18), ("not-a-number", float("nan")), ("true", True)):
        claims["worker"]["verified_at"] = when
        yield name, json.dumps(claims).encode()
    yield "version-2", b'{"version": 2}'
    yield "deep", b"[" * 8000


def main() -> None:
    for target, entries in {
        "header": headers(),
        "alert": alerts(),
        "hello": hellos(),
        "refusal": refusals(),
        "offer": offers(),
        "addresses": address_lists(),
        "stored": stored_values(),
        "evidence": evidence(),
        "snp_report": snp_reports(),
        "policy": policies(),
        "vault_header": vault_headers(),
        "safetensors": safetensors_files(),
        "tpm_quote": tpm_quotes(),
        "tpm_key": tpm_keys(),
        "tpm_signature": tpm_signatures(),
        "event_log": event_logs(),
        "ima_list": ima_lists(),
        "certificate": certificates(),
        "hcl_report": hcl_reports(),
        "intel_quote": intel_quotes(),
        "intel_collateral": intel_collaterals(),
        "nvidia_report": nvidia_reports(),
        "nvidia_reference": nvidia_references(),
        "broker_request": broker_requests(),
        "kbs_request": kbs_requests(),
        "broker_answer": broker_answers(),
        "attestation_claims": attestation_claims(),
        **{target: entries() for target, entries in LOG_CORPUS.items()},
    }.items():
        folder = CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in entries:
            (folder / name).write_bytes(data)


if __name__ == "__main__":
    main()
