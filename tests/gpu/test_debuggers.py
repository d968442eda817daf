"""Workers that refuse debuggers share CUDA tensors with another process."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from sealring.core.identity.process import shut_out_debuggers
from sealring.core.settings import with_settings
from tests.attacks.unprivileged import CHECKOUT, needs_unprivileged, start


def total(arrived: Any, answers: Any) -> None:
    """Runs in a spawned child and answers the sum of the tensor that it gets, or the error."""
    try:
        tensor = arrived.get()
    except RuntimeError as error:
        answers.put(str(error).splitlines()[0])
        return
    answers.put(f"{float(tensor.sum()):.0f}")
    del tensor
    arrived.get()  # stay until the parent has the answer


def main() -> None:
    shut_out_debuggers()
    context = mp.get_context("spawn")
    arrived, answers = context.Queue(), context.Queue()
    child = context.Process(target=total, args=(arrived, answers))
    child.start()
    tensor = torch.ones(1 << 20, device="cuda")
    arrived.put(tensor)
    print(os.getuid(), answers.get(timeout=60), flush=True)
    arrived.put(None)
    child.join(10)


@needs_unprivileged
@pytest.mark.parametrize(
    ("expandable", "debuggers", "answer"),
    [
        (False, "0", "1048576"),
        (True, "0", "pidfd_getfd: Operation not permitted"),
        (True, "1", "1048576"),
    ],
)
def test_only_expandable_segments_need_the_setting(
    expandable: bool, debuggers: str, answer: str
) -> None:
    environ = {
        "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}",
        **with_settings({}, allow_debuggers=debuggers == "1"),
        "HOME": "/tmp",
    }
    done = start(
        [sys.executable, "-m", "tests.gpu.test_debuggers"],
        cwd=CHECKOUT,
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    out, _ = done.communicate(timeout=110)
    user, _, came = out.splitlines()[0].partition(" ")
    assert user != "0"
    assert came == answer


if __name__ == "__main__":
    main()
