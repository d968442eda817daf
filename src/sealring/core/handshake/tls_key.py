"""OpenSSL's copy of a worker's private key: one for all handshakes under way, none between them."""

from __future__ import annotations

import os
import weakref
from typing import Any, Final

from OpenSSL._util import ffi, lib

from sealring import _native
from sealring.core.identity.kept_key import KeptKey
from sealring.core.no_fork import NoFork, OwnLock


class LoadedKey:
    """OpenSSL has the key as long as this object, or a connection that was given it."""

    __slots__ = ("__weakref__", "pointer")

    def __init__(self, key: KeptKey) -> None:
        """pyOpenSSL's own function for it leaves copies of the key in memory."""
        loaded: Any = ffi.NULL
        encoded = key.enlarged()
        overwritten = _native.FreedMemoryOverwritten()
        with ffi.from_buffer(encoded) as memory:
            source = ffi.gc(lib.BIO_new_mem_buf(memory, len(encoded)), lib.BIO_free)
            if source != ffi.NULL:
                loaded = lib.d2i_PrivateKey_bio(source, ffi.NULL)
                ffi.release(source)
        del overwritten
        if loaded == ffi.NULL:
            lib.ERR_clear_error()
            raise MemoryError("OpenSSL has no memory for a private key")
        # Not in a __del__: that runs while another thread can still find this object.
        self.pointer: Any = ffi.gc(loaded, _free)


def _free(pointer: Any) -> None:
    overwritten = _native.FreedMemoryOverwritten()
    with NoFork():
        lib.EVP_PKEY_free(pointer)
    del overwritten


_lock: Final = OwnLock()
_loaded: Final[weakref.WeakValueDictionary[KeptKey, LoadedKey]] = weakref.WeakValueDictionary()
# A child has none of its parent's keys, and must not find one here.
os.register_at_fork(after_in_child=_loaded.clear)


def loaded(key: KeptKey) -> LoadedKey:
    """For a handshake. Who keeps it keeps the key in memory that nothing protects."""
    with _lock:
        found = _loaded.get(key)
        if found is None:
            found = _loaded[key] = LoadedKey(key)
        return found
