"""A file in the broker's cache is cut short; running jobs must go on."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from sealring.attest.broker.enrolment import enrolled
from sealring.attest.evidence.cache import read_policy, trust_in
from sealring.errors import ConfigurationError
from tests.attest.broker.local import Place, running
from tests.attest.minting.tpm import Maker


class Group:
    def __init__(self) -> None:
        self.ended = threading.Event()
        self.why = ""

    def expel(self, member: int, why: str) -> None:
        self.why = why
        self.ended.set()


@pytest.mark.threat("B13")
def test_a_list_cut_short_ends_no_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = Place(tmp_path, minutes=0.05)
    folder = tmp_path / "cache"
    folder.mkdir()
    content = Maker().root.revocation_list().public_bytes(Encoding.DER)
    (folder / "maker.crl").write_bytes(content)
    place.trust = trust_in(read_policy(place.policy)[0], folder)
    group = Group()
    with running(place) as broker, caplog.at_level(logging.ERROR, "sealring"):
        held = enrolled(0, 4, place.environment(broker.port), time.monotonic() + 60)
        held.watch(group, {})
        first = held.certificate.serial_number
        (folder / "maker.crl").write_bytes(content[: len(content) // 2])
        broker.join(1)
        # The worker's certificate is renewed although the file is damaged.
        until = time.monotonic() + 30
        while held.certificate.serial_number == first and not group.ended.is_set():
            assert time.monotonic() < until
            time.sleep(0.05)
        assert not group.ended.is_set(), group.why
        assert "maker.crl holds no revocation list" in caplog.text
        assert "stays in use" in caplog.text
        held.close()
    assert len(place.trust().lists) == 1
    # A folder whose files are damaged from the start is an error.
    with pytest.raises(ConfigurationError, match=r"maker\.crl holds no revocation list"):
        trust_in(read_policy(place.policy)[0], folder)


@pytest.mark.threat("B13")
def test_a_broker_that_fails_for_a_while_ends_no_job(tmp_path: Path) -> None:
    """Workers retry until their certificate ends, unless the broker says that they are revoked."""
    place = Place(tmp_path, minutes=0.2)
    good = place.trust
    failing = threading.Event()

    def trust():  # type: ignore[no-untyped-def]
        if failing.is_set():
            raise ConfigurationError("a file of the broker's own is damaged")
        return trust_in(read_policy(place.policy)[0], None)()

    assert good is None
    place.trust = trust
    group = Group()
    with running(place) as broker:
        held = enrolled(0, 4, place.environment(broker.port), time.monotonic() + 60)
        held.watch(group, {})
        first = held.certificate.serial_number
        failing.set()
        with pytest.raises(Exception, match="the broker failed"):
            broker.join(1, key=Ed25519PrivateKey.generate())
        time.sleep(7)  # half of the certificate's time has passed, and the first try has failed
        failing.clear()
        until = time.monotonic() + 30
        while held.certificate.serial_number == first and not group.ended.is_set():
            assert time.monotonic() < until
            time.sleep(0.05)
        assert not group.ended.is_set(), group.why
        held.close()
