"""Prints a software bill of materials of this environment: CycloneDX 1.6, as JSON.

    python tools/sbom.py            sealring, what it needs, and the OpenSSL in its native module

It lists the installed packages, with their SHA-256 from requirements.lock. The output depends on
nothing else, so two runs in the same environment print the same.
"""

from __future__ import annotations

import json
import re
import uuid
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from sealring import _native

LOCK = Path(__file__).parent.parent / "requirements.lock"
EXTRAS = ("metrics", "tdx", "nvidia", "broker", "stores")
OPENSSL = re.compile(r"OpenSSL (\d+\.\d+\.\d+)")


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needs(package: Distribution, extras: tuple[str, ...] = ()) -> list[str]:
    """The packages that an installed package requires."""
    found = []
    for text in package.requires or ():
        wanted = Requirement(text)
        marker = wanted.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            found.append(plain(wanted.name))
    return sorted(set(found))


def closure() -> dict[str, list[str]]:
    """Every package that sealring needs, directly or not, and what each of them needs."""
    graph = {"sealring": needs(distribution("sealring"), EXTRAS)}
    todo = list(graph["sealring"])
    while todo:
        name = todo.pop()
        if name not in graph:
            graph[name] = needs(distribution(name))
            todo += graph[name]
    return dict(sorted(graph.items()))


def reference(name: str) -> str:
    return f"pkg:pypi/{name}@{distribution(name).version.replace('+', '%2B')}"


def locked() -> dict[str, list[str]]:
    entries = re.findall(r"^(\S+)==\S+((?: \\\n    --hash=\S+)+)$", LOCK.read_text(), re.MULTILINE)
    return {plain(name): re.findall("sha256:([0-9a-f]{64})", rest) for name, rest in entries}


def component(name: str, digests: dict[str, list[str]]) -> dict[str, Any]:
    package = distribution(name)
    metadata: Any = package.metadata
    found: dict[str, Any] = {
        "type": "library",
        "bom-ref": reference(name),
        "name": name,
        "version": package.version,
        "purl": reference(name),
    }
    if license_name := metadata.get("License-Expression"):
        found["licenses"] = [{"expression": license_name}]
    elif license_name := (metadata.get("License") or "").splitlines()[:1]:
        found["licenses"] = [{"license": {"name": license_name[0]}}]
    if name in digests:
        # The lock has the files of all platforms; one of them is installed.
        found["properties"] = [
            {"name": "sealring:locked-sha256", "value": digest} for digest in digests[name]
        ]
    return found


def openssl() -> dict[str, Any]:
    match = OPENSSL.match(_native.openssl_version())
    assert match is not None
    version = match[1]
    return {
        "type": "library",
        "bom-ref": f"pkg:generic/openssl@{version}",
        "name": "openssl",
        "version": version,
        "purl": f"pkg:generic/openssl@{version}",
        "description": _native.openssl_version(),
        "properties": [
            {
                "name": "sealring:linkage",
                "value": "static" if _native.OPENSSL_BUILT_IN else "shared",
            }
        ],
    }


def bill() -> dict[str, Any]:
    graph, digests, library = closure(), locked(), openssl()
    own = component("sealring", digests)
    dependencies: list[dict[str, Any]] = [
        {"ref": reference(name), "dependsOn": [reference(one) for one in needed]}
        for name, needed in graph.items()
    ]
    next(one for one in dependencies if one["ref"] == own["bom-ref"])["dependsOn"].append(
        library["bom-ref"]
    )
    content = {
        "metadata": {"component": own},
        "components": [component(name, digests) for name in graph if name != "sealring"]
        + [library],
        "dependencies": [*dependencies, {"ref": library["bom-ref"], "dependsOn": []}],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(content, sort_keys=True))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        **content,
    }


if __name__ == "__main__":
    print(json.dumps(bill(), indent=2))
