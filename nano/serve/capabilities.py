"""GET /v1/capabilities: what this server does with every parameter, and its limits.

Made from the table that the routes themselves go by (`openai/parameters.py`).
"""

import dataclasses
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nano.sampling_params import MAX_N, MAX_STOP_STRINGS
from nano.serve.front_end import FrontEnd, front_end
from nano.serve.messages.body import CountTokensBody, MessagesBody
from nano.serve.openai.body import MAX_CHOICES, StreamOptions
from nano.serve.openai.chat_body import ChatBody
from nano.serve.openai.completion_body import CompletionBody
from nano.serve.openai.parameters import Body, parameters_of
from nano.serve.responses.body import ResponsesBody
from nano.serve.tokens import DetokenizeBody, TokenizeBody

# Of those routes whose bodies say of every field in which state it is.
BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
}

router = APIRouter()


@router.get("/v1/capabilities")
async def capabilities(request: Request) -> Response:
    return JSONResponse(describe_server(front_end(request)))


def describe_server(served: FrontEnd) -> dict[str, Any]:
    engine, options = served.engine, served.options
    ready, inputs = engine.client.ready, engine.input_processor
    return {
        "models": list(served.model_names),
        "system_fingerprint": engine.fingerprint,
        "chat_templates": list(engine.tokenizer.template_names),
        "scheduling_policy": inputs.policy,
        "proposers": [dataclasses.asdict(proposer) for proposer in ready.proposers],
        "limits": {
            "max_model_len": inputs.max_model_len,
            "num_kv_slots": inputs.num_kv_slots,
            "vocab_size": inputs.vocab_size,
            "max_logprobs": inputs.max_logprobs,
            "max_n": MAX_N,
            "max_choices": MAX_CHOICES,
            "max_stop_strings": MAX_STOP_STRINGS,
            "max_body_bytes": options.max_body_bytes,
            "max_waiting_requests": options.max_waiting_requests,
            "max_waiting_tokens": options.max_waiting_tokens,
            "max_queue_ms": options.max_queue_ms,
            "timeout_ms": options.timeout_ms,
        },
        "routes": {
            route: {"parameters": rows(body), "other_parameters": "refused"}
            for route, body in BODIES.items()
        },
        "stream_options": rows(StreamOptions),
    }


def rows(body: type[Body]) -> dict[str, Any]:
    """Field -> its state, what it accepts, and why there is no more."""
    return {name: dataclasses.asdict(row) for name, row in parameters_of(body).items()}
