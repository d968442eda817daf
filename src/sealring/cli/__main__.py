"""python -m sealring.cli: for launchers that take a module and not a command."""

from sealring.cli import main

main()
