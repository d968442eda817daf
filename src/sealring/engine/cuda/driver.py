"""The few calls of CUDA's driver and run-time compiler that the kernels need.

They go through `cuda.bindings`, which every CUDA build of torch brings along.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from sealring.errors import Unsupported

_MIN_ARCHITECTURE: Final = 90


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
    """90 for compute capability 9.0; Unsupported where the GPU is too old for clusters."""
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
def compiler_version() -> tuple[int, int]:
    _, nvrtc = _bindings()
    major, minor = _checked(nvrtc.nvrtcVersion())
    return int(major), int(minor)


def compile_code(text: bytes, headers: dict[str, bytes], options: list[str]) -> bytes:
    _, nvrtc = _bindings()
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            text,
            b"kernels.cu",
            len(headers),
            list(headers.values()),
            [name.encode() for name in headers],
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
    code = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return code


class Kernel:
    """One kernel of a loaded module."""

    def __init__(self, code: bytes, name: str, shared_bytes: int) -> None:
        self._driver, _ = _bindings()
        # The context is torch's: it exists once a tensor has been on the device.
        self._module = _checked(self._driver.cuModuleLoadData(code))
        self._function = _checked(self._driver.cuModuleGetFunction(self._module, name.encode()))
        self._shared_bytes = shared_bytes
        attributes = self._driver.CUfunction_attribute
        for attribute, value in (
            (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
            (attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
        ):
            _checked(self._driver.cuFuncSetAttribute(self._function, attribute, value))
        self._configurations: dict[int, Any] = {}

    @property
    def registers(self) -> int:
        kind = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        return int(_checked(self._driver.cuFuncGetAttribute(kind, self._function)))

    @property
    def spilled_bytes(self) -> int:
        kind = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
        return int(_checked(self._driver.cuFuncGetAttribute(kind, self._function)))

    def launch(self, blocks: int, threads: int, cluster: int, argument: int, stream: int) -> None:
        """`argument` is the address of a pointer to the kernel's one argument."""
        config = self._configurations.get(cluster)
        if config is None:
            config = self._configurations[cluster] = self._configure(cluster, threads)
        config.gridDimX = blocks
        config.hStream = self._driver.CUstream(stream)
        _checked(self._driver.cuLaunchKernelEx(config, self._function, argument, 0))

    def _configure(self, cluster: int, threads: int) -> Any:
        config = self._driver.CUlaunchConfig()
        config.gridDimY = config.gridDimZ = 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        attribute = self._driver.CUlaunchAttribute()
        attribute.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x = cluster
        attribute.value.clusterDim.y = 1
        attribute.value.clusterDim.z = 1
        config.attrs = [attribute]
        config.numAttrs = 1
        return config
