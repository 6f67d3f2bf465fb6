"""The HTTP application: OpenAI's routes over an AsyncEngine. Torch-free."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from nano.engine.input_processor import PreparedRequest
from nano.engine.output_processor import OutputKind
from nano.errors import EngineDead, InvalidRequest, NanoError
from nano.log import get_logger
from nano.outputs import RequestOutput
from nano.serve.async_engine import AsyncEngine, Generation
from nano.serve.errors import ModelNotFound, describe, install_error_handlers
from nano.serve.responses import ChatReply, CompletionReply, Reply
from nano.serve.schemas import ChatBody, CompletionBody, GenerationBody

logger = get_logger(__name__)
router = APIRouter()

MAX_REQUEST_ID_LENGTH = 512
CLIENT_CLOSED_REQUEST = 499  # nginx's word for it; nobody is there to read it


class FrontEnd:
    """What the routes share: the engine, the model's names, and how a call runs."""

    def __init__(self, engine: AsyncEngine, model_names: Sequence[str]):
        self.engine = engine
        self.model_names = list(model_names)
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
        self, request: Request, body: GenerationBody, reply: Reply, prepared: list[PreparedRequest]
    ) -> Response:
        """Run prepared requests and answer, whole or as a stream. Aborts them if nobody listens."""
        if body.stream:
            generation = self.engine.generate(prepared, OutputKind.DELTA)
            return EventStream(generation, reply, body.includes_usage)
        generation = self.engine.generate(prepared, OutputKind.FINAL)
        try:
            outputs = await unless_disconnected(request, collect(generation))
        finally:
            generation.close()
        if outputs is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(reply.whole(outputs))


class EventStream(StreamingResponse):
    """A generation as server-sent events. However the connection ends, it is closed."""

    def __init__(self, generation: Generation, reply: Reply, includes_usage: bool):
        self._generation = generation
        events = stream_events(generation, reply, includes_usage)
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()


async def stream_events(
    generation: Generation, reply: Reply, includes_usage: bool
) -> AsyncIterator[str]:
    try:
        async for prompt_index, output in generation:
            for chunk in reply.chunks(prompt_index, output):
                yield event(chunk)
        if includes_usage:
            yield event(reply.usage_chunk())
        yield "data: [DONE]\n\n"
    except Exception as error:
        # The status line is gone; an event is the only way left to tell.
        if not isinstance(error, NanoError):
            logger.exception("a stream failed")
        yield event(describe(error)[1])


def event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


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


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine core lives, 503 with the reason once it is dead."""
    fault = front_end(request).engine.fault
    if fault is not None:
        raise EngineDead(fault)
    return JSONResponse({})


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    served = front_end(request)
    return JSONResponse({"object": "list", "data": [served.card(n) for n in served.model_names]})


@router.get("/v1/models/{name:path}")
async def retrieve_model(name: str, request: Request) -> Response:
    served = front_end(request)
    return JSONResponse(served.card(served.choose_model(name)))


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    served = front_end(request)
    engine, model = served.engine, served.choose_model(body.model)
    values = body.sampling_values()
    values.setdefault("max_tokens", engine.model_max_tokens)
    messages = [message.to_template() for message in body.messages]
    variables = body.template_variables()
    adds_prompt = body.add_generation_prompt is not False
    reply_id = served.reply_id(request, "chatcmpl")
    prepared = await served.prepare(
        body,
        reply_id,
        values,
        lambda: [engine.tokenizer.apply_chat_template(messages, adds_prompt, **variables)],
        add_special_tokens=bool(body.add_special_tokens),
    )
    reply = ChatReply(body, engine.tokenizer, served.head(reply_id, model))
    return await served.answer(request, body, reply, prepared)


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    served = front_end(request)
    engine, model = served.engine, served.choose_model(body.model)
    reply_id = served.reply_id(request, "cmpl")
    prepared = await served.prepare(
        body,
        reply_id,
        body.sampling_values(),
        body.prompts,
        add_special_tokens=body.add_special_tokens is not False,
    )
    reply = CompletionReply(body, engine.tokenizer, served.head(reply_id, model))
    return await served.answer(request, body, reply, prepared)


def front_end(request: Request) -> FrontEnd:
    served = request.app.state.front_end
    assert isinstance(served, FrontEnd)
    return served


def create_app(engine: AsyncEngine, model_names: Sequence[str]) -> FastAPI:
    """The application of one engine, which it starts and closes with itself."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.close()

    app = FastAPI(title="nano", lifespan=lifespan)
    app.state.front_end = FrontEnd(engine, model_names)
    app.include_router(router)
    install_error_handlers(app)
    return app
