"""FrontEnd: what the routes of every API share. The engine, the models' names, how a call runs."""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from uuid import uuid4

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from nano.engine.input_processor import PreparedRequest
from nano.engine.output_processor import OutputKind
from nano.errors import InvalidRequest
from nano.outputs import RequestOutput
from nano.serve.async_engine import AsyncEngine, Generation
from nano.serve.errors import ModelNotFound
from nano.serve.event_stream import EventStream
from nano.serve.openai.schemas import GenerationBody
from nano.serve.options import ServerOptions
from nano.serve.reply import Reply

MAX_REQUEST_ID_LENGTH = 512
CLIENT_CLOSED_REQUEST = 499  # nginx's word for it; nobody is there to read it


class FrontEnd:
    """What the routes share: the engine, the model's names, and how a call runs."""

    def __init__(self, engine: AsyncEngine, options: ServerOptions):
        self.engine = engine
        self.options = options
        self.model_names = options.served_model_name
        self.created = int(time.time())
        self._num_calls = itertools.count()

    def card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "nano",
            "max_model_len": self.engine.client.ready.max_model_len,
        }

    def choose_model(self, name: str | None) -> str:
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise ModelNotFound(name)
        return name

    def reply_id(self, request: Request, prefix: str) -> str:
        """The id that the caller sees: after its own X-Request-Id, if it sent one."""
        own = request.headers.get("x-request-id")
        if own is not None and len(own) > MAX_REQUEST_ID_LENGTH:
            raise InvalidRequest(
                f"X-Request-Id must have at most {MAX_REQUEST_ID_LENGTH} characters, "
                f"got {len(own)}",
                "X-Request-Id",
            )
        return f"{prefix}-{own or uuid4().hex}"

    def head(self, reply_id: str, model: str) -> dict[str, Any]:
        """What every body of an answer has."""
        return {
            "id": reply_id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": self.engine.fingerprint,
        }

    async def prepare(
        self,
        body: GenerationBody,
        reply_id: str,
        values: dict[str, Any],
        make_prompts: Callable[[], Sequence[str | list[int]]],
        add_special_tokens: bool,
    ) -> list[PreparedRequest]:
        """Validate and tokenise. Callers may repeat their ids; ours are unique."""
        input_processor = self.engine.input_processor
        request_id = f"{reply_id}-{next(self._num_calls)}"
        now = time.monotonic()
        speculative, prediction = body.speculative_values(), body.prediction_text()

        def work() -> list[PreparedRequest]:
            params = input_processor.default_sampling_params(**values)
            return [
                input_processor.process(
                    f"{request_id}-{index}",
                    prompt,
                    params,
                    arrival_time=now,
                    priority=body.priority or 0,
                    cache_salt=body.cache_salt,
                    add_special_tokens=add_special_tokens,
                    speculative=speculative,
                    prediction=prediction,
                    speculative_trace=bool(body.speculative_trace),
                )
                for index, prompt in enumerate(make_prompts())
            ]

        try:
            return await self.engine.prepare(work)
        except InvalidRequest as error:
            raise body.respelled(error) from None

    async def answer(
        self,
        request: Request,
        reply: Reply,
        prepared: list[PreparedRequest],
        *,
        is_streamed: bool,
    ) -> Response:
        """Run prepared requests and answer, whole or as a stream. Aborts them if nobody listens."""
        if is_streamed:
            generation = self.engine.generate(prepared, OutputKind.DELTA)
            return EventStream(generation, reply)
        generation = self.engine.generate(prepared, OutputKind.FINAL)
        try:
            outputs = await unless_disconnected(request, collect(generation))
        finally:
            generation.close()
        if outputs is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(reply.whole(outputs))


async def collect(generation: Generation) -> list[RequestOutput]:
    """The finished output of each prompt, in their order."""
    outputs = [pair async for pair in generation]
    return [output for _, output in sorted(outputs, key=lambda pair: pair[0])]


async def unless_disconnected(
    request: Request, work: Coroutine[Any, Any, list[RequestOutput]]
) -> list[RequestOutput] | None:
    """The result of `work`; None, and `work` cancelled, if the client leaves first."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.create_task(work)
    leaving = asyncio.create_task(disconnected())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()


def front_end(request: Request) -> FrontEnd:
    served = request.app.state.front_end
    assert isinstance(served, FrontEnd)
    return served
