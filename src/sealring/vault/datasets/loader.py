"""A stream read by the workers of torch's DataLoader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from sealring.errors import Unsupported
from sealring.vault.datasets.dataset import Stream


class Loader(DataLoader[Any]):
    """A stream read by workers. Its state is that of the batches that were taken out of it."""

    def __init__(self, stream: Stream, *, num_workers: int = 0, **options: Any) -> None:
        if options.get("persistent_workers") or options.get("batch_size") is not None:
            raise Unsupported(
                "a Loader starts its workers for each epoch, and the stream makes the batches: "
                "name batch_size there, and leave persistent_workers out"
            )
        super().__init__(stream, batch_size=None, num_workers=num_workers, **options)
        self._stream = stream

    def __iter__(self) -> Any:
        base, step = self._stream.absolute, self._stream.step
        for count, batch in enumerate(super().__iter__(), 1):
            self._stream.advance_to(base + count * step)
            yield batch

    def __len__(self) -> int:
        return len(self._stream)

    def state_dict(self) -> dict[str, int]:
        return self._stream.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._stream.load_state_dict(state_dict)
