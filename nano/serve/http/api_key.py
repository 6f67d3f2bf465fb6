"""ApiKeys: only callers who send a key come in."""

import hmac
from collections.abc import Sequence
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from nano.serve.http.errors import Refusal, error_response, route_path

OPEN_PATHS = ("/health", "/ready", "/ping")  # what load balancers ask for, and tells nothing


class ApiKeys:
    """ASGI middleware: 401 unless a call sends one of `keys` as the clients of OpenAI or Anthropic
    do, `Authorization: Bearer KEY` or `x-api-key: KEY`.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self._app = app
        # Digests are of one length, so a comparison tells nothing of a key's.
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and route_path(scope) not in OPEN_PATHS:
            refusal = self._refusal(Headers(scope=scope))
            if refusal is not None:
                await error_response(scope, refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> Refusal | None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [token.strip()] if scheme.lower() == "bearer" else []
        given += headers.getlist("x-api-key")
        if sum(map(self._is_known, given)):
            return None
        message = "the API key is not one of this server's" if given else "send an API key"
        return Refusal(
            401,
            f"{message}: Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _is_known(self, key: str) -> bool:
        digest = sha256(key.encode("latin-1")).digest()
        # A sum compares all, whichever is equal: the time taken does not say which.
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0
