"""Wait for the engine on the event loop: results, canvases, and clients that go away."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import Future
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from didi_instruct.serving.jobs import Canvas, Done

T = TypeVar("T")
BACKLOG = 256
"""Canvases kept for a client that reads slowly; beyond, the oldest of them are left out."""
PING_SECONDS = 15.0
"""Of silence, after which a comment keeps proxies from closing the connection."""
SEND_SECONDS = 60.0
"""After which a client that reads nothing is given up."""


class GoneError(Exception):
    """The client has closed the connection."""


async def unless_gone(request: HttpRequest, wanted: Awaitable[T]) -> T:
    """Wait for something, or until the client is gone, which cancels it."""
    work = asyncio.ensure_future(wanted)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise GoneError
        return work.result()
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _gone(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Feed:
    """Canvases of a request, from the engine's thread to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._kept: deque[Canvas] = deque(maxlen=BACKLOG)
        self._news = asyncio.Event()
        self.future: Future[Done] = Future()

    def watch(self, canvas: Canvas) -> None:
        """Take a canvas; called by the engine."""
        self._tell(canvas)

    def follow(self, future: "Future[Done]") -> None:
        """Wake up when a request is over, too."""
        self.future = future
        future.add_done_callback(lambda _: self._tell(None))

    def _tell(self, canvas: Canvas | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take, canvas)

    def _take(self, canvas: Canvas | None) -> None:
        if canvas is not None:
            self._kept.append(canvas)
        self._news.set()

    async def wait(self, seconds: float) -> bool:
        """Wait for news; False: there were none for so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        return True

    def take(self) -> tuple[list[Canvas], bool]:
        """The canvases since the last call, and whether the request is over."""
        over = self.future.done()
        found = list(self._kept)
        self._kept.clear()
        self._news.clear()
        return found, over


class EventStream(StreamingResponse):
    """Server-sent events of a request, which is cancelled when its client goes away."""

    def __init__(self, events: AsyncIterator[str], future: "Future[Done]") -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._future = future

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send what comes, to a client that takes it."""

        async def patient(message: Message) -> None:
            async with asyncio.timeout(SEND_SECONDS):
                await send(message)

        try:
            await super().__call__(scope, receive, patient)
        except TimeoutError:
            pass
        finally:
            self._future.cancel()


def event(data: Any) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"


PING = ": waiting\n\n"
END = "data: [DONE]\n\n"
