"""Load models and serve them until the process is told to stop."""

import asyncio
import logging
import math
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn

from didi_instruct.data.chat import find_chat_template
from didi_instruct.errors import UserError
from didi_instruct.hub.sources import DEFAULT
from didi_instruct.model import Model, load
from didi_instruct.serving.app import create_app
from didi_instruct.serving.engine import BatchEngine, Limits
from didi_instruct.serving.metrics import Metrics
from didi_instruct.serving.served import Catalogue, Served, role_of

CPU_POSITIONS, GPU_POSITIONS = 2048, 1 << 16
"""Canvas positions of a pass: on a CPU more only makes everybody wait."""

BACKLOG = 2048
"""Connections that wait to be accepted."""

ANSWER_SECONDS = 10
"""For answers on their way when the engine has stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """Address and limits of a server."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    queue: int = 256
    """Requests that wait or run."""
    seconds: float = 300.0
    """That a request may take."""
    grace: float = 30.0
    """Seconds that requests have to finish when the server is told to stop."""
    positions: int | None = None
    """Canvas positions of a pass; None: what suits the device."""
    most_texts: int = 16
    """Texts of one request."""
    most_positions: int = 1 << 15
    """Canvas positions of one request."""
    most_bytes: int = 1 << 18
    """Of a body."""

    def __post_init__(self) -> None:
        """Refuse what cannot be served."""
        for name in ("grace", "most_texts", "most_positions", "most_bytes"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} is {getattr(self, name)}: use more than 0.")
        if not 0 <= self.port < 1 << 16:
            raise UserError(f"port is {self.port}: use 1 to 65535, or 0 for any that is free.")
        if self.positions is not None and self.positions < 1:
            raise UserError(f"positions is {self.positions}: use more than 0.")
        if self.api_key is not None and not self.api_key.strip():
            raise UserError("The API key is empty: give one, or leave it out.")
        if self.api_key is not None and not self.api_key.isascii():
            raise UserError("The API key is not ASCII, which no header carries: use another.")


def open_models(
    sources: Sequence[str], *, loader: Callable[..., Model] = load, **choices: Any
) -> list[Served]:
    """Load what is to be served; the first source is meant where a request names none."""
    if len(set(sources)) < len(sources):
        raise UserError("The same model is given twice: name each once.")
    served: list[Served] = []
    for source in sources:
        model = loader(source, **choices)
        role = role_of(model, beside_student=any(one.role == "student" for one in served))
        served.append(Served(source, model, role, find_chat_template(source)))
    return served


def usual_sources(source: str | None, against: Sequence[str]) -> list[str]:
    """The sources to serve: alone, the shipped student and its teacher."""
    if source is None and not against:
        return [DEFAULT, f"{DEFAULT}/teacher"]
    return [DEFAULT if source is None else source, *against]


def serve(
    served: Sequence[Served],
    settings: ServeSettings,
    *,
    listening: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, and finish what runs; `listening` is told the address."""
    metrics = Metrics()
    catalogue = Catalogue(
        served, most_texts=settings.most_texts, most_positions=settings.most_positions
    )
    on_gpu = any(one.model.device.type == "cuda" for one in served)
    usual = GPU_POSITIONS if on_gpu else CPU_POSITIONS
    limits = Limits(
        positions=usual if settings.positions is None else settings.positions,
        queue=settings.queue,
        seconds=settings.seconds,
    )
    bound = _bind(settings.host, settings.port)
    engine = BatchEngine(catalogue.models, limits, metrics)
    app = create_app(
        catalogue,
        engine,
        metrics,
        key=settings.api_key,
        most_bytes=settings.most_bytes,
        grace=settings.grace,
    )
    logging.getLogger("didi_instruct.serving").setLevel(logging.INFO)
    config = uvicorn.Config(
        app,
        access_log=False,
        log_level="warning",
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=math.ceil(settings.grace) + ANSWER_SECONDS,
    )
    if listening is not None:
        host, port = bound.getsockname()[:2]
        listening(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    # After its own shutdown uvicorn raises the signal again, for whoever listened before.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    try:
        StoppingServer(config, engine, settings.grace).run(sockets=[bound])
    finally:
        engine.close(settings.grace)


class StoppingServer(uvicorn.Server):
    """Tells the engine to stop as soon as the process is told to, so that all are answered."""

    def __init__(self, config: uvicorn.Config, engine: BatchEngine, grace: float) -> None:
        super().__init__(config)
        self._engine, self._grace = engine, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish what runs; after the grace the engine refuses the rest, and uvicorn sends that."""
        closing = asyncio.create_task(asyncio.to_thread(self._engine.close, self._grace))
        await super().shutdown(sockets)
        await closing


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket; that the address is taken is said before any model runs."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except OSError as error:
        raise UserError(
            f"{host}:{port} cannot be listened on ({error.strerror or error}): choose another "
            "--port or --host."
        ) from error
    bound.set_inheritable(True)
    return bound
