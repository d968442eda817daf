"""A machine makes a TDX quote and shows another machine's certificate with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sealring.attest.evidence import verify_evidence
from sealring.errors import ForgedEvidence
from tests.attest.minting import CHALLENGE
from tests.attest.minting.intel import Intel, tdx_body


@pytest.mark.threat("E9")
def test_a_barred_machine_shows_the_certificate_of_another() -> None:
    """The collateral was fetched for the barred machine; its certificates must not be used here."""
    barred = Intel()
    another = barred.another(b"another machine.")
    quote = barred.quote(tdx_body(CHALLENGE.report_data("tdx")), shown=another.pck)
    evidence = replace(barred.evidence(), parts={"quote": quote})
    fetched = barred.trust(barred.collateral(with_pck=True))
    with pytest.raises(ForgedEvidence):
        verify_evidence(evidence, CHALLENGE, fetched)
