"""docs/audit-findings.md lists every lie under test and how the audit finds it.

`python -m tests.record.audit.test_documented` prints the lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sealring.record.audit.claims import read_claims
from sealring.record.audit.findings import Fault
from tests.record.audit import lies, test_machines

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "audit-findings.md").read_text()


def lists() -> dict[str, list[str]]:
    """Return a list for each party that lies, with an item for each lie and what the audit says."""
    told = {name: (lie.who, [fault for fault, _ in lie.found]) for name, lie in lies.LIES.items()}
    told |= {name: (who, [fault]) for name, (who, _, _, fault) in test_machines.LIES.items()}
    found: dict[str, list[str]] = {}
    for name, (who, faults) in told.items():
        words = ", ".join(dict.fromkeys(f"`{one.value}`" for one in faults))
        found.setdefault(who, []).append(f"- {name}: {words}")
    return found


def shown() -> Iterator[tuple[str, list[str]]]:
    chapter = PAGE.partition("## Lies, and how they are found\n")[2].partition("\n## ")[0]
    for section in chapter.split("\n### ")[1:]:
        title, *lines = section.splitlines()
        yield title[0].lower() + title[1:], [line for line in lines if line]


def test_the_lists_of_lies_are_those_of_the_tests() -> None:
    assert list(shown()) == list(lists().items())


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
    for who, items in lists().items():
        print(f"### {who[0].upper()}{who[1:]}", "", *items, "", sep="\n")
