"""Errors as clients see them: OpenAI's form, a status, and nothing of the server's inside."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import JSONResponse

from didi_instruct.errors import UserError
from didi_instruct.serving.jobs import ExpiredError, FullError, RefusedError
from didi_instruct.serving.passes import is_out_of_memory

RETRY_SECONDS = 2
"""After which a client that met a full queue may try again."""


@dataclass(eq=False)
class ApiError(Exception):
    """An error for one client."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def detail(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 429 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        said = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": said}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.detail, self.status, dict(self.headers))


def wrong(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that its sender can mend."""
    return ApiError(400, message, param, code)


def api_error(error: BaseException) -> ApiError:
    """Turn an error of the engine into one for the client."""
    retry = {"Retry-After": str(RETRY_SECONDS)}
    match error:
        case ApiError():
            return error
        case UserError():
            return wrong(str(error))
        case FullError():
            message = "The queue is full: try again later."
            return ApiError(429, message, code="queue_full", headers=retry)
        case RefusedError():
            return ApiError(503, "The server is stopping.", code="stopping", headers=retry)
        case ExpiredError():
            message = "The request took longer than requests may: ask for less, or try again later."
            return ApiError(503, message, code="timeout", headers=retry)
    if is_out_of_memory(error):
        message = "The request does not fit into memory: ask for fewer or shorter texts."
        return ApiError(503, message, code="out_of_memory")
    return ApiError(500, "The model failed on this request.", code="failed")


def error_of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Say which parameter is wrong, and why, without repeating its value."""
    first = errors[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return wrong('The body is not JSON: send an object, such as {"prompt": "Once"}.')
    name = first.get("ctx", {}).get("name") if first["type"] == "unsupported" else None
    param = name or (place[0] if place else None)
    if first["type"] == "extra_forbidden":
        return wrong(f"`{'.'.join(place)}` is not supported: leave it out.", param, "unsupported")
    if name is not None:
        return wrong(str(first["msg"]), param, "unsupported")
    if not place:
        return wrong("The body is no JSON object: send one, with `Content-Type: application/json`.")
    where = f"`{param}`: " if param else "The body: "
    return wrong(f"{where}{first['msg']}.", param)
