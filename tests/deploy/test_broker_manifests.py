"""The broker's Helm chart and Kustomize folders: rendered, checked, and started as they say."""

from __future__ import annotations

import ctypes
import json
import os
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.attest.broker.etcd_cluster import Cluster, needs_etcd
from tests.attest.broker.local import Place
from tests.attest.broker.test_etcd_tls import Files
from tests.deploy.charts import (
    DEPLOY,
    RenderError,
    documents,
    manifests,
    needs_kubectl,
    needs_renderer,
    render,
)
from tests.deploy.pods import Pod, needs_pods

KUBERNETES = "1.37"
CLONE_NEWNET = 0x40000000
NEEDED = {"authoritySecret": "authority", "policyConfigMap": "policy"}
ETCD_PODS = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "etcd"}}}
ETCD = {
    "endpoints": "etcd-0:2379,etcd-1:2380,etcd-2:2379",
    "tlsSecret": "etcd",
    "peers": [ETCD_PODS],
}
EVERYTHING: dict[str, Any] = {
    **NEEDED,
    "names": ["broker.example"],
    "dataKeys": {"secret": "keys", "items": [{"key": "dataset", "path": "gpt/key/dataset"}]},
    "cacheClaim": "collateral",
    "replicas": 3,
    "etcd": ETCD,
    "storage": {"className": "fast"},
    "runtimeClassName": "kata-qemu-snp",
    "nodeSelector": {"confidential": "snp"},
}


def check_schema(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@needs_renderer
@pytest.mark.parametrize("values", [NEEDED, EVERYTHING], ids=["least", "everything"])
def test_what_the_chart_renders_is_valid(values: dict[str, Any]) -> None:
    rendered = documents(render(values))
    assert set(rendered) == {"Service", "NetworkPolicy", "StatefulSet"}
    for manifest in rendered.values():
        check_schema(manifest)


def test_the_schema_finds_an_unknown_field() -> None:
    manifest = yaml.safe_load_all((DEPLOY / "kustomize/sqlite/broker.yaml").read_text())
    (service,) = (each for each in manifest if each["kind"] == "Service")
    service["spec"]["prots"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="prots"):
        check_schema(service)


@needs_renderer
@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"policyConfigMap": "policy"}, "authoritySecret is required"),
        ({"authoritySecret": "authority"}, "policyConfigMap is required"),
        ({**NEEDED, "replicas": 2}, "replicas above 1 need etcd.endpoints"),
        ({**NEEDED, "etcd": {**ETCD, "tlsSecret": ""}}, "etcd.tlsSecret is required"),
        ({**NEEDED, "etcd": {**ETCD, "peers": []}}, "etcd.peers is required"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(RenderError, match=told):
        render(values)


@needs_renderer
@pytest.mark.parametrize("values", [NEEDED, EVERYTHING], ids=["sqlite", "etcd"])
def test_a_broken_into_broker_reaches_nothing_but_etcd_and_the_clusters_dns(
    values: dict[str, Any],
) -> None:
    policy = documents(render(values))["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    dns = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
        "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
    }
    with_etcd = [
        {"to": [ETCD_PODS], "ports": [{"port": 2379}, {"port": 2380}]},
        {"to": [dns], "ports": [{"port": 53, "protocol": "UDP"}, {"port": 53}]},
    ]
    assert policy["egress"] == (with_etcd if "etcd" in values else [])


@needs_renderer
@needs_kubectl
@pytest.mark.parametrize("variant", ["sqlite", "etcd"])
def test_kustomize_has_what_the_chart_renders(variant: str) -> None:
    built = subprocess.run(
        ["kubectl", "kustomize", DEPLOY / "kustomize" / variant],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert documents(built.stdout) == documents(manifests(variant))


@needs_renderer
@pytest.mark.parametrize("values", [NEEDED, EVERYTHING], ids=["least", "everything"])
def test_the_pod_has_no_rights_and_no_secret_in_its_environment(values: dict[str, Any]) -> None:
    spec = documents(render(values))["StatefulSet"]["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    for container in [*spec["initContainers"], *spec["containers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "env" not in container
        assert "envFrom" not in container


@needs_renderer
@needs_pods
def test_the_broker_starts_from_its_manifest_and_answers_its_probe(
    tmp_path: Path, open_folder: Path
) -> None:
    place = Place(tmp_path)
    place.write_policy('[[resources]]\npath = "gpt/key/dataset"\nranks = "0"\n')
    values = {**NEEDED, "dataKeys": EVERYTHING["dataKeys"]}
    spec = documents(render(values))["StatefulSet"]["spec"]["template"]["spec"]
    authority = {each.name: each.read_bytes() for each in place.ca.iterdir()}
    assert set(authority) == {"authority.key", "authority.pem"}
    sources = {
        "authority": authority,
        "policy": {"policy.toml": place.policy.read_bytes()},
        "keys": {"dataset": b"a data key"},
    }
    pod = Pod(spec, open_folder, sources, {})
    pod.make_volumes(claims=("state",))
    pod.initialise()
    (broker,) = spec["containers"]
    # As with `kubectl exec`: a command that writes to the store.
    files = ["--ca=/run/sealring/ca", "--state=/srv/sealring"]
    revoke = {**broker, "args": ["revoke", *files, "--machine=snp:aa", "--unseen"]}
    for _ in range(2):  # the second start finds what the first one wrote
        with pod.started(broker) as process:
            answer = probe(broker["readinessProbe"]["httpGet"], broker, process)
            with pod.started(revoke) as command:
                said, _ = command.communicate(timeout=60)
        assert answer == (200, {"out": []})
        assert said.startswith("Out: machine snp:aa\n")
    written = {each.name for each in (open_folder / "state").iterdir()}
    assert {"broker.sqlite", "broker.version"} <= written


@needs_renderer
@needs_pods
@needs_etcd
def test_the_manifest_for_etcd_reaches_a_store_that_demands_certificates(
    tmp_path: Path, open_folder: Path
) -> None:
    place, issued = Place(tmp_path / "broker"), Files(tmp_path)
    certificate, key = issued.issue("etcd")
    tls = [
        "--cert-file", str(certificate), "--key-file", str(key),
        "--client-cert-auth", "--trusted-ca-file", str(issued.ca),
    ]  # fmt: skip
    etcd = Cluster(tmp_path / "etcd", 1, tls)
    try:
        values = {**NEEDED, "etcd": {**ETCD, "endpoints": etcd.url.removeprefix("etcd://")}}
        spec = documents(render(values))["StatefulSet"]["spec"]["template"]["spec"]
        own = dict(zip(("tls.crt", "tls.key"), issued.issue("broker"), strict=True))
        sources = {
            "authority": {each.name: each.read_bytes() for each in place.ca.iterdir()},
            "policy": {"policy.toml": place.policy.read_bytes()},
            "etcd": {
                name: each.read_bytes() for name, each in {**own, "ca.crt": issued.ca}.items()
            },
        }
        pod = Pod(spec, open_folder, sources, {})
        pod.make_volumes(claims=("state",))
        pod.initialise()
        (broker,) = spec["containers"]
        where = [each for each in broker["args"] if each.startswith(("--ca", "--state", "--store"))]
        revoke = {**broker, "args": ["revoke", *where, "--machine=snp:aa", "--unseen"]}
        with pod.started(revoke, network=os.getpid()) as command:
            said, _ = command.communicate(timeout=60)
    finally:
        etcd.close()
    assert said.startswith("Out: machine snp:aa\n")
    assert [each.name for each in (open_folder / "state").iterdir()] == ["broker.version"]


def probe(
    asked: dict[str, Any], container: dict[str, Any], process: subprocess.Popen[str]
) -> tuple[int, Any]:
    """As a kubelet does: it resolves the port's name, and does not check the certificate."""
    (port,) = (
        each["containerPort"] for each in container["ports"] if each["name"] == asked["port"]
    )
    assert asked["scheme"] == "HTTPS"
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    ends = time.monotonic() + 60
    while True:
        try:
            with ThreadPoolExecutor(
                1, initializer=enter_network, initargs=(process.pid,)
            ) as inside:
                return inside.submit(get, port, asked["path"], context).result()
        except (ConnectionError, TimeoutError):
            said = process.stdout.read() if process.poll() is not None and process.stdout else None
            assert said is None, said
            assert time.monotonic() < ends
            time.sleep(0.1)


def enter_network(pid: int) -> None:
    """Of the calling thread alone."""
    with Path(f"/proc/{pid}/ns/net").open() as there:
        assert ctypes.CDLL(None).setns(there.fileno(), CLONE_NEWNET) == 0


def get(port: int, path: str, context: ssl.SSLContext) -> tuple[int, Any]:
    connection = HTTPSConnection("127.0.0.1", port, context=context, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()
