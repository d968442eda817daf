"""Ingest and stages on a cluster of two Ray nodes: the digests of one machine.

Ray is not part of the locked packages: `pip install 'sealring[ray]'`, and run this file alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from sealring.errors import BadSource, VaultError
from sealring.vault import keys
from sealring.vault.datasets.building import ingest, run_stages, stages_of
from sealring.vault.datasets.formats import Limits
from sealring.vault.datasets.on_ray import OnRay, VaultReference
from sealring.vault.datasets.work import in_this_process
from sealring.vault.vault import Vault
from tests.codes import coded
from tests.vault.datasets.made import json_lines, sealed
from tests.vault.datasets.test_pipeline import PIPELINE

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'sealring[ray]'")
pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "include_dashboard": False,
                "object_store_memory": 1 << 27,
            },
        )
        made.add_node(num_cpus=1, object_store_memory=1 << 27)
        made.wait_for_nodes()
        ray.init(address=made.address, log_to_driver=False)
        yield made.address
        ray.shutdown()
        made.shutdown()


class StayingConnected(OnRay):
    """Starting a cluster takes long: all tests use one connection."""

    def __exit__(self, *others: object) -> None:
        pass


def reference(vault: Vault, key: Path) -> VaultReference:
    return VaultReference(str(vault.path), vault.header.id, str(key), None)


def test_two_nodes_make_the_same_as_one_machine(
    cluster: str, vault: Vault, key: Path, tmp_path: Path
) -> None:
    assert len([node for node in ray.nodes() if node["Alive"]]) == 2
    source = json_lines(tmp_path / "source")
    (tmp_path / "pipeline.py").write_text(PIPELINE)
    stages = stages_of(tmp_path / "pipeline.py")
    other = Vault.create(tmp_path / "other", keys.key_file(key), "owner")
    here = [sealed(other, source, "raw"), *run_stages(other, stages, in_this_process)]
    with StayingConnected(reference(vault, key)) as run:
        limits = Limits(500, 1 << 20)
        there = [ingest(vault, source, "raw", run, limits=limits), *run_stages(vault, stages, run)]
        again = [ingest(vault, source, "raw", run, limits=limits), *run_stages(vault, stages, run)]
    assert [one.digest for one in there] == [one.digest for one in here]
    assert [one.made for one in there] == [one.made for one in here]
    assert not any(one.changed for one in again)


def test_errors_come_back_by_name(cluster: str, vault: Vault, key: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("not json\n")
    with StayingConnected(reference(vault, key)) as run:
        with pytest.raises(BadSource, match="byte 0 is not JSON"):
            ingest(vault, tmp_path / "bad.jsonl", "bad", run)
        sealed(vault, json_lines(tmp_path / "source"), "raw")
        (tmp_path / "pipeline.py").write_text(PIPELINE.replace(".upper()", ".nothing()"))
        with pytest.raises(
            BadSource, match="has no attribute 'nothing'", check=coded("vault.stage_failed")
        ):
            list(run_stages(vault, stages_of(tmp_path / "pipeline.py"), run))


def test_a_worker_without_a_grant_makes_nothing(cluster: str, vault: Vault, tmp_path: Path) -> None:
    keys.make_key_file(tmp_path / "other.key")
    with (
        StayingConnected(reference(vault, tmp_path / "other.key")) as run,
        pytest.raises(
            VaultError, match="not open to this key file", check=coded("vault.not_granted")
        ),
    ):
        ingest(vault, json_lines(tmp_path / "source"), "raw", run)


@pytest.mark.threat("P19")
def test_ray_is_given_no_key(vault: Vault, key: Path, tmp_path: Path) -> None:
    import pickle

    text = pickle.dumps(reference(vault, key))
    for secret in (vault.ring.key, vault.ring.names):
        assert bytes(secret) not in text
