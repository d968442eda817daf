"""Measured files compared with the policy, and the evidence that shows them."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from sealring.attest.evidence import judge, parse_policy, verify_evidence
from sealring.attest.evidence.attesters import TpmAttester
from sealring.attest.evidence.policy import Policy, explain, new_policy, tables_from
from sealring.attest.evidence.tpm import machine as machine_module
from sealring.attest.evidence.tpm.commands import OWNER, PASSWORD, Tpm
from sealring.attest.evidence.tpm.ima import MAX_BYTES, matching_ima, replay_ima
from sealring.attest.evidence.tpm.machine import Logs, TpmMachine
from sealring.attest.evidence.tpm.structures import SHA256
from sealring.attest.evidence.worker import DescribedWorker, claims_in, encode_claims, parse_claims
from sealring.errors import BadPolicy, ForgedEvidence, PolicyRefusal
from tests.attest.broker.local import JOB, running
from tests.attest.broker.test_every_kind import at
from tests.attest.evidence import swtpm
from tests.attest.evidence.ima_lists import (
    EVIL,
    GOOD,
    KEY,
    PYTHON,
    TORCH,
    File,
    listed,
    measure,
    quoted,
    value_of,
)
from tests.attest.minting import CHALLENGE, NOW
from tests.attest.minting.amd import MEASUREMENT, Amd
from tests.attest.minting.tpm import AzureGuest, Maker
from tests.codes import coded


def policy(*files: File, more: str = "", unchecked: str = "") -> Policy:
    named = "".join(f'"{one.path}" = ["{one.digest.hex()}"]\n' for one in files)
    open_too = f', "{unchecked}"' if unchecked else ""
    return parse_policy(
        "version = 1\n[freshness]\nrequire_revocation_lists = false\n"
        f'[tpm]\nroots = ["{"ab" * 32}"]\n'
        f'pcrs = {{1 = ["{"00" * 32}"]}}\nunchecked = ["pcr0", "pcr4", "pcr7"{open_too}]\n'
        f"[tpm.ima]\n{more}\n[tpm.ima.files]\n{named}"
    )


def worker(log: bytes, pcrs: dict[int, bytes]) -> DescribedWorker:
    found = replay_ima(log, pcrs)
    return DescribedWorker(
        kind="tpm", product="2.0", devices=(), verified_at=NOW, not_after=NOW,
        registers={"pcr1": "00" * 32}, guest={"ak_certificate": 0}, ima_entries=found.entries,
        ima_violations=found.violations, ima_files=found.files,
    )  # fmt: skip


def failed(policy: Policy, one: DescribedWorker) -> list[str]:
    return [rule.name for rule in judge(policy, one, None).rules if rule.refusal]


@pytest.mark.threat("E24")
def test_only_listed_files_pass_and_the_first_others_are_named() -> None:
    rules = policy(PYTHON, TORCH, KEY)
    assert failed(rules, worker(listed(*GOOD), quoted(*GOOD))) == []
    for files in (
        (*GOOD, EVIL),
        (*GOOD, replace(PYTHON, content=b"another python")),
        (*GOOD, replace(PYTHON, algorithm="sha1")),
        (*GOOD, File("boot_aggregate", b"of another boot")),
    ):
        one = worker(listed(*files), quoted(*files))
        assert failed(rules, one) == ["ima"]
        with pytest.raises(
            PolicyRefusal, match=files[-1].path, check=coded("policy.measurement_not_allowed")
        ):
            judge(rules, one, None).require()
    many = (*GOOD, *(replace(EVIL, path=f"/evil/{n}") for n in range(9)))
    with pytest.raises(
        PolicyRefusal, match=r"/evil/4 .* and 4 more", check=coded("policy.measurement_not_allowed")
    ):
        judge(rules, worker(listed(*many), quoted(*many)), None).require()


@pytest.mark.threat("E24")
def test_a_worker_without_a_list_does_not_pass() -> None:
    bare = replace(worker(listed(*GOOD), quoted(*GOOD)), ima_entries=0, ima_files={})
    assert failed(policy(PYTHON), bare) == ["ima"]


def test_excluded_paths_and_directories() -> None:
    rules = policy(PYTHON, TORCH, KEY, more='exclude = ["/tmp/", "/etc/motd"]')
    for path, passes in (
        ("/tmp/x", True), ("/tmp/a/b", True), ("/etc/motd", True), ("/tmpx", False),
        ("/tmp", False), ("/etc/motd2", False), ("/var/tmp/x", False),
    ):  # fmt: skip
        files = (*GOOD, replace(EVIL, path=path))
        one = worker(listed(*files), quoted(*files))
        assert failed(rules, one) == ([] if passes else ["ima"]), path


@pytest.mark.threat("E25")
def test_a_violation_does_not_pass_whatever_path_it_names() -> None:
    """The TPM did not see the path, so the sender of the list can write any path there."""
    violation = File("/usr/bin/changed", b"", violation=True)
    excluded = policy(PYTHON, TORCH, KEY, more='exclude = ["/tmp/"]')
    told = replace(violation, path="/tmp/x")
    assert value_of(*GOOD, violation) == value_of(*GOOD, told)
    for one in (violation, told):
        shown = worker(listed(*GOOD, one), quoted(*GOOD, violation))
        assert shown.ima_violations == 1
        assert failed(excluded, shown) == ["ima violations"]
        named = policy(PYTHON, TORCH, KEY, unchecked="ima_violations")
        assert failed(named, shown) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "tpm.ima is missing: whatever files ran after the boot pass"),
        ('unchecked = ["ima", "ima_violations"]', "can leave open: ima"),
        ("ima = 7", "is a table"),
        ("[tpm.ima]", "tpm.ima.files is empty or missing"),
        ('[tpm.ima.files]\n"/x" = []', "is empty"),
        ('[tpm.ima.files]\n"/x" = ["00"]', "32 or 48 or 64 bytes"),
        ("[tpm.ima]\nfiles = 7", "is a table of lists"),
        ("[tpm.ima]\nmore = 7", "is not known here"),
        (f'[tpm.ima]\nexclude = ["/"]\nfiles = {{"/x" = ["{"00" * 32}"]}}', "exclude holds '/'"),
        (
            f'[tpm.ima]\nexclude = ["tmp"]\nfiles = {{"/x" = ["{"00" * 32}"]}}',
            "exclude holds 'tmp'",
        ),
        (f'unchecked = ["ima"]\n[tpm.ima.files]\n"/x" = ["{"00" * 32}"]', "names ima, which is"),
    ],
)
def test_policies_that_say_too_little_or_nonsense(text: str, said: str) -> None:
    base = f'version = 1\n[tpm]\nroots = ["{"ab" * 32}"]\n'
    base += "pcrs = {" + ", ".join(f'{n} = ["{"00" * 32}"]' for n in (0, 4, 7)) + "}\n"
    with pytest.raises(BadPolicy) as caught:
        parse_policy(base + text)
    assert said in str(caught.value)


@pytest.mark.threat("E26")
def test_a_policy_is_told_in_words_and_written_from_evidence() -> None:
    rules = policy(PYTHON, TORCH, more='exclude = ["/tmp/"]', unchecked="ima_violations")
    told = [clause.text for clause in explain(rules) if clause.about == "tpm"]
    assert "ima: only files of 2 listed." in told
    assert "ima.exclude: any file passes that is measured as one of /tmp/." in told
    assert any(clause.open and "ima_violations" in clause.text for clause in explain(rules))
    # A machine's paths may hold any text, and none of it may become a rule.
    odd = File('/a"]\n[tpm]\nunchecked = ["ima"]\\\x7fé', b"odd")
    one = worker(listed(*GOOD, odd), quoted(*GOOD, odd))
    shown = replace(one, registers={f"pcr{n}": "00" * 32 for n in (0, 4, 7)})
    tables = tables_from([shown], {"tpm": ["ab" * 32]})
    text = new_policy("gpt", tables)
    assert set(tomllib.loads(text)["tpm"]["ima"]["files"]) == set(one.ima_files)
    written = parse_policy(text)
    assert written.kinds["tpm"].unchecked == frozenset()
    assert "ima" not in failed(written, shown)


def test_evidence_without_a_list_leaves_the_rule_open_by_name() -> None:
    one = worker(listed(*GOOD), quoted(*GOOD))
    bare = replace(
        one, ima_entries=0, ima_files={}, registers={f"pcr{n}": "00" * 32 for n in (0, 4, 7)}
    )
    weak = replace(bare, ima_entries=1, ima_files={"/x": ("sha1:" + "00" * 20,)})
    for shown in (bare, weak):
        text = new_policy(None, tables_from([shown], {"tpm": ["ab" * 32]}))
        assert parse_policy(text).kinds["tpm"].unchecked == {"ima"}


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[Tpm, Maker]]:
    """A software TPM. Tests extend its PCR 10 as a kernel does."""
    with swtpm.running() as address, Tpm.open(address) as tpm:
        with tpm.primary(machine_module.EK_P256) as (_, public):
            x, y = (int.from_bytes(part, "big") for part in (public[-66:-34], public[-32:]))
        yield tpm, Maker(ek=ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key())


@swtpm.needs_swtpm
@pytest.mark.threat("E24")
def test_a_real_tpm_joins_by_its_measured_files_and_leaves_by_them(
    real: tuple[Tpm, Maker], tmp_path: Path
) -> None:
    tpm, maker = real
    booted = File("boot_aggregate", tpm.read_pcrs(tuple(range(10))))
    files = (booted, PYTHON, TORCH)
    measure(tpm, *files)
    path = tmp_path / "binary_runtime_measurements"
    path.write_bytes(listed(*files))
    rules = f'[tpm]\nroots = ["{maker.root.fingerprint}"]\npcrs = {{4 = ["{"00" * 32}"]}}\n'
    rules += 'unchecked = ["pcr0", "pcr7"]\n[tpm.ima.files]\n'
    rules += "".join(f'"{one.path}" = ["{one.digest.hex()}"]\n' for one in files[1:])
    machine = TpmMachine(tpm, maker.chain[1:], maker.ek.der, Logs(tmp_path / "none", path))
    place = at(tmp_path, (TpmAttester(machine), maker.trust(), rules))
    with running(place) as broker:
        claimed = claims_in(broker.join(0).certificate)
        assert claimed is not None
        # A peer has the certificate's claim and the same rules. With other rules it refuses.
        assert claimed.ima_entries == 3
        assert claimed.ima_files == {}
        own = parse_policy(place.policy.read_text())
        assert judge(own, claimed, 0, JOB).admitted
        other = place.policy.read_text().replace(PYTHON.path, "/usr/bin/python3.12")
        assert failed(parse_policy(other), claimed) == ["ima"]
        # The list and the PCR grew before the next quote.
        path.write_bytes(listed(*files, EVIL))
        broker.join(1)
        measure(tpm, EVIL)
        with pytest.raises(
            PolicyRefusal, match=EVIL.path, check=coded("policy.measurement_not_allowed")
        ):
            broker.join(2)
        # Without the entry, the list no longer leads to the PCR, so the worker leaves it out.
        path.write_bytes(listed(*files))
        with pytest.raises(
            PolicyRefusal, match="no list", check=coded("policy.measurement_not_allowed")
        ):
            broker.join(2)


def test_a_list_that_is_sent_and_does_not_replay_is_forged() -> None:
    maker = Maker()
    evidence = maker.evidence()
    sent = replace(evidence, parts={**evidence.parts, "ima_log": listed(*GOOD)})
    with pytest.raises(ForgedEvidence, match="PCR 10"):
        verify_evidence(sent, maker.challenge(), maker.trust())


@swtpm.needs_swtpm
def test_an_azure_guest_shows_its_measured_files(tmp_path: Path) -> None:
    from sealring.attest.evidence.guest import AK, HCL_REPORT, AzureMachine
    from tests.attest.evidence.test_making import RSA_AK

    amd = Amd()
    with swtpm.running() as address, Tpm.open(address) as tpm:
        with tpm.primary(RSA_AK) as (handle, public):
            tpm.call("EvictControl", 0x120, (OWNER, handle), (PASSWORD,), AK.to_bytes(4, "big"))
        guest = AzureGuest(amd, modulus=int.from_bytes(public[-256:], "big"))
        swtpm.store(tpm, HCL_REPORT, guest.hcl_report(pad=0))
        measure(tpm, PYTHON)
        path = tmp_path / "list"
        path.write_bytes(listed(PYTHON, EVIL))
        machine = AzureMachine(tpm, amd.chain, logs=Logs(files=path))
        evidence = machine.attest(CHALLENGE.nonce, CHALLENGE.public_key)
    assert evidence.parts["ima_log"] == listed(PYTHON)
    one = verify_evidence(evidence, CHALLENGE, amd.trust())
    assert one.ima_files == {PYTHON.path: (PYTHON.digest.hex(),)}
    text = f'version = 1\n[az-snp-vtpm]\nmeasurements = ["{MEASUREMENT.hex()}"]\n'
    text += (
        f'pcrs = {{4 = ["{"00" * 32}"]}}\nunchecked = ["minimum_tcb", "platform_info", "pcr7"]\n'
    )
    text += f'[az-snp-vtpm.ima.files]\n"{PYTHON.path}" = ["{PYTHON.digest.hex()}"]\n'
    assert "ima" not in failed(parse_policy(text), one)
    assert "ima" in failed(parse_policy(text.replace(PYTHON.path, "/x")), one)


def test_the_certificates_word_on_files_is_short_and_names_the_rules() -> None:
    maker = Maker()
    one = verify_evidence(maker.evidence(), maker.challenge(), maker.trust())
    own = policy(PYTHON)
    rules = own.kinds["tpm"]["ima"]
    claimed = parse_claims(encode_claims(one, "00" * 32, "00" * 32, rules.digest))
    assert (claimed.ima_rules, claimed.ima_files) == (rules.digest, {})
    without = parse_claims(encode_claims(one, "00" * 32, "00" * 32))
    assert "ima" in failed(own, without)


def test_what_a_worker_does_not_send(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "list"
    pcrs = quoted(*GOOD)

    def sent(content: bytes | None, pcrs: dict[int, bytes] = pcrs) -> bytes:
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with caplog.at_level(logging.WARNING, "sealring"):
            return matching_ima(pcrs, SHA256, path)

    assert sent(listed(*GOOD, EVIL)) == listed(*GOOD)
    assert sent(None) == sent(listed(EVIL)) == sent(b"noise") == b""
    assert "cannot be shown" in caplog.text
    assert "does not lead to" in caplog.text
    long = tuple(File(f"/{'x' * 2000}/{n}") for n in range(200))
    assert len(listed(*long)) > MAX_BYTES
    assert sent(listed(*long), quoted(*long)) == b""
    assert "measure fewer files" in caplog.text
