"""GPUs played by the CPU, handed to engines and mailboxes.

A host device takes the place of a whole GPU. A host driver takes the place of CUDA's driver, so
that all of sealring's CUDA code runs but the kernels themselves.
"""

from __future__ import annotations

from sealring import _native, _stand_ins
from sealring._stand_ins import Kernel, host_function
from sealring.core.engine.collective import DType, supported_kinds


def attach_host_device(owner: _native.Endpoint, lag: int, world: int) -> _stand_ins.Probe:
    """A ticket of the device is settled when it has been asked about `lag` times."""
    probe = _stand_ins.Probe()
    owner.attach(_stand_ins.host_device(lag, world, probe))
    return probe


def attach_host_driver(engine: _native.Engine, *, prelaunch: bool) -> None:
    engine.attach_cuda(
        0,
        host_function(Kernel.SEAL),
        host_function(Kernel.OPEN),
        host_function(Kernel.RUN_ONE_BATCH) if prelaunch else 0,
        _stand_ins.host_driver(),
    )
    kernels = (
        Kernel.OPEN_REDUCE, Kernel.REDUCE, Kernel.AVERAGE, Kernel.PREMULTIPLY, Kernel.RUN_ONE_BATCH,
    )  # fmt: skip
    for dtype in DType:
        for kind in supported_kinds(dtype):
            functions = [host_function(kernel, dtype, kind) for kernel in kernels]
            engine.add_reduction(dtype, kind, functions)


def attach_host_driver_to_mailbox(mailbox: _native.Mailbox) -> int:
    """Returns a stream of the driver's."""
    mailbox.attach_cuda(
        0,
        host_function(Kernel.SEAL),
        host_function(Kernel.OPEN),
        host_function(Kernel.RUN_ALL_BATCHES),
        _stand_ins.host_driver(),
    )
    return _stand_ins.new_stream()
