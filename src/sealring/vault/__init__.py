"""Data at rest: sealed files, the keys that open them, and checkpoints made of them."""
