"""python -m sealring.cli, for launchers that can start only a module."""

from sealring.cli import main

main()
