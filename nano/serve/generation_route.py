"""GenerationRoute: the routes that ask for tokens, whose calls take a place in the queue."""

from contextlib import AbstractContextManager

from fastapi import Request

from nano.serve.front_end import front_end
from nano.serve.http.json_route import JsonRoute


class GenerationRoute(JsonRoute):
    """`APIRouter(route_class=GenerationRoute)`: 503 while nothing new is taken, 429 while not one
    more request may wait, whatever is in the body. `Door` asks before the body has come.
    """

    def admit(self, request: Request) -> AbstractContextManager[object]:
        return front_end(request).arrive(request)
