"""The runtime for Kubeflow Trainer: checked by Kubeflow's own models, and two of its pods run."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

from tests.deploy.charts import DEPLOY
from tests.deploy.pods import Pod, needs_pods
from tests.deploy.test_broker_manifests import KUBERNETES
from tests.ports import free_port

RUNTIME = yaml.safe_load((DEPLOY / "kubeflow" / "cluster-training-runtime.yaml").read_text())
JOB = yaml.safe_load((DEPLOY / "kubeflow" / "train-job.yaml").read_text())
STEP = Path(__file__).parent / "sealed_step.py"
KINDS: dict[str, Any] = {
    "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}


@pytest.mark.parametrize("manifest", [RUNTIME, JOB], ids=["runtime", "job"])
def test_kubeflow_knows_every_field(manifest: dict[str, Any]) -> None:
    read = KINDS[manifest["kind"]].from_dict(manifest)
    assert json.loads(read.to_json()) == manifest  # what a model does not know, it drops


def pod_spec() -> dict[str, Any]:
    (node,) = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"]
    # Kubeflow's torch plugin looks for these names.
    assert node["name"] == "node"
    labels = node["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    spec: dict[str, Any] = node["template"]["spec"]["template"]["spec"]
    return spec


def test_its_pods_are_valid() -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "node"}, "spec": pod_spec()}
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@needs_pods
@pytest.mark.parametrize("command", ["its own", "torchrun"])
def test_two_pods_train_sealed(command: str, open_folder: Path) -> None:
    """Also where the TrainJob brings a command of its own, as Kubeflow's SDK does."""
    spec = pod_spec()
    (container,) = spec["containers"]
    results = open_folder / "results"
    results.mkdir()
    results.chmod(0o777)
    (results / "go").touch()
    script, workspace = JOB["spec"]["trainer"]["args"][0], open_folder / "workspace"
    workspace.mkdir()
    (workspace / Path(script).name).write_bytes(STEP.read_bytes())
    own = {**container, "args": [script, str(results)]}
    if command == "torchrun":
        own["command"] = ["torchrun"]
    port, secret = free_port(), secrets.token_hex(32).encode()
    environ = {
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
    }  # fmt: skip
    pods = []
    for name in ("node-0", "node-1"):
        folder = open_folder / name
        folder.mkdir()
        pod = Pod(
            spec, folder, {"sealring-job": {"job.secret": secret}},
            {str(Path(script).parent): workspace},
        )  # fmt: skip
        pod.make_volumes()
        pod.initialise()
        pods.append(pod)
    with (
        pods[0].started(own, {**environ, "PET_NODE_RANK": "0"}) as first,
        pods[1].started(own, {**environ, "PET_NODE_RANK": "1"}, network=first.pid) as second,
    ):
        said = [process.communicate(timeout=100)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), said
    told = [json.loads((results / f"{rank}.json").read_text()) for rank in range(2)]
    assert [one["rank"] for one in told] == [0, 1]
    assert all(one["groups"] == ["SealedProcessGroup"] and one["right"] for one in told)
