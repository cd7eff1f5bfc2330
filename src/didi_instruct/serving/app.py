"""The HTTP application: paths, and what they ask of the engine."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from didi_instruct.errors import UserError
from didi_instruct.sampling.generate import Request
from didi_instruct.serving import page
from didi_instruct.serving.answers import Answer, Growing
from didi_instruct.serving.api_errors import ApiError, api_error, error_of_validation, wrong
from didi_instruct.serving.chat import chat_prompt
from didi_instruct.serving.engine import BatchEngine
from didi_instruct.serving.guard import Guard
from didi_instruct.serving.jobs import Done, Job, Watch
from didi_instruct.serving.metrics import CONTENT_TYPE, Metrics
from didi_instruct.serving.schemas import Chat, Completion, ErrorAnswer, Infill, Tokenize
from didi_instruct.serving.served import Catalogue, Served
from didi_instruct.serving.streams import (
    END,
    PING,
    PING_SECONDS,
    EventStream,
    Feed,
    GoneError,
    event,
    unless_gone,
)

FIRST_SECONDS = 5.0
"""A stream waits so long for its first event: an error before it has a status of its own."""
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer} for status in (400, 401, 404, 413, 429, 500, 503)
}


@dataclass(frozen=True)
class Server:
    """State that all paths share."""

    catalogue: Catalogue
    engine: BatchEngine

    def submit(self, answer: Answer, request: Request, watch: Watch | None = None) -> Job:
        """Queue a request."""
        judge = answer.body.judge
        return self.engine.submit(answer.served.name, request, watch=watch, judge=judge)

    async def answer(self, http: HttpRequest, answer: Answer, request: Request) -> Response:
        """Run a request and answer it, whole or as a stream; a client that goes away ends it."""
        try:
            if answer.body.stream:
                return await self._stream(http, answer, request)
            job = self.submit(answer, request)
            done = await unless_gone(http, asyncio.wrap_future(job.future))
        except GoneError:
            raise
        except Exception as error:  # of the engine: what it is to a client is said in one place
            raise api_error(error) from None
        return JSONResponse(answer.whole(done))

    async def _stream(self, http: HttpRequest, answer: Answer, request: Request) -> Response:
        body, feed = answer.body, Feed()
        diffusing = not isinstance(body, Chat) and body.diffusing
        watched = diffusing or answer.served.model.config.kind == "ar"
        job = self.submit(answer, request, feed.watch if watched else None)
        feed.follow(job.future)
        try:
            await unless_gone(http, feed.wait(FIRST_SECONDS))
            if job.future.done() and (error := job.future.exception()) is not None:
                raise error
        except BaseException:
            job.future.cancel()
            raise
        return EventStream(_events(answer, feed, diffusing=diffusing), job.future)


async def _events(answer: Answer, feed: Feed, *, diffusing: bool) -> AsyncIterator[str]:
    """Events of a request until it is over, and `[DONE]`."""
    growing, over = Growing(answer), False
    while not over:
        if not await feed.wait(PING_SECONDS):
            yield PING
            continue
        canvases, over = feed.take()
        for canvas in canvases if diffusing else canvases[-1:]:
            for data in [answer.canvas(canvas)] if diffusing else growing.chunks(canvas):
                yield event(data)
    error = feed.future.exception()
    if error is not None:
        yield event(api_error(error).detail)
    else:
        for data in _last(answer, growing, feed.future.result(), diffusing=diffusing):
            yield event(data)
    yield END


def _last(
    answer: Answer, growing: Growing, done: Done, *, diffusing: bool
) -> Sequence[dict[str, Any]]:
    if diffusing:
        return [answer.whole(done)]
    usage = [answer.last_chunk(done)] if answer.body.includes_usage else []
    return [*growing.rest(done), *usage]


def create_app(
    catalogue: Catalogue,
    engine: BatchEngine,
    metrics: Metrics,
    *,
    key: str | None = None,
    most_bytes: int = 1 << 18,
    grace: float = 30.0,
) -> Guard:
    """The application around an engine, which it closes when the server stops."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close, grace)

    # The usual pages of documentation load scripts from elsewhere.
    app = FastAPI(title="didi serve", docs_url=None, redoc_url=None, lifespan=lifespan)
    metrics.watch_queue(lambda: engine.waiting)
    server = Server(catalogue, engine)
    _add_generation(app, server)
    _add_facts(app, server, metrics)
    _add_page(app)
    _add_errors(app)
    return Guard(app, metrics=metrics, key=key, most_bytes=most_bytes)


def _add_generation(app: FastAPI, server: Server) -> None:
    catalogue = server.catalogue

    @app.post("/v1/completions", responses=ERRORS)
    async def completions(http: HttpRequest, body: Completion) -> Response:
        """Continue a prompt, or write between a prompt and a suffix."""
        if body.diffusing and not body.stream:
            raise wrong("`diffusing` sends events: set stream to true as well.", "diffusing")
        served = catalogue.find(body.model)
        request = await asyncio.to_thread(catalogue.completion, served, body)
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        hidden = [""] * len(prompts) if body.echo else prompts
        answer = Answer(served, body, hidden, "" if body.echo else body.suffix or "")
        return await server.answer(http, answer, request)

    @app.post("/v1/infill", responses=ERRORS)
    async def infill(http: HttpRequest, body: Infill) -> Response:
        """Fill the gaps of a text; what is returned is the whole text."""
        if body.diffusing and not body.stream:
            raise wrong("`diffusing` sends events: set stream to true as well.", "diffusing")
        served = catalogue.find(body.model)
        request = await asyncio.to_thread(catalogue.infill, served, body)
        return await server.answer(http, Answer(served, body), request)

    @app.post("/v1/chat/completions", responses=ERRORS)
    async def chat(http: HttpRequest, body: Chat) -> Response:
        """Answer a conversation, if the model's tokenizer says how one is written."""
        served = catalogue.find(body.model)
        if served.chat is None:
            raise wrong(
                f"`{served.name}` has no chat template, so it cannot take part in a conversation: "
                "use /v1/completions.",
                "messages",
            )
        asked = {"max_tokens", "max_completion_tokens", "messages"}
        tokens = body.max_completion_tokens or body.max_tokens
        shared = body.model_dump(exclude=asked, exclude_none=True)
        prompt = chat_prompt(served.chat, body.messages)
        plain = Completion(**shared, prompt=prompt, max_tokens=tokens)
        request = await asyncio.to_thread(catalogue.completion, served, plain)
        return await server.answer(http, Answer(served, body, [prompt]), request)


def _add_facts(app: FastAPI, server: Server, metrics: Metrics) -> None:
    catalogue, engine = server.catalogue, server.engine

    @app.get("/v1/models", responses=ERRORS)
    async def models() -> dict[str, Any]:
        """The served models; the first is meant where a request names none."""
        return catalogue.list()

    @app.post("/tokenize", responses=ERRORS)
    async def tokenize(body: Tokenize) -> dict[str, Any]:
        """Tokens of a text, and the text of each."""
        served = catalogue.find(body.model)
        return await asyncio.to_thread(_tokenize, served, body.text)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    @app.get("/ready", responses={503: {"model": ErrorAnswer}})
    async def ready() -> dict[str, str]:
        """The models are loaded, and requests are taken."""
        if not engine.ready:
            raise ApiError(503, "The server is stopping.", code="stopping")
        return {"status": "ready"}

    @app.get("/metrics", responses={200: {"content": {"text/plain": {}}}, 401: ERRORS[401]})
    async def numbers() -> Response:
        """Numbers for Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)


def _tokenize(served: Served, text: str) -> dict[str, Any]:
    tokens = served.tokenizer.encode([text])[0]
    return {"tokens": tokens, "words": served.pieces.of(tokens)}


def _add_page(app: FastAPI) -> None:
    for path, file in page.page_files().items():
        answer = Response(file.content, media_type=file.media_type, headers=page.HEADERS)

        app.add_route(f"/{path}", partial(_send, answer), include_in_schema=False)


async def _send(answer: Response, http: HttpRequest) -> Response:
    return answer


def _add_errors(app: FastAPI) -> None:
    async def refused(http: HttpRequest, error: Exception) -> Response:
        return api_error(error).response()

    async def invalid(http: HttpRequest, error: RequestValidationError) -> Response:
        return error_of_validation(error.errors()).response()

    async def no_such(http: HttpRequest, error: StarletteHTTPException) -> Response:
        said, headers = str(error.detail), error.headers or {}
        if error.status_code in (404, 405):
            said += ": GET /openapi.json lists all paths."
        return ApiError(error.status_code, said, headers=headers).response()

    async def gone(http: HttpRequest, error: GoneError) -> Response:
        return Response(status_code=499)  # nobody reads it; the log does

    handlers: dict[Any, Any] = {
        RequestValidationError: invalid,
        StarletteHTTPException: no_such,
        GoneError: gone,
        ApiError: refused,
        UserError: refused,
        Exception: refused,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
