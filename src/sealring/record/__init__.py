"""What a run trained, provably: recording, signed statements, the log's witness, audit, papers."""
