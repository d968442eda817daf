"""A VerifiedPeer is made only from a certificate that states all that is required."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from sealring.core.identity import VerifiedPeer, verification, verify
from sealring.core.identity.certificates import WORLD_SIZE_OID, claims_of, encode_integer
from sealring.core.identity.verification import KnownCertificates, admit, signed_certificate
from sealring.errors import HandshakeError, PeerNotAdmitted, SealringError, WrongPeer, named
from sealring.limits import MAX_WORLD
from tests.codes import coded
from tests.core.identity.issuing import HOUR, NOW, Issuer

ISSUER = Issuer()
URI = x509.UniformResourceIdentifier("spiffe://sealring/job/rank/1")
NOT_CA = x509.BasicConstraints(ca=False, path_length=None)


def check(certificate: x509.Certificate, rank: int | None = 1) -> VerifiedPeer:
    return verify(
        certificate, (ISSUER.certificate,), job="job", world=4, rank=rank, where="10.0.0.1:5"
    )


def test_a_good_certificate_is_proof() -> None:
    credentials = ISSUER.credentials(1)
    for rank in (1, None):
        peer = check(credentials.certificate, rank)
        assert (peer.rank, peer.world) == (1, 4)
    assert check(ISSUER.credentials(1, world=None).certificate).world is None


@pytest.mark.parametrize(
    ("changes", "error", "proven"),
    [
        ({"job": "other"}, "handshake.wrong_job", False),
        ({"now": NOW - 5 * HOUR}, "handshake.certificate_expired", False),
        ({"now": NOW + 5 * HOUR}, "handshake.certificate_not_yet_valid", False),
        ({"rank": 2}, "handshake.wrong_rank", True),
        ({"world": 3}, "handshake.wrong_world_size", True),
        ({"world": 5}, "handshake.wrong_world_size", True),
    ],
)
@pytest.mark.threat("J28")
def test_each_disagreement_has_its_error(
    changes: dict[str, object], error: str, proven: bool
) -> None:
    credentials = ISSUER.credentials(**({"rank": 1} | changes))  # type: ignore[arg-type]
    with pytest.raises(HandshakeError, match=r"10\.0\.0\.1:5", check=coded(error)) as caught:
        check(credentials.certificate)
    assert named(caught.value) == error
    assert caught.value.proven is proven


@pytest.mark.threat("J5")
def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(
        WrongPeer, match="does not exist in a world of 4", check=coded("handshake.wrong_rank")
    ):
        check(ISSUER.credentials(7, world=None).certificate, None)


def test_another_authority_is_refused() -> None:
    for name in ("test authority", "another"):
        with pytest.raises(PeerNotAdmitted, check=coded("handshake.unknown_authority")):
            check(Issuer(name).credentials(1).certificate)


@pytest.mark.parametrize(
    "extensions",
    [
        [],
        [NOT_CA],
        [x509.SubjectAlternativeName([URI])],
        [x509.SubjectAlternativeName([URI]), x509.BasicConstraints(ca=True, path_length=None)],
        [x509.SubjectAlternativeName([URI, URI]), NOT_CA],
        [x509.SubjectAlternativeName([URI, x509.DNSName("a")]), NOT_CA],
        [x509.SubjectAlternativeName([x509.DNSName("rank1")]), NOT_CA],
        [x509.SubjectAlternativeName([x509.UniformResourceIdentifier("spiffe://x/y")]), NOT_CA],
        [
            x509.SubjectAlternativeName([URI]),
            NOT_CA,
            x509.UnrecognizedExtension(WORLD_SIZE_OID, b"\x02\x01\x00"),
        ],
        [
            x509.SubjectAlternativeName([URI]),
            NOT_CA,
            x509.UnrecognizedExtension(WORLD_SIZE_OID, b"\x02\x02\x00\x04"),
        ],
    ],
)
@pytest.mark.threat("J1")
def test_a_certificate_of_ours_that_is_no_workers_is_refused(
    extensions: list[x509.ExtensionType],
) -> None:
    with pytest.raises(PeerNotAdmitted, check=coded("handshake.unknown_authority")):
        check(ISSUER.odd_certificate(*extensions))


@pytest.mark.threat("J33")
def test_proof_cannot_be_made_or_copied() -> None:
    peer = check(ISSUER.credentials(1).certificate)
    with pytest.raises(TypeError):
        VerifiedPeer("job", 1, 4, b"", "", object())
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            attempt(peer)
    with pytest.raises((TypeError, ValueError)):
        dataclasses.replace(peer, rank=2)  # type: ignore[call-arg]
    with pytest.raises(dataclasses.FrozenInstanceError):
        peer.rank = 2


def world_in(der: bytes) -> int | None:
    stated = x509.UnrecognizedExtension(WORLD_SIZE_OID, der)
    certificate = ISSUER.odd_certificate(x509.SubjectAlternativeName([URI]), NOT_CA, stated)
    return claims_of(certificate).world


@given(st.integers(1, MAX_WORLD))
def test_world_sizes_have_one_encoding(value: int) -> None:
    assert world_in(encode_integer(value)) == value


@given(st.binary(max_size=12) | st.binary(max_size=3).map(lambda end: b"\2\3" + end))
def test_only_that_encoding_is_read(der: bytes) -> None:
    try:
        value = world_in(der)
    except ValueError:
        return
    assert value is not None
    assert encode_integer(value) == der


@pytest.mark.threat("J27")
def test_a_known_certificate_is_judged_anew_in_all_but_its_signature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, other = KnownCertificates(), Issuer()
    certificate = ISSUER.credentials(1).certificate

    def again(authority: x509.Certificate = ISSUER.certificate, **changes: Any) -> VerifiedPeer:
        wanted: dict[str, Any] = {"job": "job", "world": 4, "rank": 1} | changes
        signed = signed_certificate(certificate, (authority,), "10.0.0.1:5", known)
        return admit(signed, where="10.0.0.1:5", **wanted)

    def revoked(name: object) -> None:
        raise PeerNotAdmitted("it is out", code="handshake.certificate_revoked")

    first = again()
    with monkeypatch.context() as patch:
        patch.setattr(verification, "_read", lambda *_: pytest.fail("verified again"))
        assert (again().key, again().fingerprint) == (first.key, first.fingerprint)
        for changes, error in (
            ({"now": NOW + 5 * HOUR}, "handshake.certificate_expired"),
            ({"judge": revoked}, "handshake.certificate_revoked"),
            ({"job": "other"}, "handshake.wrong_job"),
            ({"rank": 2}, "handshake.wrong_rank"),
            ({"world": 5}, "handshake.wrong_world_size"),
        ):
            with pytest.raises(SealringError, check=coded(error)):
                again(**changes)
    with pytest.raises(PeerNotAdmitted, check=coded("handshake.unknown_authority")):
        again(other.certificate)


def test_a_certificate_that_no_authority_signed_does_not_become_known() -> None:
    known, certificate = KnownCertificates(), Issuer().credentials(1).certificate
    for _ in range(2):
        with pytest.raises(PeerNotAdmitted, check=coded("handshake.unknown_authority")):
            signed_certificate(certificate, (ISSUER.certificate,), "", known)
    assert not known.signed


def test_known_certificates_are_bounded() -> None:
    known = KnownCertificates(most=3)
    for rank in (0, 1, 2, 3):
        certificate = ISSUER.credentials(rank).certificate
        signed_certificate(certificate, (ISSUER.certificate,), "", known)
    assert len(known.signed) == 1
