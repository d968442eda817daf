"""Runs the containers of a pod as a kubelet starts them, without an image.

Each container gets a mount namespace with the pod's volumes at the manifest's paths, the manifest's
user, groups, command and environment, no capabilities, and a read-only root file system where the
manifest asks for it. Volumes are as a kubelet makes them: the files of a Secret belong to root and
the pod's group and are reached through symbolic links; an emptyDir and a claim belong to the pod's
group. What is not as in a cluster: the image (this machine's files), cgroups, seccomp.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests.attacks import unprivileged
from tests.cli.namespaces import end

needs_pods = pytest.mark.skipif(
    os.geteuid() != 0 or unprivileged.why_not() is not None or shutil.which("ip") is None,
    reason="running containers of a pod needs root, mount namespaces and iproute2",
)


@dataclass(frozen=True)
class Pod:
    spec: Mapping[str, Any]
    folder: Path
    """Holds the volumes; must be a folder that every user can enter."""
    sources: Mapping[str, Mapping[str, bytes]]
    """The content of Secrets and ConfigMaps by name, as keys and values."""
    more_mounts: Mapping[str, Path]
    """Paths in the container, and what is there: parts of the image."""

    @property
    def group(self) -> int:
        return int(self.spec["securityContext"]["fsGroup"])

    def make_volumes(self, claims: tuple[str, ...] = ()) -> None:
        for volume in [*self.spec["volumes"], *({"name": name} for name in claims)]:
            folder = self.folder / volume["name"]
            folder.mkdir(exist_ok=True)
            if "secret" in volume or "configMap" in volume:
                self._fill(folder, volume)
            os.chown(folder, 0, self.group)
            folder.chmod(0o2777 if "emptyDir" in volume else 0o2775)

    def _fill(self, folder: Path, volume: Mapping[str, Any]) -> None:
        """Files are in a folder with a date, to which `..data` leads, as a kubelet writes them."""
        given = volume.get("secret") or volume["configMap"]
        content = self.sources[given.get("secretName") or given["name"]]
        mode = given.get("defaultMode", 0o644)
        dated = folder / "..2026_11_16"
        dated.mkdir()
        (folder / "..data").symlink_to(dated.name)
        items = given.get("items") or [{"key": key, "path": key} for key in content]
        for item in items:
            file = dated / item["path"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content[item["key"]])
            file.chmod(mode)
            os.chown(file, 0, self.group)
            first = item["path"].partition("/")[0]
            link = folder / first
            if not link.is_symlink():
                link.symlink_to(f"..data/{first}")

    def command(self, container: Mapping[str, Any], network: int | None = None) -> list[str]:
        """`network` is a process whose network the pod shares; else it has a loopback alone."""
        security = {**self.spec["securityContext"], **container["securityContext"]}
        assert security["runAsNonRoot"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["allowPrivilegeEscalation"] is False
        lines = ["mount --make-rprivate /", unprivileged.open_paths()]
        mounts = {
            each["mountPath"]: (self.folder / each["name"], each.get("readOnly", False))
            for each in container.get("volumeMounts", ())
        }
        mounts |= {path: (source, True) for path, source in self.more_mounts.items()}
        tops = sorted({"/" + path.split("/")[1] for path in mounts})
        for top in tops:
            lines += _overlaid(top)  # so that mount points can be made
        for path, (source, read_only) in mounts.items():
            option = "ro" if read_only else "rw"
            lines += [
                f"mkdir -p {path}",
                f"mount --bind {shlex.quote(str(source))} {path}",
                f"mount -o remount,bind,{option} {path}",
            ]
        if security.get("readOnlyRootFilesystem"):
            lines += [f"mount -o remount,bind,ro {folder}" for folder in ("/", *tops)]
        become = (
            f"exec setpriv --reuid {security['runAsUser']} --regid {security['runAsGroup']} "
            f"--groups {self.group} --bounding-set=-all --inh-caps=-all --no-new-privs -- "
        )
        lines.append(become + '"$@"')
        given = [*container["command"], *container.get("args", ())]
        if network is None:
            enter, lines = ["unshare", "--net", "--mount"], ["ip link set lo up", *lines]
        else:
            enter = ["nsenter", "--target", str(network), "--net", "--", "unshare", "--mount"]
        return [*enter, "sh", "-ec", "\n".join(lines), "sh", *given]

    def environ(self, container: Mapping[str, Any]) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        named = {each["name"]: each["value"] for each in container.get("env", ())}
        # In a cluster the sockets of the live view are in the container's own /tmp.
        return {"PATH": path, "OMP_NUM_THREADS": "1", "SEALRING_LIVE": "0", **named}

    def initialise(self) -> None:
        for container in self.spec.get("initContainers", ()):
            done = subprocess.run(
                self.command(container), env=self.environ(container), timeout=60,
                capture_output=True, text=True,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr

    @contextmanager
    def started(
        self,
        container: Mapping[str, Any],
        more: Mapping[str, str] | None = None,
        *,
        network: int | None = None,
    ) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            self.command(container, network), text=True,
            env={**self.environ(container), **(more or {})},
            start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            while network is None and process.poll() is None and _network_of(process.pid) == _OWN:
                time.sleep(0.01)  # else another pod that shall share its network would enter ours
            yield process
        finally:
            end(process)


def _network_of(process: int | str) -> str:
    try:
        return os.readlink(f"/proc/{process}/ns/net")
    except OSError:
        return ""  # it has ended


_OWN: Final = _network_of("self")


def _overlaid(folder: str) -> list[str]:
    """Shell commands after which new files in a folder are in memory, in this namespace alone."""
    upper, work = f"/mnt/upper{folder}", f"/mnt/work{folder}"
    return [
        f"mkdir -p {upper} {work}",
        f"mount -t overlay -o lowerdir={folder},upperdir={upper},workdir={work} overlay {folder}",
    ]
