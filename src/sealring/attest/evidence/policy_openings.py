"""The rules that keep a known hole shut, and the one way to leave such a hole open: by its name."""

from __future__ import annotations

from typing import Any, Final

from sealring.attest.evidence.policy_reader import Reader

PASSES_WITHOUT: Final = {
    "minimum_tcb": "hosts pass whose firmware and microcode have known holes",
    "launch_tcb": "guests pass that were launched before the host's firmware was repaired",
    "platform_info": "hosts pass whatever their memory checks, SMT and power reporting are",
    "guest_svn": "every older image that the signer signed passes",
    "rtmr0": "any configuration of the firmware passes, with Secure Boot on or off",
    "rtmr1": "any boot loader and kernel pass, since MRTD is of the firmware alone",
    "rtmr2": "any kernel command line and initial RAM disk pass",
    "pcr0": "any firmware passes, and firmware can bring every other PCR to the listed values",
    "pcr4": "any boot loader passes, and it can bring the PCRs above 7 to the listed values",
    "pcr7": "a machine with Secure Boot off, or with other keys for it, passes",
    "ima": "whatever files ran after the boot pass",
    "ima_violations": "files pass that were written while they were measured or in use",
    "isvsvn": "every older enclave that the signer signed passes",
    "isvprodid": "the signer's other products pass",
}


class Openings:
    """The rules of one table that must be stated, unless its `unchecked` names them."""

    def __init__(self, reader: Reader, table: dict[str, Any], where: str) -> None:
        self._reader, self._where = reader, where
        self.named = reader.words(table, where, "unchecked", None)
        self._asked: set[str] = set()

    def need(self, name: str, stated: bool, because: str = "") -> None:
        """`because` says why what is stated does not count, where that is so."""
        self._asked.add(name)
        if stated and name in self.named:
            raise self._reader.bad(self._where, "unchecked", f"names {name}, which is stated")
        if not stated and name not in self.named:
            line = self._reader.line(self._where, name)
            self._reader.missing.append(
                f"line {line}: {self._where}.{name} is missing: {because or PASSES_WITHOUT[name]}. "
                "State it, or leave it open in so many words: "
                f'unchecked = ["{name}"] in [{self._where}]'
            )

    def checks(self, name: str) -> bool:
        """For a rule that needs no value: it holds unless it is left open."""
        self._asked.add(name)
        return name not in self.named

    def close(self) -> frozenset[str]:
        """What was left open. A name that leaves nothing open is a mistake."""
        if idle := sorted(self.named - self._asked):
            could = ", ".join(sorted(self._asked)) or "nothing"
            raise self._reader.bad(
                self._where,
                "unchecked",
                f"names {', '.join(idle)}; this table can leave open: {could}",
            )
        return self.named
