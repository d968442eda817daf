"""Which files a machine may have measured since it booted: the table `ima` of a kind with PCRs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sealring.attest.evidence.policy_openings import Openings
from sealring.attest.evidence.policy_reader import Reader
from sealring.attest.evidence.policy_rule import Rule, judged
from sealring.attest.evidence.worker import DescribedWorker
from sealring.errors import MeasurementNotAllowed

_SIZES: Final = (32, 48, 64)
_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class ImaRules:
    files: Mapping[str, frozenset[str]]
    """By path, the digests that it may have."""
    exclude: frozenset[str]
    """Paths, and directories with a slash at their end, that are not asked for."""
    violations: bool
    """False: a file that changed while it was measured or in use is refused."""

    digest: str = field(init=False)
    """The same for rules that say the same. A certificate names the rules that it was given by: it
    cannot hold the list of files."""

    def __post_init__(self) -> None:
        text = json.dumps(
            [
                {path: sorted(digests) for path, digests in self.files.items()},
                sorted(self.exclude),
                self.violations,
            ],
            sort_keys=True,
        )
        object.__setattr__(self, "digest", hashlib.sha256(text.encode()).hexdigest())

    def admits(self, path: str, digests: tuple[str, ...]) -> bool:
        if any(path == one or (one.endswith("/") and path.startswith(one)) for one in self.exclude):
            return True
        return set(digests) <= self.files.get(path, frozenset())


def read_ima(
    reader: Reader, table: dict[str, Any], where: str, openings: Openings
) -> ImaRules | None:
    """None where the policy says that it does without."""
    found = table.get("ima", {})
    inner = f"{where}.ima"
    if not isinstance(found, dict):
        raise reader.bad(where, "ima", f"is a table: [{inner}]")
    openings.need("ima", "ima" in table)
    if "ima" not in table:
        return None
    reader.known(found, {"files", "exclude"}, inner)
    paths = found.get("files", {})
    sizes = dict.fromkeys(paths, _SIZES) if isinstance(paths, dict) else {}
    files = reader.digest_lists(found, inner, "files", sizes)
    reader.some(files, inner, "files")
    exclude = reader.words(found, inner, "exclude", None, longest=1024)
    for path in exclude:
        if not path.startswith("/") or path == "/":
            raise reader.bad(inner, "exclude", f"holds {path!r}; it lists /a/file or /a/directory/")
    return ImaRules(files, exclude, violations=not openings.checks("ima_violations"))


def judge_ima(rules: ImaRules | None, worker: DescribedWorker) -> list[Rule]:
    if rules is None:
        return []
    wanted = f"only files of {len(rules.files)} listed"
    if worker.ima_rules:
        # A certificate's word: its broker saw the list, and judged it by rules of this digest.
        same = worker.ima_rules == rules.digest
        found = "judged by the same rules" if same else "judged by other rules"
        return [_judged("ima", same, wanted, found), *_violations(rules, worker)]
    if not worker.ima_entries:
        return [_judged("ima", False, wanted, "no list of measured files")]
    others = [path for path, digests in worker.ima_files.items() if not rules.admits(path, digests)]
    shown = ", ".join(f"{path} ({worker.ima_files[path][-1]})" for path in others[:_SHOWN])
    more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    found = f"{worker.ima_entries} entries, others: {shown or 'none'}{more}"
    return [_judged("ima", not others, wanted, found), *_violations(rules, worker)]


def _violations(rules: ImaRules, worker: DescribedWorker) -> list[Rule]:
    if rules.violations:
        return []
    found = str(worker.ima_violations)
    return [_judged("ima violations", not worker.ima_violations, "none", found)]


def _judged(name: str, passed: bool, wanted: str, found: str) -> Rule:
    return judged(name, passed, wanted, found, MeasurementNotAllowed)
