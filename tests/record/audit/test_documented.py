"""docs/audit-findings.md lists every lie under test and how the audit finds it.

`python -m tests.record.audit.test_documented` prints the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sealring.record.audit.claims import read_claims
from sealring.record.audit.findings import Fault
from tests.record.audit import lies, test_machines

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "audit-findings.md").read_text()


def rows() -> Iterator[str]:
    told = {name: (lie.who, [fault for fault, _ in lie.found]) for name, lie in lies.LIES.items()}
    told |= {name: (who, [fault]) for name, (who, _, _, fault) in test_machines.LIES.items()}
    for name, (who, faults) in told.items():
        ways = ", ".join(dict.fromkeys(one.way.value for one in faults))
        words = ", ".join(dict.fromkeys(f"`{one.value}`" for one in faults))
        yield f"| {who} | {name} | {ways} | {words} |"


def test_the_table_of_lies_is_that_of_the_tests() -> None:
    missing = [row for row in rows() if row not in PAGE]
    assert not missing


def test_there_are_no_others_in_the_table() -> None:
    table = PAGE.partition("| who | the lie | found by | what the audit says |")[2]
    shown = table.partition("\n\n")[0].splitlines()[2:]
    assert shown == list(rows())


def test_every_fault_is_explained() -> None:
    assert [fault.value for fault in Fault if f"`{fault.value}`" not in PAGE] == []


def test_the_claims_of_the_page_can_be_read(tmp_path: Path) -> None:
    text = (DOCS / "audits.md").read_text().partition("```toml\n")[2].partition("```")[0]
    for short in ("3f9a...", "91bc...", "12ab..."):
        assert short in text
        text = text.replace(short, "ab" * 32)
    (tmp_path / "claims.toml").write_text(text)
    (tmp_path / "policy.toml").write_text(
        f'version = 1\n[simulated]\nroots = ["{"ab" * 32}"]\nmeasurements = ["{"cd" * 32}"]\n'
    )
    assert read_claims(tmp_path / "claims.toml").ranks == 16


if __name__ == "__main__":
    print("\n".join(rows()))
