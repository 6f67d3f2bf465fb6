"""FrontEnd: what the routes of every API share. The engine, the models' names, how a call runs."""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from nano.engine.input_processor import PreparedRequest
from nano.engine.output_processor import OutputKind
from nano.errors import InvalidRequest
from nano.outputs import RequestOutput
from nano.serve.admission import Admission, Arrival
from nano.serve.async_engine import AsyncEngine
from nano.serve.generation import Generation
from nano.serve.http.errors import ModelNotFound
from nano.serve.http.event_stream import EventStream
from nano.serve.http.request_id import HEADER
from nano.serve.http.request_log import recorded
from nano.serve.metrics.core_stats import CoreStats
from nano.serve.metrics.request_metrics import Metrics
from nano.serve.openai.body import GenerationBody
from nano.serve.options import ServerOptions
from nano.serve.reply import Reply

CLIENT_CLOSED_REQUEST = 499  # nginx's word for it; nobody is there to read it


class FrontEnd:
    """What the routes share: the engine, the model's names, and how a call runs."""

    def __init__(self, engine: AsyncEngine, options: ServerOptions):
        self.engine = engine
        self.options = options
        self.model_names = options.served_model_name
        self.created = int(time.time())
        self._num_calls = itertools.count()
        ready = engine.client.ready
        self.core_stats = CoreStats(engine)
        self.metrics = Metrics(self.model_names[0], ready.max_model_len)
        self.admission = Admission(ready, options, self.metrics.reject)
        engine.observe(self.admission)
        engine.observe(self.metrics)

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

    def reply_id(self, request: Request, prefix: str, own: str | None = None) -> str:
        """The id that the caller sees: after `own` or X-Request-Id, which must agree.

        The answer's X-Request-Id is the same.
        """
        state, header = request.state, request.headers.get(HEADER)
        if own is not None:
            if header not in (None, own):
                raise InvalidRequest(
                    f"request_id is {own!r}, but {HEADER} is {header!r}; give one of them",
                    "request_id",
                )
            state.request_id = own
        return f"{prefix}{state.request_id}"

    def head(self, reply_id: str, model: str) -> dict[str, Any]:
        """What every body of an answer has."""
        return {
            "id": reply_id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": self.engine.fingerprint,
        }

    def meet(self) -> None:
        """A caller is at the door. Raises `EngineUnavailable` if nothing new is taken, `Refusal` if
        too much has been.
        """
        self.engine.check_ready()
        self.admission.meet()

    def arrive(self, request: Request) -> Arrival:
        """Take a call in, whose body has come. Raises what `meet` does."""
        self.engine.check_ready()
        request.state.arrival = arrival = self.admission.arrive()
        return arrival

    async def prepare(
        self,
        body: GenerationBody,
        reply_id: str,
        values: dict[str, Any],
        make_prompts: Callable[[], Sequence[str | list[int]]],
        add_special_tokens: bool,
    ) -> list[PreparedRequest]:
        """Validate and tokenise. Callers may repeat their ids; ours are unique.

        Raises `InvalidRequest`.
        """
        input_processor = self.engine.input_processor
        request_id = f"{reply_id}-{next(self._num_calls)}"
        now = time.monotonic()
        options = body.prompt_options()

        def work() -> list[PreparedRequest]:
            params = input_processor.default_sampling_params(**values)
            return [
                input_processor.process(
                    f"{request_id}-{index}",
                    prompt,
                    params,
                    arrival_time=now,
                    add_special_tokens=add_special_tokens,
                    **options,
                )
                for index, prompt in enumerate(make_prompts())
            ]

        try:
            prepared = await self.engine.prepare(work)
        except InvalidRequest as error:
            raise body.respelled(error) from None
        self.admission.limit(prepared, body.timeout_ms, body.max_queue_ms)
        return prepared

    async def answer(
        self,
        request: Request,
        reply: Reply,
        prepared: list[PreparedRequest],
        *,
        is_streamed: bool,
    ) -> Response:
        """Run prepared requests and answer, whole or as a stream. Aborts them if nobody listens.

        Raises `Refusal`, and has sent nothing to the core, if the queue is full.
        """
        reply = recorded(reply, request.scope)
        if is_streamed:
            generation = self._generate(request, prepared, OutputKind.DELTA)
            interval = self.options.sse_keep_alive_interval
            return EventStream(generation, reply, self.admission.lateness, interval)
        generation = self._generate(request, prepared, OutputKind.FINAL)
        try:
            outputs = await unless_disconnected(request, self._collect(generation))
        finally:
            generation.close()
        if outputs is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        # Log probabilities of a long answer are megabytes.
        return await self.engine.prepare(lambda: JSONResponse(reply.whole(outputs)))

    def _generate(
        self, request: Request, prepared: Sequence[PreparedRequest], kind: OutputKind
    ) -> Generation:
        """Send a call to the core, if it is let in."""
        request.state.arrival.end()
        self.admission.check([len(c.prompt_token_ids) for p in prepared for c in p.children])
        for one in prepared:
            self.metrics.accept(len(one.children), one.sampling_params.max_tokens)
        return self.engine.generate(prepared, kind)

    async def _collect(self, generation: Generation) -> list[RequestOutput]:
        """The finished output of each prompt, in their order. Raises `Refusal` once one is late."""
        outputs: dict[int, RequestOutput] = {}

        async def keep(prompt_index: int, output: RequestOutput) -> None:
            late = self.admission.lateness(output)
            if late is not None:
                raise late
            outputs[prompt_index] = output

        await generation.feed(keep)
        return [outputs[prompt_index] for prompt_index in sorted(outputs)]


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
