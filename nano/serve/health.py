"""GET /health: is the server to be kept?"""

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nano.errors import EngineDead
from nano.serve.front_end import front_end

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine core lives, 503 with the reason once it is dead."""
    fault = front_end(request).engine.fault
    if fault is not None:
        raise EngineDead(fault)
    return JSONResponse({})
