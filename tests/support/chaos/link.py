"""A network link to a server on loopback; the link can be slow, or cut its connections."""

from __future__ import annotations

import asyncio
import threading

from support.proxy import Proxy


class Link:
    """A :class:`Proxy` whose event loop runs in a separate thread."""

    def __init__(self, to_port: int) -> None:
        self.proxy = Proxy(to_port, "tcp")
        self._loop = asyncio.new_event_loop()
        url = self._loop.run_until_complete(self.proxy.start())
        self.port = int(url.rpartition(":")[2])
        self._thread = threading.Thread(target=self._loop.run_forever, name="link")
        self._thread.start()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.proxy.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
