"""Registers the backend "sealring" with torch.distributed. `import torch` loads this small
module."""

from __future__ import annotations

import functools
import gc
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sealring.core.devices import ServedDevices


def register() -> None:
    """Registers the backend and the `sealring://` rendezvous with torch.

    `import torch` calls this. A script must call it only with TORCH_DEVICE_BACKEND_AUTOLOAD=0 on
    torch before 2.14.
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import register_rendezvous_handler

    if dist.is_available() and "SEALRING" not in dist.Backend._plugins:
        dist.Backend.register_backend("sealring", _create_group, extended_api=True, devices=["cpu"])
        devices: Any = ServedDevices()
        dist.Backend.backend_capability["sealring"] = devices
        if os.environ.get("_SEALRING_LAUNCHED"):
            from sealring.core.last_words import tell_the_launcher

            tell_the_launcher()
        # init_method="sealring://" is env:// with a store sealed under the job secret.
        register_rendezvous_handler("sealring", _rendezvous)  # type: ignore[no-untyped-call]
        from sealring.core.sealed_only import groups

        groups.watch()
        if _guard_if_required():
            groups.refuse_existing()
        os.register_at_fork(after_in_child=_guard_forked)


def _guard_if_required() -> bool:
    from sealring.core.sealed_only import setting

    required = setting.may_be_required(os.environ)
    if required:
        from sealring.core.sealed_only.guard import guard

        guard()
    return required


def _guard_forked() -> None:
    """Turns the guard on in a forked child, if sealed-only mode is required there.

    multiprocessing's fork server may have loaded torch before the mode was on.
    """
    from sealring.core.sealed_only import setting

    if not setting.is_on():
        _guard_if_required()


@contextmanager
def no_collection() -> Iterator[None]:
    """Disables the garbage collector in this block, which is for the imports of a first group.

    These imports create enough objects to start a full collection, and torch has a million objects.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _create_group(options: Any, _backend_options: Any = None) -> Any:
    with no_collection():
        from sealring.core.group.create import create_group, options_of_torch

    if options.group_rank == 0:
        _warn_of_untested_torch()
    return create_group(options_of_torch(options))


@functools.cache
def _warn_of_untested_torch() -> None:
    """Warns once per process, when it makes a group.

    `register` would warn in every program that imports torch.
    """
    import torch

    from sealring.version import untested_torch

    if sentence := untested_torch(torch.__version__):
        logging.getLogger("sealring").warning("sealring: %s", sentence)


def _rendezvous(url: str, **options: Any) -> Any:
    from sealring.core.store.rendezvous import rendezvous

    return rendezvous(url, **options)
