"""The HTTP application: all routes over one AsyncEngine, and what lies around them. Torch-free."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from nano import __version__
from nano.serve import capabilities, health, tokens
from nano.serve.async_engine import AsyncEngine
from nano.serve.door import Door
from nano.serve.front_end import FrontEnd
from nano.serve.http.api_key import ApiKeys
from nano.serve.http.body_limit import BodyLimit
from nano.serve.http.errors import ErrorReply, ErrorShape, error_responses, install_error_handlers
from nano.serve.http.event_stream import DIRECT_SEND
from nano.serve.http.request_id import HEADER, RequestIds
from nano.serve.http.request_log import RequestLog
from nano.serve.messages import routes as messages_routes
from nano.serve.messages.errors import anthropic_error
from nano.serve.metrics.route import AnswerCount
from nano.serve.metrics.route import router as metrics_router
from nano.serve.metrics.stats_log import logging_stats
from nano.serve.openai import routes as openai_routes
from nano.serve.options import ServerOptions
from nano.serve.responses import routes as responses_routes

ROUTERS = (
    health.router,
    metrics_router,
    openai_routes.router,
    responses_routes.router,
    messages_routes.router,
    tokens.router,
    capabilities.router,
)
GENERATION_ROUTERS = (  # those of them whose routes ask for tokens
    openai_routes.generation,
    responses_routes.router,
    messages_routes.generation,
)
# Path prefix -> how errors look there, if not OpenAI's.
ERROR_SHAPES: dict[str, ErrorShape] = {messages_routes.PREFIX: anthropic_error}


class HttpApp(FastAPI):
    """FastAPI within our middleware, which so also sees what FastAPI answers to a bug of ours."""

    def __init__(self, options: ServerOptions, lifespan: Lifespan[FastAPI]):
        super().__init__(
            title="nano",
            version=__version__,
            lifespan=lifespan,
            redirect_slashes=False,
            responses=error_responses(ErrorReply),
        )
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not left to uvicorn, which takes it that the proxy has removed the prefix from the path.
        # Starlette takes both.
        scope["root_path"] = self._options.root_path
        scope[DIRECT_SEND] = send
        await super().__call__(scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        options = self._options
        app = super().build_middleware_stack()
        served: FrontEnd = self.state.front_end
        app = BodyLimit(app, options.max_body_bytes)
        app = Door(app, GENERATION_ROUTERS, served.meet)
        if options.api_key:
            app = ApiKeys(app, options.api_key)
        if options.allowed_origins:
            app = CORSMiddleware(
                app,
                allow_origins=options.allowed_origins,
                allow_methods=options.allowed_methods,
                allow_headers=options.allowed_headers,
                allow_credentials=options.allow_credentials,
                expose_headers=(HEADER, "Retry-After"),
            )
        app = RequestIds(AnswerCount(app, served.metrics))
        return RequestLog(app) if options.access_log == "json" else app


def create_app(engine: AsyncEngine, options: ServerOptions) -> FastAPI:
    """The application of one engine, which it starts and closes with itself.

    `options.served_model_name` has at least one name.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        with logging_stats(app.state.front_end.core_stats, options.disable_log_stats):
            yield
        await engine.close()

    app = HttpApp(options, lifespan)
    app.state.front_end = FrontEnd(engine, options)
    for router in ROUTERS:
        app.include_router(router)
    install_error_handlers(app, ERROR_SHAPES)
    return app
