"""The site that `make docs` builds. Its source is the repository itself, so that every link works
both here and where the files are read as they are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tools import threats  # noqa: E402

from sealring.version import __version__  # noqa: E402

project = "sealring"
author = "The sealring authors"
release = version = __version__
copyright = author

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "docs/advisories/*.md"]
exclude_patterns = [
    ".venv", "build", "dist", ".*", "native", "src", "tests", "wheels",
    "docs/advisories/template.md",
]  # fmt: skip
nitpicky = False

myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # spec.md marks its vectors for the tests

default_role = "code"  # docstrings write `name` for code
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"show-inheritance": True}

html_theme = "furo"
html_title = "sealring"
html_extra_path = ["site"]  # index.html, which leads to docs/index.html
html_static_path = ["static"]
html_css_files = ["sealring.css"]
html_copy_source = False
html_show_sourcelink = False


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _leave_out_drawings)
    app.connect("source-read", _name_the_tests_of_each_threat)


def _name_the_tests_of_each_threat(_app: Any, page: str, source: list[str]) -> None:
    if page == "docs/threat-model":
        source[0] = threats.with_tests(source[0])


def _leave_out_drawings(
    _app: Any, what: str, _name: str, _object: Any, _options: Any, lines: list[str]
) -> None:
    """A module's docstring has drawings and tables in plain text. The pages say the same."""
    if what == "module":
        lines[:] = []
