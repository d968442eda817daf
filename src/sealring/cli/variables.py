"""The environment variables that sealring reads, to find those that are misspelled."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Final

# fmt: off
KNOWN: Final = frozenset({
    "SEALRING_ADDRESS", "SEALRING_ALGORITHM", "SEALRING_ALGORITHM_TABLE",
    "SEALRING_ALLOW_DEBUGGERS", "SEALRING_ATTESTER", "SEALRING_ATTESTER_CHAIN",
    "SEALRING_AUTHORITY", "SEALRING_BROKER", "SEALRING_CACHE", "SEALRING_CERTIFICATE",
    "SEALRING_CONTAINER", "SEALRING_CUDA_WAIT", "SEALRING_GPU_WIRE", "SEALRING_HOST",
    "SEALRING_INTERFACE", "SEALRING_JOB", "SEALRING_KEY", "SEALRING_LIVE", "SEALRING_ONLY",
    "SEALRING_POLICY", "SEALRING_RECORD", "SEALRING_RECORD_BYTES", "SEALRING_REKEY_BYTES",
    "SEALRING_REPLAY", "SEALRING_SECRET", "SEALRING_SECRET_FILE", "SEALRING_THREADS",
    "SEALRING_TPM", "SEALRING_TRACE_DIR", "SEALRING_TRACE_SIGNAL", "SEALRING_TRANSPORT",
    "SEALRING_VAULT_KEY", "SEALRING_VAULT_LEDGER",
})
# fmt: on
_PREFIX: Final = "SEALRING_"
_KUBERNETES: Final = re.compile(r"_(SERVICE_(HOST|PORT.*)|PORT(_\d+_.*)?)$")


def unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each variable whose name is almost that of a setting.

    Others that begin alike may be the user's own. Kubernetes sets some for each service, so for
    one that is called sealring-broker: NAME_SERVICE_HOST, NAME_PORT and NAME_PORT_8443_TCP.
    """
    endings = [name.removeprefix(_PREFIX) for name in sorted(KNOWN)]
    for name in sorted(environ):
        if not name.startswith(_PREFIX) or name in KNOWN or _KUBERNETES.search(name):
            continue
        for near in difflib.get_close_matches(name.removeprefix(_PREFIX), endings, 1, 0.8):
            yield (
                f"{name} is set, but sealring does not read it: {_PREFIX}{near} is the nearest "
                "name that it reads"
            )
