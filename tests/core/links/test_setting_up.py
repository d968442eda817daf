"""A forked child keeps none of the sockets with which its parent is making links."""

from __future__ import annotations

import os
import socket

import pytest

from sealring.core.links import setting_up
from sealring.core.links.listener import listen

pytestmark = pytest.mark.usefixtures("no_descriptor_is_left")


def accepted() -> list[socket.socket]:
    listening = listen("127.0.0.1")
    dialed = setting_up.create(socket.AF_INET)
    dialed.connect(listening.getsockname())
    dialed.send(b"x")  # the listener gets a connection only when it has bytes
    listening.settimeout(20)
    taken, _ = setting_up.accept(listening)
    return [listening, dialed, taken]


@pytest.mark.threat("K20")
def test_a_child_closes_what_its_parent_is_setting_up() -> None:
    sockets = accepted()
    inodes = {os.fstat(each.fileno()).st_ino for each in sockets}
    assert inodes <= set(setting_up.inodes())
    descriptors = [each.fileno() for each in sockets]
    child = os.fork()
    if child == 0:
        left = 0
        for descriptor in descriptors:
            try:
                left += os.fstat(descriptor).st_ino in inodes
            except OSError:
                continue
        os._exit(left + len(setting_up.inodes()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert inodes <= set(setting_up.inodes())
    for each in sockets:
        each.close()
