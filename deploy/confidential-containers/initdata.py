"""Makes the initdata of confidential containers whose workers join through a broker.

    python initdata.py --broker https://broker.example:8443 --authority authority.pem \\
      --agent-policy policy.rego --out initdata.toml

Writes the document, and prints what goes where: the pod's annotation, and the value of the register
that binds the document, for the broker's policy. Only Python's own library is used.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import tomllib
from pathlib import Path

ANNOTATION = "io.katacontainers.config.hypervisor.cc_init_data"
REGISTERS = {"sha256": "[snp] registers.host_data", "sha384": "[tdx] registers.mrconfigid"}


def document(broker: str, authority: str, agent_policy: str, algorithm: str) -> str:
    """What the guest's components read: whom to ask, whom to believe, what the host may do."""
    for text in (broker, authority, agent_policy):
        if "'''" in text:
            raise SystemExit("an input has ''' in it, which would end the TOML string")
    attestation_agent = f'[token_configs.kbs]\nurl = "{broker}"\ncert = """\n{authority}"""\n'
    data_hub = (
        "socket = 'unix:///run/confidential-containers/cdh.sock'\n".replace("'", '"')
        + f'[kbc]\nname = "cc_kbc"\nurl = "{broker}"\nkbs_cert = """\n{authority}"""\n'
    )
    return (
        f'version = "0.1.0"\nalgorithm = "{algorithm}"\n\n[data]\n'
        f"\"aa.toml\" = '''\n{attestation_agent}'''\n\n"
        f"\"cdh.toml\" = '''\n{data_hub}'''\n\n"
        f"\"policy.rego\" = '''\n{agent_policy}'''\n"
    )


def annotation(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes initdata for sealed workers.")
    parser.add_argument("--broker", required=True, help="https://HOST:PORT")
    parser.add_argument("--authority", required=True, type=Path, help="authority.pem")
    parser.add_argument(
        "--agent-policy", required=True, type=Path,
        help="the Kata agent's policy for this pod, as `genpolicy` makes it",
    )  # fmt: skip
    parser.add_argument(
        "--algorithm", choices=sorted(REGISTERS), default="sha256", help="sha384 for TDX"
    )
    parser.add_argument("--out", type=Path, default=Path("initdata.toml"))
    given = parser.parse_args()
    text = document(
        given.broker, given.authority.read_text(), given.agent_policy.read_text(), given.algorithm
    )
    for inner in ("aa.toml", "cdh.toml"):
        tomllib.loads(tomllib.loads(text)["data"][inner])
    given.out.write_text(text)
    digest = hashlib.new(given.algorithm, text.encode()).hexdigest()
    print(f"{REGISTERS[given.algorithm]}: {digest}")
    print(f"{ANNOTATION}: {annotation(text)}")


if __name__ == "__main__":
    main()
