"""What a bench run measured, as one file: written by `bench`, read by the report and by `plan`.

schema    the dataclasses, one per kind of case
files     a whole file or none; other versions and cut files are refused
machine   what was measured on
"""

from sealring.results.files import read_results, write_results
from sealring.results.machine import this_machine
from sealring.results.schema import (
    VERSION,
    CollectiveCase,
    Fit,
    KernelCase,
    LinkCase,
    LinkPoint,
    Machine,
    Part,
    Results,
    ScaleCase,
    Span,
    StepCase,
    median_of,
    spread_of,
    usable,
)

__all__ = [
    "VERSION",
    "CollectiveCase",
    "Fit",
    "KernelCase",
    "LinkCase",
    "LinkPoint",
    "Machine",
    "Part",
    "Results",
    "ScaleCase",
    "Span",
    "StepCase",
    "median_of",
    "read_results",
    "spread_of",
    "this_machine",
    "usable",
    "write_results",
]
