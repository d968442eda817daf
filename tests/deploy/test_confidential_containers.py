"""The example for confidential containers: its initdata, policy and pods fit together."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
import subprocess
import sys
import threading
import tomllib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from sealring.cli import app
from tests.attest.broker.guest_evidence import AMD, snp
from tests.attest.broker.kbs_client import KbsClient, KbsRefusal
from tests.attest.broker.local import Place, running
from tests.attest.broker.test_every_kind import LISTS, at
from tests.attest.broker.test_stock_clients import put
from tests.attest.minting.amd import MEASUREMENT
from tests.deploy.charts import DEPLOY
from tests.deploy.test_broker_manifests import KUBERNETES

EXAMPLE = DEPLOY / "confidential-containers"
MANIFESTS = list(yaml.safe_load_all((EXAMPLE / "workers.yaml").read_text()))
ANNOTATIONS = MANIFESTS[1]["spec"]["template"]["metadata"]["annotations"]


def made(place: Place, folder: Path, algorithm: str = "sha256") -> dict[str, str]:
    """What initdata.py prints, by name."""
    (folder / "agent.rego").write_text(
        "package agent_policy\ndefault ExecProcessRequest := false\n"
    )
    done = subprocess.run(
        [sys.executable, EXAMPLE / "initdata.py", "--broker", "https://broker.example:8443",
         "--authority", place.authority, "--agent-policy", folder / "agent.rego",
         "--algorithm", algorithm, "--out", folder / "initdata.toml"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("algorithm", "register"),
    [("sha256", "[snp] registers.host_data"), ("sha384", "[tdx] registers.mrconfigid")],
)
def test_the_annotation_is_the_document_that_the_register_binds(
    algorithm: str, register: str, tmp_path: Path
) -> None:
    place = Place(tmp_path / "broker")
    told = made(place, tmp_path, algorithm)
    (name,) = told.keys() & ANNOTATIONS.keys()
    document = gzip.decompress(base64.b64decode(told[name]))
    assert document == (tmp_path / "initdata.toml").read_bytes()
    assert told[register] == hashlib.new(algorithm, document).hexdigest()
    read = tomllib.loads(document.decode())
    authority = place.authority.read_text()
    assert read["algorithm"] == algorithm
    assert tomllib.loads(read["data"]["aa.toml"])["token_configs"]["kbs"]["cert"] == authority
    hub = tomllib.loads(read["data"]["cdh.toml"])["kbc"]
    assert hub["kbs_cert"] == authority
    assert hub["url"] == "https://broker.example:8443"
    assert read["data"]["policy.rego"] == (tmp_path / "agent.rego").read_text()


def test_a_pod_fetches_authority_and_policy_only_with_this_initdata(tmp_path: Path) -> None:
    place = at(tmp_path / "broker", (None, AMD.trust(), ""))
    digest = made(place, tmp_path)["[snp] registers.host_data"]
    policy = (EXAMPLE / "policy.toml").read_text()
    policy = policy.replace("MEASUREMENT", MEASUREMENT.hex()).replace("HOST_DATA", digest)
    place.policy.write_text(policy.replace("version = 1\n", f"version = 1\n{LISTS}\n"))
    script = MANIFESTS[1]["spec"]["template"]["spec"]["containers"][0]["args"][0]
    (names,) = re.findall(r"for file in (.*);", script)
    contents = {name: f"the {name}".encode() for name in names.split()}
    for name, content in contents.items():
        put(place, f"gpt/config/{name}", content)
    assert "/cdh/resource/gpt/config/$file" in script

    def guest(host_data: bytes) -> Any:
        prove = partial(snp, host_data=host_data)
        return KbsClient(broker.port, place.authority, "snp", prove)

    with running(place) as broker:
        own = guest(bytes.fromhex(digest))
        own.handshake()
        assert {name: own.fetch(f"gpt/config/{name}") for name in contents} == contents
        with pytest.raises(KbsRefusal) as refusal:
            guest(bytes(32)).handshake()
    assert refusal.value.error == "policy.measurement_not_allowed"
    assert "host_data" in refusal.value.detail


@pytest.mark.parametrize("answered", ["both", "one"])
def test_the_pod_has_both_files_or_does_not_start(answered: str, tmp_path: Path) -> None:
    """The script up to `sealring run`, with a server in the place of the guest's data hub."""
    site = tmp_path / "site" / "cdh" / "resource" / "gpt" / "config"
    site.mkdir(parents=True)
    for name in ("authority", "policy") if answered == "both" else ("authority",):
        (site / name).write_text(f"the {name}")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "site"))
    script = MANIFESTS[1]["spec"]["template"]["spec"]["containers"][0]["args"][0]
    fetching = script[: script.index("exec sealring run")]
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        fetching = fetching.replace("cd /run/sealring", f"cd {tmp_path}")
        fetching = fetching.replace("127.0.0.1:8006", f"127.0.0.1:{server.server_port}")
        done = subprocess.run(["sh", "-euc", fetching], capture_output=True, text=True)
        server.shutdown()
    assert (tmp_path / "authority").read_text() == "the authority"
    if answered == "both":
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "policy").read_text() == "the policy"
    else:
        assert done.returncode != 0
        assert "HTTP Error 404" in done.stderr


@pytest.mark.parametrize("manifest", MANIFESTS, ids=["service", "job"])
def test_the_manifests_are_valid(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_the_command_line_is_one_of_sealring_run() -> None:
    script = MANIFESTS[1]["spec"]["template"]["spec"]["containers"][0]["args"][0]
    command = script[script.index("exec sealring run") :]
    helped = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).stdout
    known = set(re.findall(r"--[a-z-]+", helped))
    used = set(re.findall(r"--[a-z-]+", command))
    assert {"--broker", "--authority", "--policy"} <= used <= known
