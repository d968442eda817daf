"""A script that asks for a Gloo group and writes down which group it got."""

from __future__ import annotations

import os
import secrets
import sys
from datetime import timedelta
from pathlib import Path


def main(answer: Path) -> None:
    import torch.distributed as dist

    os.environ.setdefault("SEALRING_SECRET", secrets.token_hex(32))
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = f"{type(dist.group.WORLD).__name__} {dist.get_backend()}"
    try:
        dist.ProcessGroupGloo(store, 0, 1, timedelta(minutes=1))
        group += ", Gloo's class"
    except Exception as error:
        group += f", {type(error).__name__}"
    dist.destroy_process_group()
    unfinished = answer.with_suffix(".unfinished")
    unfinished.write_text(group)
    unfinished.rename(answer)


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
