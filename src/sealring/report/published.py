"""What others measured. Every figure has its source; none was measured here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Figure:
    what: str
    overhead: float
    """Time of a step with protection, as a multiple of the time without."""
    source: str


STUDY: Final = "arXiv 2501.11771v3, 4 H100 TEEs, emulated driver path"
FIGURES: Final = (
    Figure("average of its models", 8.68, STUDY),
    Figure("GPT-2-XL, 25 MB buckets", 41.6, STUDY),
    Figure("GPT-2-XL, its best buckets", 3.03, STUDY),
)
