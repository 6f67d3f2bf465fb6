"""Door: calls for tokens that cannot be taken are turned away before they cost anything.

Under overload most calls are turned away, and what that costs is taken from those that are let in.
"""

from collections.abc import Callable, Iterable

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from nano.errors import EngineUnavailable
from nano.serve.http.body_limit import drop_rest
from nano.serve.http.errors import Refusal, error_response, route_path


class Door:
    """ASGI middleware before the routes. `check` raises what turns a call away; it is asked for
    those that the routes of `routers`, which have no parameters in their paths, would take.
    """

    def __init__(self, app: ASGIApp, routers: Iterable[APIRouter], check: Callable[[], None]):
        self._app = app
        routes = [route for router in routers for route in router.routes]
        self._routes = {route.path: route for route in routes if isinstance(route, APIRoute)}
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            route = self._routes.get(route_path(scope))
            if route is not None:
                try:
                    self._check()
                except (EngineUnavailable, Refusal) as refusal:
                    scope["route"] = route  # by which answers are counted
                    await drop_rest(receive)  # an answer in the middle of a body may get lost
                    await error_response(scope, refusal)(scope, receive, send)
                    return
        await self._app(scope, receive, send)
