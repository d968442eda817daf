"""Which digest a part's chunks have, and what BLAKE3's own test file says of it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp

from sealring import _native, record_run
from sealring.errors import ConfigurationError
from sealring.vault import CheckpointReader, CheckpointWriter, Vault, trees
from sealring.vault.digests import Hash, computed, faster
from tests.workers import SECRET

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

PUBLISHED = {
    0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    1023: "10108970eeda3eb932baac1428c7a2163b0e924c9a9e25b35bba72b28f70bd11",
    1024: "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
    2048: "e776b6028c7cd22a4d0ba182a8bf62205d2ef576467e838ed6f2529b85fba24a",
    3072: "b98cb0ff3623be03326b373de6b9095218513e64f1ee2edd2525c7ad1e5cffd2",
    4096: "015094013f57a5277b59d8475c0501042c0b642e531b0a1c8f58d2163229e969",
    5120: "9cadc15fed8b5d854562b26a9536d9707cadeda9b143978f319ab34230535833",
    8192: "aae792484c8efe4f19e2ca7d371d8c467ffb10748d8a5a1ae579948f718a2a63",
    16384: "f875d6646de28985646f34ee13be9a576fd515f76b5b0a26bb324735041ddde4",
}
"""Of test_vectors.json in BLAKE3's repository, by the input's length: its byte i is i mod 251."""


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALRING_SECRET", SECRET)
    monkeypatch.setenv("SEALRING_JOB", "tests")


def hashes_of(vault: Vault, version: int | None = None) -> dict[str, Hash]:
    return {part.name: part.hash for part in vault.find("run", version).manifest.parts}


@pytest.mark.parametrize("length", PUBLISHED)
def test_the_published_vectors(length: int) -> None:
    plain = bytes(at % 251 for at in range(length))
    digests = _native.chunk_digests(plain, computed("blake3"))
    assert digests[:32].hex() == PUBLISHED[length]


@pytest.mark.parametrize("helper", [False, True])
@pytest.mark.parametrize("hash", ["sha256", "blake3"])
def test_a_part_has_the_digests_that_its_writer_names(
    hash: Hash, helper: bool, vault: Vault
) -> None:
    saved: dict[str, Any] = {"w": torch.randn(50_000), "step": 3}
    writer = CheckpointWriter(vault, "run", helper=helper, hash=hash)
    dcp.save(saved, storage_writer=writer)
    assert hashes_of(vault) == {"rank-00000": hash, "rank-00000.digests": "sha256"}
    digest = vault.find("run").manifest.digest
    trees.rotate(vault, lambda _: None)
    assert vault.find("run").manifest.digest == digest
    trees.verify(vault.find("run"), lambda _: None)
    into: dict[str, Any] = {"w": torch.zeros(50_000), "step": 0}
    dcp.load(into, storage_reader=CheckpointReader(vault, "run"))
    assert torch.equal(into["w"], saved["w"])
    assert into["step"] == 3


def test_what_a_checkpoint_holds_is_named_with_its_hash(vault: Vault) -> None:
    contents = []
    for hash in ("sha256", "blake3", "blake3"):
        writer = CheckpointWriter(vault, "run", hash=hash)
        dcp.save({"w": torch.arange(8.0)}, storage_writer=writer)
        reader = CheckpointReader(vault, "run")
        dcp.load({"w": torch.zeros(8)}, storage_reader=reader)
        contents.append(reader.content_digest)
    assert contents[0] != contents[1] == contents[2]


def test_a_hash_that_is_not_supported(vault: Vault) -> None:
    with pytest.raises(ConfigurationError, match="'sha256' or 'blake3'"):
        CheckpointWriter(vault, "run", hash=cast("Hash", "md5"))


def test_a_save_beside_the_main_thread_takes_sha256(vault: Vault) -> None:
    """The main thread trains meanwhile, and holds Python's lock."""
    writer = CheckpointWriter(vault, "run")
    save = threading.Thread(
        target=dcp.save, args=({"w": torch.arange(8.0)},), kwargs={"storage_writer": writer}
    )
    save.start()
    save.join()
    assert hashes_of(vault)["rank-00000"] == "sha256"


def test_a_recorded_run_takes_sha256(tmp_path: Path) -> None:
    """Its repetition, on any CPU, must come to the same digest of what a checkpoint holds."""
    with record_run(tmp_path / "run", rank=0, world=1):
        assert faster() == "sha256"


def test_the_main_thread_takes_what_is_faster_here(vault: Vault) -> None:
    dcp.save({"w": torch.arange(8.0)}, storage_writer=CheckpointWriter(vault, "run"))
    assert hashes_of(vault)["rank-00000"] == faster() == faster()
    if "sha_ni" in Path("/proc/cpuinfo").read_text().split():
        assert faster() == "sha256"
