"""Routes for whoever runs the server: does it live, does it take requests, what is it?"""

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nano import __version__
from nano.errors import EngineDead
from nano.serve.front_end import front_end
from nano.serve.http.answers import Empty, Version, answers

router = APIRouter()


@router.get("/health", responses=answers(Empty))
@router.get("/ping", responses=answers(Empty))
async def health(request: Request) -> Response:
    """200 while the engine core lives, 503 with the reason once it is dead or stuck."""
    fault = front_end(request).engine.fault
    if fault is not None:
        raise EngineDead(fault)
    return JSONResponse({})


@router.get("/ready", responses=answers(Empty))
async def ready(request: Request) -> Response:
    """200 while new requests are taken, 503 while the engine is loading, draining or dead."""
    front_end(request).engine.check_ready()
    return JSONResponse({})


@router.get("/version", responses=answers(Version))
async def version() -> Response:
    return JSONResponse({"version": __version__})
