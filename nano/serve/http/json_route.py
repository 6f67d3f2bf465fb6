"""JsonRoute: a route whose body is JSON, read strictly.

What parsers of JSON disagree about is refused at the door: repeated keys, NaN, halves of
characters, texts nested without end. Nothing behind it has to think of them.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from nano.serve.http.errors import Refusal

MAX_DEPTH = 100  # of lists and objects within each other
_NUM_QUICK_BYTES = 1 << 14  # that take less time than another thread to do it
_NUM_SHOWN = 40  # characters of what is wrong
_BYTE_ORDER_MARK = "\ufeff"


class JsonRoute(APIRoute):
    """`APIRouter(route_class=JsonRoute)`; FastAPI validates what comes out."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read_strictly(request: Request) -> Response:
            request = _JsonRequest(request.scope, request.receive)
            # It has to come in whatever becomes of it: an answer in the middle may get lost.
            await request.body()
            with self.admit(request):
                return await handle(request)

        return read_strictly

    def admit(self, request: Request) -> AbstractContextManager[object]:
        """What a call is worked on within. Raises what turns it away, its body unread."""
        return nullcontext()


class _JsonRequest(Request):
    async def body(self) -> bytes:
        encoding = self.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            message = f"the body must not be compressed, got Content-Encoding: {encoding}"
            raise Refusal(415, message, code="unsupported_content_encoding")
        return await super().body()

    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= _NUM_QUICK_BYTES:
            return parse_json(body)
        return await asyncio.to_thread(parse_json, body)  # a million token ids take a while


def parse_json(body: bytes) -> Any:
    """The value of a JSON text in UTF-8. Raises `Refusal` (400), naming the top-level field."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise _not_json(f"byte {error.start} is not UTF-8") from None
    if text.startswith(_BYTE_ORDER_MARK):
        raise _not_json("it begins with a byte order mark")
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise _not_json(f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:  # Python's own limit, far above that of any field
        raise _not_json("it holds an integer of thousands of digits") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise _too_deep()
    if isinstance(value, dict):
        for field, entry in value.items():
            _check_writable(field, None)
            _check_writable(entry, field)
    else:
        _check_writable(value, None)
    return value


def _check_writable(value: Any, field: str | None) -> None:
    """Python reads what is not JSON; it does not write it."""
    where = "the body" if field is None else field
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        message = f"{where} must not hold half of a surrogate pair (\\ud800 to \\udfff)"
        raise Refusal(400, message, field) from None
    except ValueError:
        message = f"{where} must not hold NaN, Infinity or a number beyond 1e308"
        raise Refusal(400, message, field) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        key = next(key for key, num in Counter(key for key, _ in pairs).items() if num > 1)
        # In ASCII: it may hold half of a character.
        raise Refusal(400, f"the key {key[:_NUM_SHOWN]!a} comes twice in one object")
    return made


def _not_json(why: str) -> Refusal:
    return Refusal(400, f"the body is not JSON: {why}")


def _too_deep() -> Refusal:
    return Refusal(400, f"the body must be nested at most {MAX_DEPTH} deep")


def _depth(value: Any) -> int:
    """How deep lists and objects lie within each other; without recursion."""
    depth, level = 0, [value] if isinstance(value, list | dict) else []
    while level:
        depth += 1
        level = [
            child
            for one in level
            for child in (one if isinstance(one, list) else one.values())
            if isinstance(child, list | dict)
        ]
    return depth
