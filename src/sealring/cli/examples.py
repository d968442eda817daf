"""An example of every command, which its --help shows."""

from __future__ import annotations

from typing import Final

EXAMPLES: Final = {
    "": "sealring run -n 4 train.py",
    "demo": "sealring demo",
    "run": "sealring run -n 4 train.py --learning-rate 0.1",
    "top": "sealring top --job train",
    "metrics": "sealring metrics --listen 127.0.0.1:9464",
    "doctor": "sealring doctor --watch 4711",
    "attest": "sealring attest --out evidence.json",
    "plan": "sealring plan gpt2-xl --sweep ranks=2..64",
    "report": "sealring report results.json -o report.html",
    "policy": "sealring policy check policy.toml evidence.json",
    "policy new": "sealring policy new --evidence evidence.json",
    "policy upgrade": "sealring policy upgrade policy.toml",
    "policy check": "sealring policy check policy.toml evidence.json",
    "broker": "sealring broker --policy policy.toml --ca sealring-ca",
    "broker revoke": "sealring broker revoke --job train --rank 3",
    "broker release": "sealring broker release --job train",
    "broker audit": "sealring broker audit --json",
    "broker simulator": "sealring broker simulator simulated",
    "bench": "sealring bench all --quick",
    "papers": "sealring papers run model.safetensors --authority authority.pem --owner-key owner "
    "--model-key model.key -o papers",
    "statement key": "sealring statement key owner",
    "bench provenance": "sealring bench provenance --json",
    "bench algorithms": "sealring bench algorithms --show",
    "bench aead": "sealring bench aead --json",
    "bench link": "sealring bench link --json",
    "bench allreduce": "sealring bench allreduce --json",
    "bench collectives": "sealring bench collectives --json",
    "bench handshake": "sealring bench handshake --json",
    "bench step": "sealring bench step --trace step.json",
    "bench gpu": "sealring bench gpu --part kernels",
    "bench all": "sealring bench all --quick",
    "bench attest": "sealring bench attest --workers 64",
    "ca": "sealring ca init",
    "ca init": "sealring ca init sealring-ca",
    "ca request": "sealring ca request --job train --rank 0-7",
    "ca issue": "sealring ca issue --job train --rank 0-7",
    "ca show": "sealring ca show train-rank-0.pem",
    "trace": "sealring trace show traces",
    "trace merge": "sealring trace merge traces -o all.json",
    "trace show": "sealring trace show traces --number 1042",
}
