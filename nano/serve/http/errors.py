"""OpenAI's error body, and which of our errors becomes which status."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Scope

from nano.errors import EngineUnavailable, InvalidRequest, RequestFailed

MAX_SENTENCES = 8  # of one answer about a field that is wrong in many places

# Another API's error body, from the HTTP status and OpenAI's body.
ErrorShape = Callable[[int, dict[str, Any]], dict[str, Any]]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """OpenAI's error body, for the OpenAPI page."""

    error: ErrorDetail


def error_responses(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """`responses=` of an API whose errors look so, for the OpenAPI page."""
    meanings: dict[int | str, str] = {
        400: "The request is wrong",
        401: "No API key of this server",
        404: "No such model or route",
        413: "The body is too long",
        429: "Too much is waiting; see Retry-After",
        "4XX": "Anything else that is the caller's to change",
        503: "The engine is dead or the server is ending",
    }
    return {
        status: {"model": model, "description": meaning} for status, meaning in meanings.items()
    }


class Refusal(HTTPException):
    """A call that is turned away with `status`; `param` and `code` are for the body."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(status, message, headers)
        self.param = param
        self.code = code


class ModelNotFound(Refusal):
    """The caller asks for a model that is not served here."""

    def __init__(self, name: str):
        message = f"the model {name!r} does not exist; see /v1/models"
        super().__init__(404, message, "model", "model_not_found")


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    if status == 429:
        kind = "rate_limit_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body) of anything that a call may end with."""
    if isinstance(error, RequestValidationError):
        message, param = explain_validation(error.errors())
        return 400, error_body(message, 400, param)
    if isinstance(error, InvalidRequest):
        return 400, error_body(str(error), 400, error.param, error.code)
    if isinstance(error, Refusal):
        status = error.status_code
        return status, error_body(error.detail, status, error.param, error.code)
    if isinstance(error, HTTPException):
        status = error.status_code
        return status, error_body(str(error.detail), status)
    if isinstance(error, EngineUnavailable):
        return 503, error_body(str(error), 503, code=error.code)
    return 500, error_body(str(error) or type(error).__name__, 500)


def explain_validation(errors: Sequence[Any]) -> tuple[str, str | None]:
    """pydantic's errors as (one sentence, the top-level field it is about)."""
    reasons: dict[str, list[str]] = {}
    for error in errors:
        location = [str(part) for part in error["loc"] if part != "body"]
        if not location and isinstance(error.get("input"), bytes):
            return "the body is not declared as JSON; send Content-Type: application/json", None
        field = location[0] if location else ""
        if error["type"] == "extra_forbidden":
            return f"unknown parameter {'.'.join(location)!r}", field
        where = ".".join(location) or "the body"
        reasons.setdefault(field, []).append(f"{where}: {error['msg']}")
    field, sentences = next(iter(reasons.items()))
    shown = sentences[:MAX_SENTENCES]
    if len(sentences) > len(shown):
        shown.append(f"and {len(sentences) - len(shown)} more like these")
    return "; ".join(shown), field or None


def error_response(scope: Scope, error: Exception) -> JSONResponse:
    """The answer to a call that ends with `error`, in the shape of the API that was called."""
    status, body = describe(error)
    for prefix, shape in scope["app"].state.error_shapes.items():
        if is_below(route_path(scope), prefix):
            body = shape(status, body)
    headers = error.headers if isinstance(error, HTTPException) else None
    return JSONResponse(body, status, headers)


def route_path(scope: Scope) -> str:
    """The path as routes know it: without the prefix (--root-path) that a proxy may have left."""
    path, root = scope["path"], scope.get("root_path", "")
    assert isinstance(path, str)
    return path[len(root) :] if root and is_below(path, root) else path


def is_below(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")


def install_error_handlers(app: FastAPI, shapes: Mapping[str, ErrorShape]) -> None:
    """Every error of every route answers in OpenAI's shape, or that of the path's prefix."""
    app.state.error_shapes = shapes

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return error_response(request.scope, error)

    for kind in (
        RequestValidationError,
        InvalidRequest,
        HTTPException,
        EngineUnavailable,
        RequestFailed,  # or it counts as a bug of ours: a traceback, and an end of the connection
        Exception,
    ):
        app.add_exception_handler(kind, answer)
