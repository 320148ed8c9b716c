"""A load that feeds all workers at once, from a mapping of the model file.

llama.cpp hands over weight after weight, for one worker after the other. Inside of
`uploading` each is only noted, and a thread per connection sends it, or has the
server take it from its store. The owner of an `Upload` starts these threads, waits
for them, and lets none outlive it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from longwire.client.connection import Connection
from longwire.client.uploader import Delivery, Uploader
from longwire.client.writes import Source

__all__ = ["Upload", "current", "uploading"]

_TICK_S = 0.1
"""Between two looks at how far everything is."""


class Upload:
    """A load under way: what it may send, and who feeds which connection."""

    def __init__(
        self, sources: Mapping[bytes, Source], connections: Sequence[Connection]
    ) -> None:
        """`sources` are the model file's tensors by name."""
        self._uploaders = {c: Uploader(c, sources) for c in connections}

    def start(self) -> None:
        """Start to ask, and then to send whatever is taken."""
        for uploader in self._uploaders.values():
            uploader.start()

    def uploader(self, connection: Connection) -> Uploader | None:
        """Who feeds a connection; None for one that is no part of this load."""
        return self._uploaders.get(connection)

    @property
    def deliveries(self) -> list[Delivery]:
        """How far each worker is."""
        return [uploader.delivery for uploader in self._uploaders.values()]

    @property
    def under_way(self) -> int:
        """Bytes that were taken and are not delivered."""
        return sum(d.total - d.done for d in self.deliveries)

    @property
    def failed(self) -> bool:
        return any(uploader.error for uploader in self._uploaders.values())

    def finish(self, tick: Callable[[], None]) -> None:
        """Wait until every worker has everything; `tick` is called meanwhile.

        Raises:
            RemoteError: a worker failed. Others may be under way still.
        """
        for uploader in self._uploaders.values():
            uploader.complete()
        while alive := [u for u in self._uploaders.values() if u.alive]:
            self.check()
            alive[0].join(_TICK_S)
            tick()
        self.check()

    def check(self) -> None:
        """Raise what ended an upload early, if anything did.

        Raises:
            RemoteError: names the endpoint, the command and the cause.
        """
        for uploader in self._uploaders.values():
            if uploader.error is not None:
                raise uploader.error

    def stop(self) -> None:
        """Let all threads end after the messages that they are sending."""
        for uploader in self._uploaders.values():
            uploader.stop()

    def close(self) -> None:
        """End all threads; idempotent."""
        self.stop()
        for uploader in self._uploaders.values():
            uploader.close()


class _Current(threading.local):
    upload: Upload | None = None


_current = _Current()


def current() -> Upload | None:
    """The load that this thread's weights belong to."""
    return _current.upload


@contextmanager
def uploading(upload: Upload) -> Iterator[None]:
    """Let the weights that llama.cpp hands over in the body be taken by `upload`."""
    before, _current.upload = _current.upload, upload
    try:
        upload.start()
        yield
    finally:
        _current.upload = before
        upload.close()
