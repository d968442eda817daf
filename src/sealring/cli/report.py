"""`sealring report`: a page that explains results, or compares two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sealring.cli.terminal import say
from sealring.errors import ConfigurationError
from sealring.results import read_results


def report(
    results: Annotated[list[Path], typer.Argument(help="results.json; two of them are compared.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where the page goes; replaced if there.")
    ] = Path("report.html"),
) -> None:
    """Explain a bench run, or compare two, as one HTML file that opens offline."""
    if len(results) > 2:
        raise ConfigurationError(
            f"a page shows one or two results, and here are {len(results)}: leave some out"
        )
    from sealring.report import headline, write_page

    read = [read_results(path) for path in results]
    write_page(output, *read)
    for path, each in zip(results, read, strict=True):
        say(f"{path}: {headline(each)}")
    say(f"{output} is written; open it in a browser.")
