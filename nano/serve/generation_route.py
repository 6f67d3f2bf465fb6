"""GenerationRoute: the routes that ask for tokens, which turn callers away before anything else.

Under overload most calls are turned away, and what that costs is taken from those that are let in.
"""

from fastapi import Request

from nano.serve.front_end import front_end
from nano.serve.http.json_route import JsonRoute


class GenerationRoute(JsonRoute):
    """`APIRouter(route_class=GenerationRoute)`: 503 while nothing new is taken, 429 while not one
    more request may wait, whatever is in the body.
    """

    def admit(self, request: Request) -> None:
        front_end(request).check_open()
