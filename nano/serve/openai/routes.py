"""The routes of OpenAI's API: chat completions, completions, models."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nano.serve.front_end import front_end
from nano.serve.openai.replies import ChatReply, CompletionReply
from nano.serve.openai.schemas import ChatBody, CompletionBody

router = APIRouter()


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
    return await served.answer(request, reply, prepared, is_streamed=bool(body.stream))


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
    return await served.answer(request, reply, prepared, is_streamed=bool(body.stream))
