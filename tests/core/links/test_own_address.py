"""What a worker logs about the address that the store shows for it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

from sealring.core.links import dialer as dialing
from sealring.core.links.dialer import Dialer, OwnAddress
from sealring.core.links.rendezvous import Address, AddressBook

ADDRESS: Address = ("127.0.0.1", 1)


@pytest.mark.parametrize(
    ("published", "said"),
    [
        (None, ["sealring: the store shows no address for rank 3"]),
        ([("127.0.0.2", 1)], ["sealring: the store shows another address for rank 3"]),
        ([ADDRESS], []),
    ],
)
def test_an_address_is_called_another_only_if_there_is_one(
    published: list[Address] | None,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(dialing, "LOOK_SECONDS", 0.0)
    store: Any = dist.HashStore()  # torch's types leave multi_set out
    book = AddressBook(store, "epoch", time.monotonic() + 20)
    dialer = Dialer(book, lambda *_: lambda: None, lambda *_: None)
    own = OwnAddress(book, 3, [ADDRESS], dialer)
    own.publish()
    if published is None:
        store.delete_key("sealring/epoch/address/3")
    else:
        book.publish(3, published)
    own.check()
    assert [record.getMessage() for record in caplog.records] == said
    assert book.lookup(3) == (ADDRESS,)
    dialer.stop()
    book.close()
