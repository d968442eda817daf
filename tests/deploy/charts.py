"""Renders the Helm chart: with Helm where it is installed, else with the engine that Helm uses.

python -m tests.deploy.charts     writes the manifests of deploy/kustomize anew
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "sealring-broker"
RELEASE = {"Name": "sealring-broker", "Namespace": "sealring"}
GO_PACKAGES = Path("/usr/share/gocode")
"""Where Debian keeps the sources of Go packages."""

needs_renderer = pytest.mark.skipif(
    shutil.which("helm") is None
    and not (shutil.which("go") and (GO_PACKAGES / "src/github.com/Masterminds/sprig").exists()),
    reason="neither Helm nor Go with sprig is installed (make system-deps)",
)
needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not installed (make system-deps)"
)


class RenderError(Exception):
    """What the chart refused, in the renderer's words."""


def render(values: dict[str, Any]) -> str:
    if shutil.which("helm") is not None:
        return _run(
            ["helm", "template", RELEASE["Name"], str(CHART), "--namespace", RELEASE["Namespace"],
             "--values", "-"],
            yaml.safe_dump(values),
        )  # fmt: skip
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    data = {
        "Release": RELEASE,
        "Chart": {key.capitalize(): value for key, value in chart.items()},
        "Values": merged(yaml.safe_load((CHART / "values.yaml").read_text()), values),
    }
    return _run([str(_renderer()), str(CHART / "templates")], json.dumps(data))


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """As Helm: mappings are merged, all other values are replaced."""
    unknown = over.keys() - base.keys()
    assert not unknown, f"the chart has no values {unknown}"
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base[key], dict)
        result[key] = {**base[key], **value} if both else value
    return result


def documents(text: str) -> dict[str, Any]:
    """The manifests by their kind; there is one of each."""
    found = [one for one in yaml.safe_load_all(text) if one]
    by_kind = {one["kind"]: one for one in found}
    assert len(by_kind) == len(found)
    return by_kind


def _run(command: list[str], given: str) -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    if done.returncode:
        raise RenderError(done.stderr)
    return done.stdout


@cache
def _renderer() -> Path:
    """Built once for each version of its source, below build/."""
    source = Path(__file__).parent / "helm" / "render.go"
    folder = ROOT / "build" / "helm"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    program = folder / f"render-{digest}"
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as own:
            environ = {
                **os.environ, "GO111MODULE": "off", "GOPATH": str(GO_PACKAGES), "GOFLAGS": "",
                "GOCACHE": own,
            }  # fmt: skip
            new = folder / f".{os.getpid()}"
            subprocess.run(
                ["go", "build", "-o", new, source],
                env=environ, check=True, capture_output=True, cwd=folder,
            )  # fmt: skip
            new.rename(program)
    return program


def manifests(variant: str) -> str:
    values = yaml.safe_load((DEPLOY / "kustomize" / variant / "values.yaml").read_text())
    return render(values)


if __name__ == "__main__":
    for variant in ("sqlite", "etcd"):
        (DEPLOY / "kustomize" / variant / "broker.yaml").write_text(manifests(variant))
