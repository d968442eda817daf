"""send and recv: messages between two ranks, matched by tag."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sealring.core.engine.mailbox import ANYONE
from sealring.core.group import arguments
from sealring.core.group.arguments import contiguous, one
from sealring.core.group.collectives.calling import Calling, Results
from sealring.core.group.entry import entry
from sealring.core.group.messages import Messages
from sealring.core.group.work import MessageWork
from sealring.errors import Unsupported


class Messaging(Calling):
    messages: Messages

    def _message_timeout(self) -> float:
        raise NotImplementedError

    def _called(self, work: MessageWork) -> dist.Work:
        """Called with every message's work, so that the script can wait for a batch of them."""
        raise NotImplementedError

    @entry(list, int, 3)
    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> dist.Work:
        tensor = one(tensors, "send")
        arguments.check_tensor(tensor, "send")
        self._check_peer(dst, "send")
        tag = arguments.message_tag(tag)
        timeout = self._message_timeout()
        return self._called(self.messages.send(dst, tag, contiguous(tensor), timeout, tensors))

    @entry(list, int, 3)
    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> dist.Work:
        self._check_peer(src, "recv")
        return self._receive(tensors, src, tag)

    @entry(list, int, 2)
    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> dist.Work:
        return self._receive(tensors, ANYONE, tag)

    def _receive(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        tensor = one(tensors, "recv")
        arguments.check_tensor(tensor, "recv")
        tag = arguments.message_tag(tag)
        results = Results("recv")
        memory, _ = results.of_one(tensor)
        timeout = self._message_timeout()
        return self._called(
            self.messages.receive(source, tag, memory, timeout, tensors, results.copy_back)
        )

    def _check_peer(self, peer: int, operation: str) -> None:
        if not 0 <= peer < self._world or peer == self._rank:
            raise Unsupported(
                f"{operation}: rank {self._rank} of {self._world} has no link to rank {peer}"
            )
