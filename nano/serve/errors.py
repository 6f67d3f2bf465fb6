"""OpenAI's error body, and which of our errors becomes which status."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from nano.errors import EngineDead, InvalidRequest

MAX_SENTENCES = 8  # of one answer about a field that is wrong in many places


class ModelNotFound(HTTPException):
    """The caller asks for a model that is not served here."""

    def __init__(self, name: str):
        super().__init__(404, f"the model {name!r} does not exist; see /v1/models")


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body) of anything that a call may end with."""
    if isinstance(error, RequestValidationError):
        message, param = explain_validation(error.errors())
        return 400, error_body(message, 400, param)
    if isinstance(error, InvalidRequest):
        return 400, error_body(str(error), 400, error.param, error.code)
    if isinstance(error, ModelNotFound):
        return 404, error_body(error.detail, 404, "model", "model_not_found")
    if isinstance(error, HTTPException):
        status = error.status_code
        return status, error_body(str(error.detail), status)
    status = 503 if isinstance(error, EngineDead) else 500
    return status, error_body(str(error) or type(error).__name__, status)


def explain_validation(errors: Sequence[Any]) -> tuple[str, str | None]:
    """pydantic's errors as (one sentence, the top-level field it is about)."""
    reasons: dict[str, list[str]] = {}
    for error in errors:
        location = [str(part) for part in error["loc"] if part != "body"]
        if error["type"] == "json_invalid":
            return f"the body is not JSON: {error['ctx']['error']}", None
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


def install_error_handlers(app: FastAPI) -> None:
    """Every error of every route answers in OpenAI's shape."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        status, body = describe(error)
        headers = error.headers if isinstance(error, HTTPException) else None
        return JSONResponse(body, status, headers)

    for kind in (RequestValidationError, InvalidRequest, HTTPException, EngineDead, Exception):
        app.add_exception_handler(kind, answer)
