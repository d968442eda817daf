"""What a log sends to a witness (c2sp.org/tlog-witness), written and read.

old <size>
<hash>...            a consistency proof, one hash a line
<empty line>
<checkpoint>
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from sealring.errors import MalformedNote
from sealring.provenance.checkpoints import parse_number
from sealring.provenance.notes import MAX_NOTE_BYTES, encode_base64
from sealring.provenance.proofs import parse_hashes

PATH: Final = "/add-checkpoint"
SIZE_TYPE: Final = "text/x.tlog.size"
MAX_SUBMISSION_BYTES: Final = MAX_NOTE_BYTES + (8 << 10)


@dataclass(frozen=True, slots=True)
class Submission:
    old: int
    """The size that the witness is believed to have cosigned last."""
    proof: tuple[bytes, ...]
    checkpoint: bytes

    def encode(self) -> bytes:
        lines = [f"old {self.old}", *(encode_base64(each) for each in self.proof), ""]
        return "".join(f"{line}\n" for line in lines).encode() + self.checkpoint


def parse_submission(data: bytes) -> Submission:
    head, empty, checkpoint = data.partition(b"\n\n")
    try:
        lines = head.decode("ascii").split("\n")
    except UnicodeDecodeError:
        raise MalformedNote("the lines before the checkpoint are ASCII") from None
    if not empty or not lines[0].startswith("old "):
        raise MalformedNote("a submission begins with `old SIZE`, and has a checkpoint at its end")
    old = parse_number(lines[0].removeprefix("old "), "the old size")
    return Submission(old, parse_hashes(lines[1:]), checkpoint)


def seen_path(origin: str) -> str:
    """Where a witness shows the last checkpoint of a log that it cosigned."""
    return f"/{hashlib.sha256(origin.encode()).hexdigest()}/checkpoint"
