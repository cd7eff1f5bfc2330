"""Middleware of every request: size, key, headers, log."""

import hmac
import logging
import time
from collections.abc import Mapping

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from didi_instruct.serving.api_errors import ApiError
from didi_instruct.serving.metrics import Metrics

access = logging.getLogger("didi_instruct.serving.access")
PROTECTED = ("/v1/", "/tokenize", "/metrics")
"""Paths that ask for the key, where there is one; the page and the two checks of health do not."""

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Of every answer that does not bring its own. There are none for other origins (CORS is off)."""


class TooLargeError(HTTPException):
    """A body longer than bodies may be."""

    def __init__(self, most: int) -> None:
        super().__init__(413, f"The body has more than {most} bytes.")


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(
        self, app: ASGIApp, *, metrics: Metrics, key: str | None = None, most_bytes: int = 1 << 18
    ) -> None:
        self.app, self.metrics, self.most_bytes = app, metrics, most_bytes
        # Without the line end that a key read from a file has: no header can hold it.
        self._key = None if key is None else key.strip().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it here."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status, read = time.monotonic(), 0, 0

        async def reply(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.most_bytes:
                raise TooLargeError(self.most_bytes)
            return message

        try:
            refusal = self._refusal(scope)
            if refusal is None:
                await self.app(scope, limited, reply)
            else:
                await refusal.response()(scope, receive, reply)
        finally:
            self.metrics.responses.labels(str(status)).inc()
            self._log(scope, status, time.monotonic() - begun)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self.most_bytes:
            return ApiError(413, f"The body has more than {self.most_bytes} bytes.")
        if self._key is None or not scope["path"].startswith(PROTECTED):
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._key):
            return None
        challenge = {"WWW-Authenticate": "Bearer"}
        return ApiError(401, "The key is missing or wrong.", None, "invalid_api_key", challenge)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        """One line, without what was asked for: neither body nor query."""
        client = (scope.get("client") or ("-",))[0]
        path = scope.get("raw_path", b"").decode("ascii", "replace").partition("?")[0][:200]
        shown = path if path.isprintable() else ascii(path)
        access.info("%s %s %s %s %.0f ms", client, scope["method"], shown, status, 1e3 * seconds)
