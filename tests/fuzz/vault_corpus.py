"""The first corpus entries for the parsers of vaults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import torch

from sealring.vault.checkpoint_export import safetensors_header
from sealring.vault.header import new_header, next_key, with_grant, write_header
from sealring.vault.keys import Grant
from sealring.vault.sealed import AES
from tests.fuzz.vault_targets import KEY


def vault_headers() -> Iterator[tuple[str, bytes]]:
    header, ring = new_header(AES)
    granted = with_grant(header, ring, KEY.grant("owner", header.vault, 1, ring.key))
    yield "one_grant", write_header(granted)
    public = "sealring-person-1:" + "A" * 1624
    person = Grant("me", "person", "00" * 40, public, "")
    rotating, _ = next_key(granted, ring, [KEY])
    yield "rotating", write_header(rotating)
    yield "forged_grant", write_header(replace(granted, grants=[*granted.grants, person]))
    yield "later", write_header(replace(granted, version=2))


def safetensors_files() -> Iterator[tuple[str, bytes]]:
    tensors = {"a": torch.empty(2, 3), "b": torch.empty((0, 4), dtype=torch.bool)}
    yield "two", safetensors_header(tensors, {"format": "pt"}) + bytes(24)
    yield "empty", safetensors_header({}, {})
    large = json.dumps({"a": {"dtype": "F32", "shape": [1 << 62, 4, 0], "data_offsets": [0, 0]}})
    yield "large_shape", len(large).to_bytes(8, "little") + large.encode()
