"""Tests `sealring broker --health`, which a container's health check runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from sealring.attest.broker.store import StoreView
from sealring.cli import app
from sealring.core.identity.authority import create_authority
from sealring.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
)
from tests.attest.broker.local import Place, Running, running
from tests.codes import coded
from tests.ports import free_port


def ask(place: Place, at: str, *more: str) -> str:
    """Returns what the command printed, or raises the error that it ended with."""
    command = ["broker", "--health", "--ca", str(place.authority.parent), "--listen", at, *more]
    done = CliRunner().invoke(app, command)
    if done.exception is not None:
        raise done.exception
    return done.stdout.strip()


def test_a_broker_that_answers_is_healthy(tmp_path: Path) -> None:
    with running(Place(tmp_path)) as broker:
        assert ask(broker.place, f"127.0.0.1:{broker.port}") == "The broker answers."


def test_one_that_does_not_run_is_not(tmp_path: Path) -> None:
    with pytest.raises(BrokerUnavailable, check=coded("broker.unreachable")):
        ask(Place(tmp_path), f"127.0.0.1:{free_port()}")


def test_one_of_another_authority_is_not(tmp_path: Path) -> None:
    create_authority(tmp_path / "other", "another authority")
    with (
        running(Place(tmp_path)) as broker,
        pytest.raises(BrokerError, check=coded("broker.untrusted_broker")),
    ):
        ask(
            broker.place, f"127.0.0.1:{broker.port}",
            "--ca", str(tmp_path / "other"),
        )  # fmt: skip


def test_one_that_has_another_name_is_not(tmp_path: Path) -> None:
    with (
        running(Place(tmp_path)) as broker,
        pytest.raises(BrokerError, check=coded("broker.untrusted_broker")),
    ):
        ask(broker.place, f"127.0.0.1:{broker.port}", "--name", "broker.example")


def test_one_whose_store_fails_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Place(tmp_path)) as broker:
        fail_store(broker, monkeypatch)
        with pytest.raises(BrokerUnavailable, check=coded("broker.store_unavailable")):
            ask(broker.place, f"127.0.0.1:{broker.port}")


def fail_store(broker: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(_: StoreView) -> None:
        raise BrokerUnavailable("the disk is full", code="broker.store_unavailable")

    monkeypatch.setattr(broker.store, "transact", refuse)


@pytest.mark.parametrize("at", ["localhost", "localhost:", ":8443", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_refused(at: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        ask(Place(tmp_path), at)
