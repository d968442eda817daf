"""The vendors' roots, pinned by fingerprint.

Evidence brings its whole chain; a root is believed because its SHA-256 is here, and for nothing
else. AMD's are its public ARK certificates as its key distribution service serves them
(kdsintf.amd.com/vcek/v1/<product>/cert_chain); Intel's is the SGX Root CA; NVIDIA's are the Device
Identity CA and the root that signs reference measurements. Each was computed from a copy whose
self-signature verified; compare them with your own download before relying on them. Makers of TPMs
are many: a policy names the roots of those it trusts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

AMD_ROOTS: Final[Mapping[str, str]] = {
    "69d063b45344d26a2e94e1f4210de49ef555308287d4c174445c95639a540bcd": "Milan",
    "4c6598d19c18719c5dfd4a7d335f674e5bfe1d8f800cea2cf270c10d103db2f1": "Genoa",
    "1f084161a44bb6d93778a904877d4819cafa5d05ef4193b2ded9dd9c73dd3f6a": "Turin",
}
INTEL_ROOTS: Final = frozenset({"44a0196b2b99f889b8e149e95b807a350e7424964399e885a7cbb8ccfab674d3"})
NVIDIA_ROOTS: Final = frozenset(
    {"102bf659d5419614c9d8e6aecebc80454eb26b1df6a769ac720b9a690b167b48"}
)
NVIDIA_REFERENCE_ROOTS: Final = frozenset(
    {"12977b5115acb0381179279fffeb5a8c4d264971ebb32298023a465fa41df5d1"}
)
