"""Anthropic's error body."""

from typing import Literal

from pydantic import BaseModel

from nano.serve.reply import Json

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    """The body, for the OpenAPI page."""

    type: Literal["error"]
    error: ErrorDetail


def anthropic_error(status: int, body: Json) -> Json:
    """The body for an HTTP status, from OpenAI's body."""
    other = "invalid_request_error" if status < 500 else "api_error"
    error = {"type": KINDS.get(status, other), "message": body["error"]["message"]}
    return {"type": "error", "error": error}
