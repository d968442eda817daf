"""The vectors in docs/spec.md, recomputed twice: by pyca/cryptography alone, and by our code."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from sealring import _native, _stand_ins, limits
from sealring.core.engine.collective import DType, ReduceKind
from sealring.core.handshake import Terms, group_context
from sealring.core.handshake.statements import Statement, Statements, commitment_to, group_keys
from sealring.core.handshake.terms import members_digest
from sealring.core.identity.secret import derive_authority
from sealring.core.links import run_of
from sealring.core.links.epoch import epoch_from
from sealring.core.schedule import Algorithm, Operation
from sealring.core.schedule.table import AlgorithmTable, Placement, Row
from tests.core.engine.spec_decoder import Keys

SPEC = Path(__file__).parents[3] / "docs" / "spec.md"


@pytest.fixture(scope="module")
def vector() -> dict[str, str]:
    blocks = re.findall(r"^```vector\n(.*?)^```", SPEC.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    return dict(re.split(r"\s*=\s*", line, maxsplit=1) for line in lines)


@pytest.mark.threat("K17")
def test_record(vector: dict[str, str]) -> None:
    key, context, header = (bytes.fromhex(vector[name]) for name in ("key", "context", "header"))
    plain, payload = bytes.fromhex(vector["plaintext"]), bytes.fromhex(vector["payload"])
    associated = header + context
    for part, text, sealed in (
        ("header", b"", vector["header-tag"]),
        ("payload", plain, vector["payload"] + vector["payload-tag"]),
    ):
        nonce = bytes.fromhex(vector[f"{part}-nonce"])
        assert AESGCM(key).encrypt(nonce, text, associated).hex() == sealed
        assert _native.aead_seal(key, nonce, associated, text).hex() == sealed
        assert _native.aead_open(key, nonce, associated, bytes.fromhex(sealed)) == text
    assert len(header) == limits.HEADER_BYTES
    assert len(payload) == len(plain)


@pytest.mark.threat("C18")
def test_record_of_a_gpu(vector: dict[str, str]) -> None:
    key = HKDFExpand(hashes.SHA256(), 32, b"sealring 1 gpu").derive(bytes.fromhex(vector["key"]))
    assert key.hex() == vector["gpu-key"]
    assert _native.gpu_key(bytes.fromhex(vector["key"])) == key
    header = bytes.fromhex(vector["gpu-header"])
    fields = _native.parse_header(header)
    assert fields is not None
    assert fields["lane"] == 1
    associated = header + bytes.fromhex(vector["context"])
    for part, text, sealed in (
        ("header", b"", vector["gpu-header-tag"]),
        (
            "payload",
            bytes.fromhex(vector["plaintext"]),
            vector["gpu-payload"] + vector["gpu-payload-tag"],
        ),
    ):
        nonce = bytes.fromhex(vector[f"gpu-{part}-nonce"])
        assert ChaCha20Poly1305(key).encrypt(nonce, text, associated).hex() == sealed
        assert _stand_ins.gpu_aead_seal(key, nonce, associated, text).hex() == sealed


def test_header_fields(vector: dict[str, str]) -> None:
    assert _native.parse_header(bytes.fromhex(vector["header"])) == {
        "kind": 1,
        "length": 5,
        "count": 0,
        "lane": 0,
        "generation": 0,
        "sender": 1,
        "receiver": 2,
        "collective": 0x0102030405060708,
        "operation": Operation.ALL_REDUCE,
        "dtype": DType.FLOAT32,
        "reduction": ReduceKind.SUM,
        "algorithm": Algorithm.DIRECT,
        "message": 7,
        "segment": 9,
        "root": 0,
        "total": 20,
    }


def test_ratchet(vector: dict[str, str]) -> None:
    key, following = bytes.fromhex(vector["key"]), vector["key-of-generation-1"]
    expand = HKDFExpand(hashes.SHA256(), 32, b"sealring 1 ratchet")
    assert expand.derive(key).hex() == following
    assert _native.ratchet(key).hex() == following


def test_authority(vector: dict[str, str]) -> None:
    secret = vector["secret-text"].encode()

    def derive(purpose: bytes, length: int) -> bytes:
        info = b"sealring-1 " + purpose
        return HKDF(hashes.SHA256(), length, b"sealring-1 job secret", info).derive(secret)

    public = Ed25519PrivateKey.from_private_bytes(derive(b"authority key", 32)).public_key()
    assert public.public_bytes_raw().hex() == vector["authority-public-key"]
    assert f"job-{derive(b'job name', 4).hex()}" == vector["default-job"]
    serial = int.from_bytes(derive(b"authority serial", 16), "big") | 1
    assert f"{serial:032x}" == vector["authority-serial"]

    authority = derive_authority(_native.Secret(secret))
    assert authority.default_job == vector["default-job"]
    assert authority.certificate.public_key() == public
    assert authority.certificate.serial_number == serial
    fingerprint = authority.certificate.fingerprint(hashes.SHA256())
    assert fingerprint.hex() == vector["authority-sha256"]


def test_contexts(vector: dict[str, str]) -> None:
    def digest(*fields: bytes) -> str:
        framed = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
        return hashlib.sha256(framed).hexdigest()

    def integer(value: int) -> bytes:
        return value.to_bytes(8, "big")

    ranks = b"".join(integer(rank) for rank in range(4))
    group = (integer(3), b"AES-256-GCM", b"demo", b"default", b"0.1", integer(4), ranks)
    assert digest(ranks) == vector["members-digest"]
    assert digest(*group) == vector["group-context"]

    terms = Terms("demo", "default", "0.1", world=4, members=(0, 1, 2, 3), rank=2, settings={})
    assert members_digest(terms.members) == vector["members-digest"]
    assert group_context(terms).hex() == vector["group-context"]

    value = bytearray.fromhex(vector["confirmation-value"])
    assert digest(b"sealring 2 confirmation", bytes(value)) == vector["commitment"]
    assert commitment_to(value).hex() == vector["commitment"]


def test_runs_and_groups_of_them(vector: dict[str, str]) -> None:
    def digest(*fields: bytes) -> str:
        framed = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
        return hashlib.sha256(framed).hexdigest()[:32]

    transcript, run, drawn = bytes.fromhex(vector["transcript"]), vector["run"], vector["drawn"]
    assert digest(b"sealring 2 run", transcript) == run
    assert digest(b"sealring 2 epoch", run.encode(), drawn.encode()) == vector["epoch-within"]
    assert run_of(transcript) == run
    assert epoch_from(run, drawn) == vector["epoch-within"]


def test_group_keys(vector: dict[str, str]) -> None:
    transcript = bytes.fromhex(vector["transcript"])
    given = [bytes.fromhex(vector[f"contribution-{rank}"]) for rank in range(2)]

    def hkdf(salt: bytes, secret: bytes, info: bytes) -> bytes:
        return HKDF(hashes.SHA256(), 32, salt, info).derive(secret)

    secret = hkdf(transcript, b"".join(given), b"sealring 2 group secret")
    assert secret.hex() == vector["group-secret"]
    key = hkdf(b"", secret, b"sealring 2 group key" + (1).to_bytes(8, "big"))
    assert key.hex() == vector["group-key-1"]

    said = [
        Statement(rank, "0" * 32, "host", b"", b"certificate", bytes(32), _native.Secret(each))
        for rank, each in enumerate(given)
    ]
    ours = Statements(each.encode() for each in said).group_secret(transcript)
    assert bytes(ours) == secret
    assert bytes(group_keys(ours, [1])[0]) == key


def test_lane_key(vector: dict[str, str]) -> None:
    """The second reader opens what engines seal with such keys."""
    assert Keys(bytes.fromhex(vector["key"])).of(2).key.hex() == vector["key-of-lane-2"]


def test_algorithm_table() -> None:
    text, number = re.findall(
        r"a list of the algorithms' names. For\n`(\[.*\])` it is\n(\d+)\.", SPEC.read_text()
    )[0]
    assert int(hashlib.sha256(text.encode()).hexdigest()[:12], 16) == int(number)
    rows = (
        Row(2, (24576,), (Algorithm.DIRECT, Algorithm.RING)),
        Row(4, (), (Algorithm.PARAMETER_SERVER,)),
    )
    table = AlgorithmTable({(Operation.ALL_REDUCE, Placement.ONE): rows})
    assert table.digest() == int(number)
