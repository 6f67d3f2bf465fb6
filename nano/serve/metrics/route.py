"""GET /metrics, and the counting of HTTP answers."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nano.serve.front_end import front_end
from nano.serve.metrics.core_metrics import CoreMetrics
from nano.serve.metrics.request_metrics import Metrics

router = APIRouter()


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """What Prometheus scrapes. Answers while the core is busy, and when it is dead."""
    served = front_end(request)
    core = CoreMetrics(
        await served.core_stats.latest(), served.engine.client.ready, served.model_names[0]
    )
    return Response(served.metrics.render(core), media_type=CONTENT_TYPE_LATEST)


class AnswerCount:
    """ASGI middleware that counts every answer by its route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")  # the router has left it there; none for a 404
                template = getattr(route, "path", None)
                self._metrics.answer(template, scope["method"], message["status"])
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)
