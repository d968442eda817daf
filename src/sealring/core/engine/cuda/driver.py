"""The calls of CUDA's driver and run-time compiler (NVRTC) that the kernels need.

They use `cuda.bindings`, which every CUDA build of torch installs.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Final

from sealring import _native
from sealring.errors import Unsupported

_MIN_ARCHITECTURE: Final = 90
_NOT_SUPPORTED: Final = 3
"""NVML_ERROR_NOT_SUPPORTED."""


def _bindings() -> tuple[Any, Any]:
    try:
        from cuda.bindings import driver, nvrtc  # type: ignore[import-not-found,unused-ignore]
    except ImportError as problem:
        raise Unsupported(
            f"CUDA tensors need the package cuda-bindings, which comes with CUDA builds of torch "
            f"({problem}): install a CUDA build, or `pip install cuda-bindings`"
        ) from problem
    return driver, nvrtc


def _checked(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if int(status) != 0:
        raise Unsupported(f"CUDA refused a call sealring depends on: {status!r}")
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


@cache
def architecture(device: int) -> int:
    """Returns e.g. 90 for compute capability 9.0.

    Raises Unsupported if the GPU is too old for thread block clusters.
    """
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    found = major * 10 + minor
    if found < _MIN_ARCHITECTURE:
        raise Unsupported(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; sealed "
            "CUDA tensors need 9.0 or newer (H100 and later): use CPU tensors on this machine"
        )
    return found


@cache
def can_read_commands() -> bool:
    """Whether kernels may read commands from host memory.

    False in confidential computing mode, where host memory that a GPU reads is not private: a
    command says which key seals what, under which count. Also False if the mode cannot be found
    out.
    """
    state = (ctypes.c_uint * 3)()  # environment, feature, devtools
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return False
        try:
            answer = nvml.nvmlSystemGetConfComputeState(ctypes.byref(state))
        except AttributeError:  # this NVML is older than confidential computing
            return True
        finally:
            nvml.nvmlShutdown()
    except OSError:
        return False
    return answer == _NOT_SUPPORTED or (answer == 0 and not state[1])


@cache
def compiler_version() -> tuple[int, int]:
    _, nvrtc = _bindings()
    major, minor = _checked(nvrtc.nvrtcVersion())
    return int(major), int(minor)


def compile_code(name: str, text: bytes, headers: dict[str, bytes], options: list[str]) -> bytes:
    _, nvrtc = _bindings()
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            text,
            name.encode(),
            len(headers),
            list(headers.values()),
            [header.encode() for header in headers],
        )
    )
    encoded = [option.encode() for option in options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if int(status) != 0:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise Unsupported(
            "the GPU's kernels could not be compiled; please report this text:\n"
            + log.decode(errors="replace")[:4000]
        )
    code: bytes = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return code


class Kernel:
    """One kernel of a loaded module."""

    def __init__(self, code: bytes, name: str) -> None:
        self._driver, _ = _bindings()
        # The context is torch's. It exists once a tensor has been on the device.
        self._module = _checked(self._driver.cuModuleLoadData(code))
        self._function = _checked(self._driver.cuModuleGetFunction(self._module, name.encode()))
        attribute = (
            self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        )
        _checked(self._driver.cuFuncSetAttribute(self._function, attribute, 1))

    @property
    def handle(self) -> int:
        """The kernel's CUfunction, valid as long as this object lives."""
        return int(self._function)

    @property
    def registers(self) -> int:
        kind = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        return int(_checked(self._driver.cuFuncGetAttribute(kind, self._function)))

    def launch(self, blocks: int, threads: int, cluster: int, argument: bytes, stream: int) -> None:
        """Launches the kernel with its one argument, which CUDA copies.

        Raises Unsupported if CUDA refuses, and on a stream that is being captured.
        """
        try:
            _native.cuda_launch(self.handle, blocks, threads, cluster, argument, stream)
        except RuntimeError as problem:
            raise Unsupported(str(problem)) from None
