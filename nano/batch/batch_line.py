"""BatchLine: one line of a file in OpenAI's batch format, taken apart."""

from dataclasses import dataclass
from typing import Any

import msgspec

from nano.errors import InvalidRequest

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
FIELDS = ("custom_id", "method", "url", "body")
MAX_SHOWN = 100  # characters of a wrong value in a message


class _Streamed(msgspec.Struct):
    stream: Any = None


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_streamed = msgspec.json.Decoder(_Streamed)


@dataclass(slots=True)
class BatchLine:
    """What is asked, or `refusal`: why nothing can be. `body` is JSON as the caller wrote it, so
    that the server's own checks see all of it.
    """

    number: int  # of the line in its file, from 1
    custom_id: str | None = None
    url: str = ""
    body: bytes = b""
    refusal: InvalidRequest | None = None

    @classmethod
    def parse(cls, number: int, text: bytes) -> "BatchLine":
        line = cls(number)
        try:
            line._fill(text)
        except InvalidRequest as refusal:
            line.refusal = refusal
        return line

    def _fill(self, text: bytes) -> None:
        try:
            given = _fields.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"line {self.number} is not a JSON object: {error}") from None
        self.custom_id = _text(given, "custom_id")
        for name in given:
            if name not in FIELDS:
                raise InvalidRequest(f"unknown field {name[:MAX_SHOWN]!r}", name[:MAX_SHOWN])
        method, self.url = _text(given, "method"), _text(given, "url")
        if method != "POST":
            raise InvalidRequest(f"method must be POST, got {method[:MAX_SHOWN]!r}", "method")
        if self.url not in URLS:
            raise InvalidRequest(
                f"url must be one of {', '.join(URLS)}, got {self.url[:MAX_SHOWN]!r}", "url"
            )
        if "body" not in given:
            raise InvalidRequest("body is missing", "body")
        self.body = bytes(given["body"])
        if _asks_for_stream(self.body):
            raise InvalidRequest("stream must not be true in a batch", "stream")


def _text(given: dict[str, msgspec.Raw], name: str) -> str:
    if name not in given:
        raise InvalidRequest(f"{name} is missing", name)
    try:
        text = msgspec.json.decode(given[name], type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = ""
    if not text:
        shown = bytes(given[name])[:MAX_SHOWN].decode(errors="replace")
        raise InvalidRequest(f"{name} must be a string that is not empty, got {shown}", name)
    return text


def _asks_for_stream(body: bytes) -> bool:
    try:
        return _streamed.decode(body).stream is True
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False  # the server says better what is wrong
