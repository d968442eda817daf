"""When two workers disagree, both get the same named error, and it names the peer."""

from __future__ import annotations

from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID

from sealring.core.handshake import Hello, incoming, messages, peers
from sealring.core.handshake.messages import encode_message, parse_message
from sealring.core.handshake.refusals import error_of, refusal_of
from sealring.core.identity import Credentials
from sealring.core.identity.kept_key import KeptKey
from sealring.errors import (
    DuplicateRank,
    HandshakeError,
    MalformedSetup,
    PeerUnreachable,
    SealringError,
    named,
)
from tests.core.handshake.meeting import Met, meeting, terms
from tests.core.identity.issuing import HOUR, NOW, Issuer

ISSUER = Issuer()
ONE, ZERO = ISSUER.credentials(1), ISSUER.credentials(0)


def assert_both(met: Met, error: str, *, proven: bool = True) -> None:
    for end in (met.dialer, met.acceptor):
        assert named(end) == error, repr(end)
        assert "127.0.0.1:" in str(end)
        assert isinstance(end, HandshakeError)
        assert end.proven is proven


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"group": "other"}, "handshake.wrong_group"),
        ({"epoch": "0.2"}, "handshake.wrong_group"),
        ({"members": (0, 1, 2)}, "handshake.wrong_group"),
        ({"members": (1, 0, 2, 3)}, "handshake.wrong_group"),
        ({"settings": {"record_bytes": 65536}}, "handshake.settings_mismatch"),
        ({"settings": {"record_bytes": 131072, "more": 1}}, "handshake.settings_mismatch"),
    ],
)
@pytest.mark.parametrize("side", ["dialer", "acceptor"])
@pytest.mark.threat("J34")
def test_other_terms(changes: dict[str, Any], error: str, side: str) -> None:
    one = terms(1, **(changes if side == "dialer" else {}))
    zero = terms(0, **(changes if side == "acceptor" else {}))
    with meeting((ONE, one), (ZERO, zero)) as met:
        assert_both(met, error)


@pytest.mark.parametrize("side", ["dialer", "acceptor"])
@pytest.mark.parametrize(
    ("changes", "error", "admitted"),
    [
        ({"now": NOW - 5 * HOUR}, "handshake.certificate_expired", False),
        ({"now": NOW + 5 * HOUR}, "handshake.certificate_not_yet_valid", False),
        ({"world": 5}, "handshake.wrong_world_size", True),
    ],
)
@pytest.mark.threat("J6", "J28")
def test_other_certificates(changes: dict[str, Any], error: str, admitted: bool, side: str) -> None:
    odd = ISSUER.credentials(1 if side == "dialer" else 0, **changes)
    one, zero = (odd, ZERO) if side == "dialer" else (ONE, odd)
    with meeting((one, terms(1)), (zero, terms(0))) as met:
        ends = (met.acceptor, met.dialer) if side == "dialer" else (met.dialer, met.acceptor)
        for end in ends:
            assert named(end) == error, repr(end)
        refusing, refused = ends
        assert isinstance(refusing, HandshakeError)
        assert isinstance(refused, HandshakeError)
        assert refusing.proven is admitted
        assert refusing.peer == odd.rank
        assert refused.proven, "it is told so by an admitted worker"


@pytest.mark.threat("J4")
def test_another_job_of_one_authority() -> None:
    other = ISSUER.credentials(1, job="other")
    with meeting((other, terms(1, job="other")), (ZERO, terms(0))) as met:
        for end in (met.dialer, met.acceptor):
            assert named(end) == "handshake.wrong_job"
            assert isinstance(end, HandshakeError)
            assert not end.proven, "another job's worker is a stranger to this one"


@pytest.mark.threat("J6")
def test_another_world_size_without_it_in_the_certificate() -> None:
    one, zero = (ISSUER.credentials(rank, world=None) for rank in (1, 0))
    with meeting((one, terms(1)), (zero, terms(0, world=8))) as met:
        assert_both(met, "handshake.wrong_world_size")


@pytest.mark.threat("J5")
def test_another_rank_than_the_store_said() -> None:
    with meeting((ONE, terms(1)), (ISSUER.credentials(2), terms(2)), expecting=0) as met:
        assert named(met.dialer) == named(met.acceptor) == "handshake.wrong_rank"
        assert "was to be rank 0 and proved to be rank 2" in str(met.dialer)


@pytest.mark.threat("J5")
def test_a_hello_against_its_certificate() -> None:
    with meeting((ONE, terms(3)), (ZERO, terms(0))) as met:
        assert_both(met, "handshake.wrong_rank")


@pytest.mark.threat("J26")
def test_ones_own_rank() -> None:
    with meeting((ONE, terms(1)), (ISSUER.credentials(1), terms(1))) as met:
        assert_both(met, "handshake.duplicate_rank")


def test_what_the_listener_does_not_admit() -> None:
    seen: list[Hello] = []

    def admit(hello: Hello) -> None:
        seen.append(hello)
        raise DuplicateRank(f"rank {hello.sender} is here already, at 127.0.0.1:1")

    with meeting((ONE, terms(1)), (ZERO, terms(0)), admit=admit) as met:
        assert_both(met, "handshake.duplicate_rank")
    assert [(hello.sender, hello.host) for hello in seen] == [(1, "host-1")]


@pytest.mark.parametrize("name", ["test authority", "another authority"])
@pytest.mark.threat("J1")
def test_another_authority(name: str) -> None:
    """The dialer refuses first, and the acceptor learns it from the TLS alert."""
    with meeting((Issuer(name).credentials(1), terms(1)), (ZERO, terms(0))) as met:
        assert_both(met, "handshake.unknown_authority", proven=False)


@pytest.mark.threat("J1")
def test_another_authority_that_knows_ours() -> None:
    """Only the acceptor refuses, and the dialer learns it when it first reads."""
    stranger = Issuer("stranger").credentials(1, trusting=(ISSUER,))
    with meeting((stranger, terms(1)), (ZERO, terms(0))) as met:
        assert named(met.dialer) == named(met.acceptor) == "handshake.unknown_authority"
        assert isinstance(met.acceptor, HandshakeError)
        assert met.acceptor.peer == 1, "what it claims to be is told, as a claim"
        assert "claims to be rank 1" in str(met.acceptor)
        assert not met.acceptor.proven


def odd_credentials(*extra: x509.ExtensionType, key_of: Credentials | None = None) -> Credentials:
    key = Ed25519PrivateKey.generate()
    certificate = ISSUER.odd_certificate(
        x509.SubjectAlternativeName(
            [x509.UniformResourceIdentifier("spiffe://sealring/job/rank/1")]
        ),
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(ISSUER.key.public_key()),
        *extra,
        key=key,
    )
    return Credentials("job", 1, certificate, (ISSUER.certificate,), KeptKey.of(key))


@pytest.mark.threat("J1")
def test_a_certificate_for_servers_only_cannot_dial() -> None:
    odd = odd_credentials(
        x509.BasicConstraints(ca=False, path_length=None),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
    )
    with meeting((odd, terms(1)), (ZERO, terms(0))) as met:
        assert named(met.dialer) == named(met.acceptor) == "handshake.unknown_authority"


@pytest.mark.threat("J1")
def test_an_authoritys_certificate_names_no_worker() -> None:
    odd = odd_credentials(x509.BasicConstraints(ca=True, path_length=None))
    with meeting((odd, terms(1)), (ZERO, terms(0))) as met:
        assert named(met.dialer) == named(met.acceptor) == "handshake.unknown_authority"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"version": 4, "new": "field"}, "handshake.protocol_mismatch"),
        ({"suites": ["ROT-13"]}, "handshake.suite_mismatch"),
        ({"job": "other"}, "handshake.wrong_job"),
        ({"receiver": 3}, "handshake.wrong_rank"),
        ({"world": "4"}, "handshake.malformed_setup"),
        ({"extra": 1}, "handshake.malformed_setup"),
    ],
)
@pytest.mark.parametrize("side", [1, 0])
@pytest.mark.threat("D1")
def test_other_hellos(
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    error: str,
    side: int,
) -> None:
    def altered(own: Any, receiver: int) -> bytes:
        hello = messages.write_hello(own, receiver)
        return encode_message(parse_message(hello) | changes) if own.rank == side else hello

    for module in (peers, incoming):
        monkeypatch.setattr(module, "write_hello", altered)
    with meeting((ONE, terms(1)), (ZERO, terms(0))) as met:
        assert_both(met, error)


@pytest.mark.threat("W12")
def test_a_refusal_carries_no_more_than_a_class_of_ours_and_clean_text() -> None:
    told = error_of(
        {"type": "refusal", "error": "handshake.wrong_job", "text": "a\x1b[31m\nb" * 500}, "x", 3
    )
    assert named(told) == "handshake.wrong_job"
    assert str(told).isprintable()
    assert len(str(told)) < 700
    for name in ("SystemExit", "handshake", "group.tampered_record", ""):
        told = error_of({"type": "refusal", "error": name, "text": ""}, "x", 3)
        assert type(told) is MalformedSetup
    assert refusal_of(HandshakeError("secret detail"))["error"] == "handshake.peer_unreachable"


def test_an_error_that_many_pass_on_still_names_the_missing_rank() -> None:
    """An error of 600 letters at most may take 20 steps in the tree of 1,024 ranks."""
    error: SealringError = PeerUnreachable(
        "rank 5 did not appear within 1800 s: check that it runs"
    )
    for rank in (4, *range(1000, 1020)):
        who = f"rank {rank} at [2001:db8:1234:5678:9abc:def0:1234:5678]:65535"
        error = error_of(refusal_of(error), who, rank)
    assert isinstance(error, PeerUnreachable)
    assert error.peer == 1019
    told = "rank 4 at [2001:db8:1234:5678:9abc:def0:1234:5678]:65535 says: rank 5 did not appear"
    assert f"{who} says: {told} within 1800 s: check that it runs" == str(error)
