"""The HTTP application: all routes over one AsyncEngine. Torch-free."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from nano.serve import health
from nano.serve.async_engine import AsyncEngine
from nano.serve.errors import install_error_handlers
from nano.serve.front_end import FrontEnd
from nano.serve.openai import routes as openai_routes
from nano.serve.options import ServerOptions

ROUTERS = (health.router, openai_routes.router)


def create_app(engine: AsyncEngine, options: ServerOptions) -> FastAPI:
    """The application of one engine, which it starts and closes with itself.

    `options.served_model_name` has at least one name.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.close()

    app = FastAPI(title="nano", lifespan=lifespan)
    app.state.front_end = FrontEnd(engine, options)
    for router in ROUTERS:
        app.include_router(router)
    install_error_handlers(app)
    return app
