"""A broker's files, and hosts with software TPMs that its policy admits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from sealring.attest.evidence.tpm.commands import Tpm
from tests.attest import minting
from tests.attest.broker.local import Place
from tests.attest.minting import pem
from tests.attest.minting.tpm import Maker
from tests.cli.namespaces import tpm_of


@dataclass(frozen=True)
class TpmHosts:
    place: Place
    addresses: list[str]
    """The addresses of the TPMs, one for each rank: a TPM serves one process at a time."""
    chain: Path

    def environment(self, port: int) -> dict[str, str]:
        """The environment of a worker that joins here. The setting `tpm` is each rank's own."""
        return {
            **self.place.environment(port),
            "SEALRING_ATTESTER": f"tpm:{self.chain}",
        }


@contextmanager
def tpm_hosts(folder: Path, count: int, *, top: str = "", more: str = "") -> Iterator[TpmHosts]:
    """`top` and `more` are lines of the policy before and after the tables for these TPMs."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(minting, "NOW", datetime.now(UTC))
        maker = Maker()
        place = Place(folder / "broker")
        addresses = []
        for rank in range(count):
            (folder / f"host{rank}").mkdir()
            addresses.append(stack.enter_context(tpm_of(maker, folder / f"host{rank}")))
        with Tpm.open(addresses[0]) as tpm:
            shown = tpm.read_pcrs([4]).hex()
        place.policy.write_text(
            f"version = 1\n{top}\n[freshness]\nrequire_revocation_lists = false\n"
            f'[tpm]\nroots = ["{maker.root.fingerprint}"]\npcrs = {{4 = ["{shown}"]}}\n'
            f'unchecked = ["pcr0", "pcr7", "ima"]\n{more}\n'
        )
        (folder / "chain.pem").write_text(pem(maker.signer, maker.root))
        yield TpmHosts(place, addresses, folder / "chain.pem")
