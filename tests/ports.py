from __future__ import annotations

import socket


def free_port() -> int:
    """A port that was free a moment ago; for what cannot be told to choose one itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
