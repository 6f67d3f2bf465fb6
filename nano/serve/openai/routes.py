"""The routes of OpenAI's API: chat completions, completions, models."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nano.serve.front_end import front_end
from nano.serve.generation_route import GenerationRoute
from nano.serve.http.answers import ChatCompletion, Completion, Model, ModelList, answers
from nano.serve.openai.chat_body import ChatBody
from nano.serve.openai.chat_call import prepare_chat
from nano.serve.openai.chat_reply import ChatReply
from nano.serve.openai.completion_body import CompletionBody
from nano.serve.openai.completion_reply import CompletionReply

router = APIRouter()
generation = APIRouter(route_class=GenerationRoute)


@router.get("/v1/models", responses=answers(ModelList))
async def list_models(request: Request) -> Response:
    served = front_end(request)
    return JSONResponse({"object": "list", "data": [served.card(n) for n in served.model_names]})


@router.get("/v1/models/{name:path}", responses=answers(Model))
async def retrieve_model(name: str, request: Request) -> Response:
    served = front_end(request)
    return JSONResponse(served.card(served.choose_model(name)))


@generation.post("/v1/chat/completions", responses=answers(ChatCompletion, streams=True))
async def chat_completions(body: ChatBody, request: Request) -> Response:
    served = front_end(request)
    model = served.choose_model(body.model)
    reply_id = served.reply_id(request, "chatcmpl-", body.request_id)
    prepared = await prepare_chat(served, body, reply_id)
    reply = ChatReply(body, served.engine.tokenizer, served.head(reply_id, model))
    return await served.answer(request, reply, [prepared], is_streamed=bool(body.stream))


@generation.post("/v1/completions", responses=answers(Completion, streams=True))
async def completions(body: CompletionBody, request: Request) -> Response:
    served = front_end(request)
    engine, model = served.engine, served.choose_model(body.model)
    reply_id = served.reply_id(request, "cmpl-", body.request_id)
    prepared = await served.prepare(
        body,
        reply_id,
        body.sampling_values(),
        body.prompts,
        add_special_tokens=body.add_special_tokens is not False,
    )
    reply = CompletionReply(body, engine.tokenizer, served.head(reply_id, model))
    return await served.answer(request, reply, prepared, is_streamed=bool(body.stream))


router.include_router(generation)
