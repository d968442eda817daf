"""`python -m sealring.bench`: the same as `sealring bench`."""

from sealring.cli.bench import app

if __name__ == "__main__":
    app(prog_name="python -m sealring.bench")
