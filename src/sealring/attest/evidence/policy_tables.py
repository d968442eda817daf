"""The tables of a policy that describe one kind of evidence each, read from TOML.

Mistakes are named with line and field. Each table must state the rules without which something
known gets in: an image of another firmware, an older image of the same signer, a machine that its
vendor no longer calls safe. A table that does without one names it under `unchecked`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from typing import Any, Final

from sealring.attest.evidence.policy import ImaRules, KindRules
from sealring.attest.evidence.snp import OTHER_BITS, PLATFORM_BITS, REGISTER_BYTES, TCB_BYTES
from sealring.attest.evidence.tpm.structures import BANKS
from sealring.attest.evidence.tpm.verify import RESETTABLE
from sealring.errors import BadPolicy
from sealring.limits import MAX_WORLD

_BITS: Final = 64


class Reader:
    def __init__(self, text: str) -> None:
        self.missing: list[str] = []
        """Rules that a table must state, or name under `unchecked`, and does neither."""
        self._lines = text.splitlines()
        try:
            self.document = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as problem:
            raise BadPolicy(f"the policy is not TOML: {problem}") from None

    def table(self, name: str, known: Collection[str]) -> dict[str, Any]:
        """Empty where it is missing."""
        table = self.document.get(name, {})
        if not isinstance(table, dict):
            raise self.bad("", name, f"is a table: [{name}]")
        self.known(table, known, name)
        return table

    def tables(self, name: str) -> list[dict[str, Any]]:
        """Of [[name]]; empty where there is none."""
        found = self.document.get(name, [])
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise self.bad("", name, f"is a list of tables: [[{name}]]")
        return found

    def ranks(self, entry: dict[str, Any], where: str) -> tuple[int, int]:
        """The first and the last."""
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", str(entry.get("ranks")), re.ASCII)
        first = int(match[1]) if match else 1
        last = int(match[2] or match[1]) if match else 0
        if not first <= last < MAX_WORLD:
            raise self.bad(where, "ranks", 'is "3" or "0-7"')
        return first, last

    def kinds(self, entry: dict[str, Any], where: str, known: Collection[str]) -> frozenset[str]:
        named = entry.get("kinds")
        if not isinstance(named, list) or not named or not all(one in known for one in named):
            raise self.bad(where, "kinds", "is a list of kinds that this policy describes")
        return frozenset(named)

    def digests(self, table: dict[str, Any], where: str, name: str, *sizes: int) -> frozenset[str]:
        """Each of one of the sizes, in bytes; without any, of at most 64."""
        found = table.get(name, [])
        counts = [str(size) for size in sizes] or ["1,64"]
        pattern = re.compile("|".join(rf"(?:[0-9a-f]{{2}}){{{count}}}" for count in counts))
        if not isinstance(found, list) or not all(
            isinstance(one, str) and pattern.fullmatch(one) for one in found
        ):
            listed = " or ".join(map(str, sizes))
            size_text = f"{listed} bytes each" if sizes else "at most 64 bytes each"
            raise self.bad(where, name, f"is a list of lower-case hexadecimal, {size_text}")
        return frozenset(found)

    def digest_lists(
        self, table: dict[str, Any], where: str, name: str, sizes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, frozenset[str]]:
        """A table of lists: {4 = ["..."], 7 = ["...", "..."]}, each of digests."""
        found = table.get(name, {})
        if not isinstance(found, dict):
            raise self.bad(where, name, "is a table of lists")
        inner = f"{where}.{name}"
        self.known(found, sizes, inner)
        lists = {key: self.digests(found, inner, key, *sizes[key]) for key in found}
        for key, values in lists.items():
            self.some(values, inner, key)
        return lists

    def words(
        self,
        table: dict[str, Any],
        where: str,
        name: str,
        known: Collection[str] | None,
        default: Collection[str] = (),
        longest: int = 63,
    ) -> frozenset[str]:
        found = table.get(name, list(default))
        if not isinstance(found, list) or not all(
            isinstance(one, str) and (one in known if known else 0 < len(one) <= longest)
            for one in found
        ):
            listed = ", ".join(sorted(known)) if known else "words"
            raise self.bad(where, name, f"is a list of {listed}")
        return frozenset(found)

    def number(
        self, table: dict[str, Any], where: str, name: str, least: int, most: int, default: int
    ) -> int:
        value = table.get(name, default)
        if type(value) is not int or not least <= value <= most:
            raise self.bad(where, name, f"is a number from {least} to {most}")
        return value

    def numbers(
        self, table: dict[str, Any], where: str, name: str, known: Collection[str], most: int
    ) -> dict[str, int]:
        found = table.get(name, {})
        if not isinstance(found, dict):
            raise self.bad(where, name, "is a table of numbers")
        inner = f"{where}.{name}"
        self.known(found, known, inner)
        return {key: self.number(found, inner, key, 0, most, 0) for key in found}

    def flags(
        self, table: dict[str, Any], where: str, name: str, known: Collection[str], others: str
    ) -> tuple[dict[str, int], int]:
        """Bits of a number by name, {smt = false}, as 0 and 1; and `others`, a list of positions,
        as a mask."""
        found = table.get(name, {})
        if not isinstance(found, dict):
            raise self.bad(where, name, "is a table of true and false")
        inner = f"{where}.{name}"
        self.known(found, {*known, others}, inner)
        positions = found.get(others, [])
        if not isinstance(positions, list) or not all(
            type(one) is int and 0 <= one < _BITS for one in positions
        ):
            raise self.bad(inner, others, f"is a list of positions of bits, 0 to {_BITS - 1}")
        named = {key: int(self.flag(found, inner, key, False)) for key in found if key != others}
        return named, sum(1 << one for one in set(positions))

    def flag(self, table: dict[str, Any], where: str, name: str, default: bool) -> bool:
        value = table.get(name, default)
        if type(value) is not bool:
            raise self.bad(where, name, "is true or false")
        return value

    def some(self, values: Collection[str], where: str, name: str) -> None:
        if not values:
            raise self.bad(where, name, "is empty or missing: it would admit nothing")

    def known(self, table: dict[str, Any], known: Collection[str], where: str) -> None:
        for name in table:
            if name not in known:
                listed = ", ".join(sorted(known))
                raise self.bad(where, name, f"is not known here; known: {listed}")

    def bad(self, where: str, name: str, must: str) -> BadPolicy:
        field = f"{where}.{name}" if where else name
        return BadPolicy(f"the policy, line {self.line(where, name)}: {field} {must}")

    def line(self, where: str, name: str) -> int:
        """Where the field stands; where its table starts if it does not; else line 1."""
        table, at = "", 0
        for number, line in enumerate(self._lines, 1):
            if match := re.match(r"\s*\[+\s*([\w.\s-]+?)\s*\]+", line):
                table = match[1].replace(" ", "")
                if table in (where, field := f"{where}.{name}".lstrip(".")):
                    at = at or number
                    if table == field:
                        return number
            elif match := re.match(r"\s*[\"']?([\w-]+)[\"']?\s*[=.]", line):
                # `minimum_tcb = {snp = 8}` holds its fields in one line.
                path = f"{table}.{match[1]}".lstrip(".")
                inline = f"{where}.".startswith(f"{path}.") and name in line
                if (table == where and match[1] == name) or inline:
                    return number
        return at or 1


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


_SIZES: Final = (32, 48, 64)


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


_SNP: Final = {
    "measurements", "signers", "registers", "products", "minimum_tcb", "guest_svn",
    "platform_info", "vmpl", "migration", "vlek", "unchecked",
}  # fmt: skip
_MEASURED: Final = {"pcrs", "events", "ima"}
_TDX: Final = {"measurements", "registers", "minimum_tcb", "tcb_status", "unchecked"}
_SGX: Final = {*_TDX, "signers"}
_PCR_BYTES: Final = {str(pcr): tuple(BANKS.values()) for pcr in range(24) if pcr not in RESETTABLE}
_TDX_REGISTERS: Final = (
    *(f"rtmr{n}" for n in range(4)), "mrconfigid", "mrowner", "mrownerconfig",
)  # fmt: skip
STATUSES: Final = {
    "UpToDate", "SWHardeningNeeded", "ConfigurationNeeded", "ConfigurationAndSWHardeningNeeded",
    "OutOfDate", "OutOfDateConfigurationNeeded",
}  # fmt: skip


def snp_rules(reader: Reader, where: str) -> KindRules:
    table = reader.table(where, _SNP)
    return _snp_rules(reader, table, where, Openings(reader, table, where))


def az_snp_vtpm_rules(reader: Reader, where: str) -> KindRules:
    """The launch measurement is the paravisor's; only PCRs tell what the guest itself booted."""
    table = reader.table(where, {*_SNP, *_MEASURED, "secure_boot"})
    openings = Openings(reader, table, where)
    pcrs, events = _measured(reader, table, where, openings, ("pcr4", "pcr7"))
    ima = read_ima(reader, table, where, openings)
    secure = reader.flag(table, where, "secure_boot", True)
    limits = {"insecure_boot": int(not secure)}
    return _snp_rules(reader, table, where, openings, pcrs, events, limits, ima)


def _snp_rules(
    reader: Reader,
    table: dict[str, Any],
    where: str,
    openings: Openings,
    pcrs: Mapping[str, frozenset[str]] | None = None,
    events: Mapping[str, frozenset[str]] | None = None,
    limits: Mapping[str, int] | None = None,
    ima: ImaRules | None = None,
) -> KindRules:
    measurements = reader.digests(table, where, "measurements", 48)
    signers = reader.digests(table, where, "signers", 48)
    reader.some(measurements | signers, where, "measurements")
    products = reader.words(table, where, "products", TCB_BYTES)
    minimum = _snp_minimum(reader, table, where, products, openings)
    if signers:
        openings.need("guest_svn", "guest_svn" in table)
    platform, others = reader.flags(table, where, "platform_info", PLATFORM_BITS, OTHER_BITS)
    openings.need("platform_info", bool(platform))
    return KindRules(
        measurements=measurements,
        signers=signers,
        products=products or frozenset(minimum),
        minimum_tcb=minimum,
        launch_tcb=bool(minimum) and openings.checks("launch_tcb"),
        limits={
            "vmpl": reader.number(table, where, "vmpl", 0, 3, 0),
            "migration": reader.number(table, where, "migration", 0, 1, 0),
            "vlek": int(reader.flag(table, where, "vlek", False)),
            **(limits or {}),
        },
        masks={"platform_unknown": others} if platform else {},
        floors={"guest_svn": reader.number(table, where, "guest_svn", 0, 2**32 - 1, 0)}
        if "guest_svn" in table
        else {},
        facts={f"platform_{name}": value for name, value in platform.items()},
        registers={
            **reader.digest_lists(
                table, where, "registers", {name: (size,) for name, size in REGISTER_BYTES.items()}
            ),
            **(pcrs or {}),
        },
        events=events or {},
        ima=ima,
        unchecked=openings.close(),
    )


def _snp_minimum(
    reader: Reader,
    table: dict[str, Any],
    where: str,
    products: frozenset[str],
    openings: Openings,
) -> dict[str, dict[str, int]]:
    """By product: AMD numbers each product's parts on its own, and Turin has one more."""
    found = table.get("minimum_tcb", {})
    if not isinstance(found, dict):
        raise reader.bad(where, "minimum_tcb", "is a table of products: {Milan = {snp = 8, ...}}")
    flat = any(type(value) is int for value in found.values())
    openings.need(
        "minimum_tcb",
        bool(found) and not flat,
        "one table for all products fits none, since AMD numbers each on its own" if flat else "",
    )
    if flat or not found:
        return {}
    inner = f"{where}.minimum_tcb"
    reader.known(found, TCB_BYTES, inner)
    minimum = {}
    for product in found:
        parts = TCB_BYTES[product]
        minimum[product] = reader.numbers(found, inner, product, parts, 255)
        if left_out := set(parts) - set(minimum[product]):
            raise reader.bad(
                inner, product, f"does not state {', '.join(sorted(left_out))}; 0 admits any"
            )
    if products and products != set(minimum):
        raise reader.bad(where, "products", "and minimum_tcb do not name the same products")
    return minimum


def tdx_rules(reader: Reader, where: str) -> KindRules:
    table = reader.table(where, {*_TDX, "events"})
    openings = Openings(reader, table, where)
    measurements = reader.digests(table, where, "measurements", 48)
    reader.some(measurements, where, "measurements")
    events = reader.digest_lists(table, where, "events", {f"rtmr{n}": (48,) for n in range(4)})
    registers = reader.digest_lists(table, where, "registers", dict.fromkeys(_TDX_REGISTERS, (48,)))
    for name in ("rtmr0", "rtmr1", "rtmr2"):
        openings.need(name, name in registers or name in events)
    return KindRules(
        measurements=measurements,
        registers=registers,
        events=events,
        minimum_tcb=_intel_minimum(reader, table, where, "module", "TDX"),
        tcb_status=_statuses(reader, table, where),
        unchecked=openings.close(),
    )


def az_tdx_vtpm_rules(reader: Reader, where: str) -> KindRules:
    """MRTD is the paravisor's; only PCRs tell what the guest itself booted."""
    table = reader.table(where, {*_TDX, *_MEASURED, "secure_boot"})
    openings = Openings(reader, table, where)
    measurements = reader.digests(table, where, "measurements", 48)
    reader.some(measurements, where, "measurements")
    pcrs, events = _measured(reader, table, where, openings, ("pcr4", "pcr7"))
    own = reader.digest_lists(table, where, "registers", dict.fromkeys(_TDX_REGISTERS, (48,)))
    secure = reader.flag(table, where, "secure_boot", True)
    return KindRules(
        measurements=measurements,
        registers={**own, **pcrs},
        events=events,
        ima=read_ima(reader, table, where, openings),
        limits={"insecure_boot": int(not secure)},
        minimum_tcb=_intel_minimum(reader, table, where, "module", "TDX"),
        tcb_status=_statuses(reader, table, where),
        unchecked=openings.close(),
    )


def sgx_rules(reader: Reader, where: str) -> KindRules:
    table = reader.table(where, _SGX)
    openings = Openings(reader, table, where)
    measurements = reader.digests(table, where, "measurements", 32)
    signers = reader.digests(table, where, "signers", 32)
    reader.some(measurements | signers, where, "measurements")
    registers = reader.digest_lists(table, where, "registers", {"isvprodid": (2,)})
    minimum = _intel_minimum(reader, table, where, "isvsvn", "SGX")
    if signers:
        stated = "isvsvn" in minimum.get("SGX", {})
        openings.need("isvsvn", stated)
        openings.need("isvprodid", "isvprodid" in registers)
    return KindRules(
        measurements=measurements,
        signers=signers,
        registers=registers,
        minimum_tcb=minimum,
        tcb_status=_statuses(reader, table, where),
        unchecked=openings.close(),
    )


def _intel_minimum(
    reader: Reader, table: dict[str, Any], where: str, own: str, product: str
) -> dict[str, dict[str, int]]:
    found = reader.numbers(table, where, "minimum_tcb", {own, "evaluation"}, 65535)
    return {product: found} if found else {}


def _statuses(reader: Reader, table: dict[str, Any], where: str) -> frozenset[str]:
    statuses = reader.words(table, where, "tcb_status", STATUSES, ["UpToDate"])
    reader.some(statuses, where, "tcb_status")
    return statuses


def tpm_rules(reader: Reader, where: str) -> KindRules:
    table = reader.table(where, {*_MEASURED, "roots", "ak_certificates", "unchecked"})
    openings = Openings(reader, table, where)
    registers, events = _measured(reader, table, where, openings, ("pcr0", "pcr4", "pcr7"))
    certified = reader.flag(table, where, "ak_certificates", False)
    return KindRules(
        registers=registers,
        events=events,
        ima=read_ima(reader, table, where, openings),
        limits={"ak_certificate": int(certified)},
        unchecked=openings.close(),
    )


def simulated_rules(reader: Reader, where: str) -> KindRules:
    table = reader.table(where, {"measurements", "minimum_tcb", "roots"})
    measurements = reader.digests(table, where, "measurements")
    reader.some(measurements, where, "measurements")
    minimum = reader.numbers(table, where, "minimum_tcb", {"simulated"}, 255)
    return KindRules(
        measurements=measurements, minimum_tcb={"SIMULATED": minimum} if minimum else {}
    )


def _measured(
    reader: Reader,
    table: dict[str, Any],
    where: str,
    openings: Openings,
    needed: tuple[str, ...],
) -> tuple[dict[str, frozenset[str]], dict[str, frozenset[str]]]:
    """PCRs by their values, by what they were extended with, or both."""
    pcrs, events = (
        {
            f"pcr{number}": values
            for number, values in reader.digest_lists(table, where, name, _PCR_BYTES).items()
        }
        for name in ("pcrs", "events")
    )
    reader.some({*pcrs, *events}, where, "pcrs")
    for name in needed:
        openings.need(name, name in pcrs or name in events)
    return pcrs, events
