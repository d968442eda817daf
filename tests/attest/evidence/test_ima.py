"""The kernel's list of measured files, replayed against PCR 10."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sealring.attest.evidence.tpm.ima import read_entries, replay_ima
from sealring.attest.evidence.tpm.structures import SHA384
from sealring.errors import (
    ForgedEvidence,
    MalformedEvidence,
)
from tests.attest.evidence.ima_lists import (
    BOOTED,
    EVIL,
    GOOD,
    KEY,
    PCRS,
    PYTHON,
    TORCH,
    File,
    listed,
    quoted,
    sized,
    value_of,
)
from tests.codes import coded


def test_a_list_that_leads_to_the_quoted_value() -> None:
    found = replay_ima(listed(*GOOD), quoted(*GOOD))
    assert (found.entries, found.violations) == (4, 0)
    assert found.files == {one.path: (one.digest.hex(),) for one in (PYTHON, TORCH, KEY)}


def test_a_file_measured_again_with_other_content() -> None:
    again = replace(PYTHON, content=b"another python")
    files = (*GOOD, again, PYTHON)
    found = replay_ima(listed(*files), quoted(*files))
    assert found.files[PYTHON.path] == (PYTHON.digest.hex(), again.digest.hex())


def test_the_bank_of_sha_384() -> None:
    pcrs = {pcr: bytes([pcr]) * 48 for pcr in range(10)}
    booted = File("boot_aggregate", b"".join(pcrs.values()), algorithm="sha384")
    files = (booted, PYTHON)
    log = listed(*files)
    found = replay_ima(log, {**pcrs, 10: value_of(*files, bank="sha384")}, SHA384)
    assert found.files == {PYTHON.path: (PYTHON.digest.hex(),)}
    with pytest.raises(ForgedEvidence):
        replay_ima(log, quoted(*files), SHA384)


def test_a_list_that_grew_after_the_quote_counts_as_far_as_it_was_quoted() -> None:
    log, pcrs = listed(*GOOD, EVIL), quoted(*GOOD)
    found = replay_ima(log, pcrs)
    assert (found.entries, found.end) == (4, len(listed(*GOOD)))
    assert EVIL.path not in found.files
    # The rest is not read, so it may be anything.
    assert replay_ima(listed(*GOOD) + b"noise", pcrs) == found


@pytest.mark.threat("E24")
def test_entries_left_out_added_exchanged_or_changed() -> None:
    pcrs = quoted(*GOOD)
    for files in (
        GOOD[:-1], GOOD[1:], (), (*GOOD[:2], EVIL, *GOOD[2:]), (GOOD[1], GOOD[0], *GOOD[2:]),
        (BOOTED, replace(PYTHON, content=b"other"), TORCH, KEY),
        (BOOTED, replace(PYTHON, path="/usr/bin/python3.12"), TORCH, KEY),
        (BOOTED, PYTHON, replace(TORCH, more=b""), KEY),
        (BOOTED, replace(PYTHON, violation=True), TORCH, KEY),
    ):  # fmt: skip
        with pytest.raises(ForgedEvidence, match="PCR 10"):
            replay_ima(listed(*files), pcrs)


@pytest.mark.threat("E24")
def test_no_byte_of_what_was_extended_can_be_changed() -> None:
    log, pcrs = listed(*GOOD), quoted(*GOOD)
    good = replay_ima(log, pcrs)
    for at_byte in range(len(log)):
        bent = log[:at_byte] + bytes([log[at_byte] ^ 1]) + log[at_byte + 1 :]
        try:
            found = replay_ima(bent, pcrs)
        except (ForgedEvidence, MalformedEvidence):
            continue
        # The kernel's SHA-1 of an entry is not checked, except for whether it is zero.
        assert (found.files, found.violations) == (good.files, 0)


@pytest.mark.threat("E24")
def test_a_machine_without_ima_shows_no_list() -> None:
    for pcr10 in (bytes(32), b"\xff" * 32):
        with pytest.raises(ForgedEvidence):
            replay_ima(listed(*GOOD), {**PCRS, 10: pcr10})
    with pytest.raises(ForgedEvidence):
        replay_ima(b"", {**PCRS, 10: bytes(32)})
    with pytest.raises(ForgedEvidence):
        replay_ima(listed(*GOOD), PCRS)


@pytest.mark.threat("E25")
def test_lists_that_are_cut_or_of_another_form() -> None:
    log = listed(*GOOD)
    ends = [entry.end for entry in read_entries(log)]
    for size in range(1, len(log)):
        if size not in ends:
            with pytest.raises(MalformedEvidence):
                list(read_entries(log[:size]))
    for template in ("ima", "ima-ngv2", "ima-modsig", "x" * 40, ""):
        with pytest.raises(
            MalformedEvidence, match="template", check=coded("evidence.unknown_evidence")
        ):
            list(read_entries(listed(replace(PYTHON, template=template))))
    with pytest.raises(MalformedEvidence, match="PCR 11", check=coded("evidence.unknown_evidence")):
        list(read_entries(listed(replace(PYTHON, pcr=11))))
    head = PYTHON.entry[: 24 + 4 + len("ima-ng")]
    for digest, path in (
        (b"sha256:" + bytes(32), b"/x\0"), (b"sha256:\0", b"/x\0"), (b":\0" + bytes(32), b"/x\0"),
        (b"SHA:\0" + bytes(32), b"/x\0"), (b"sha256:\0" + bytes(65), b"/x\0"),
        (b"sha256:\0" + bytes(32), b"/x"), (b"sha256:\0" + bytes(32), b"/x\0y\0"),
        (b"sha256:\0" + bytes(32), b""),
    ):  # fmt: skip
        with pytest.raises(MalformedEvidence):
            list(read_entries(head + sized(sized(digest) + sized(path))))
    extra = head + sized(PYTHON.data + b"\0")
    with pytest.raises(MalformedEvidence):
        list(read_entries(extra))


@pytest.mark.threat("E25")
def test_a_list_without_an_end() -> None:
    with pytest.raises(MalformedEvidence, match="more than 8192"):
        replay_ima(PYTHON.entry * 8193, quoted(*GOOD))
