"""The route of OpenAI's Responses API. Nothing is stored: there is no answer to get or delete."""

from fastapi import APIRouter, Request, Response

from nano.serve.front_end import front_end
from nano.serve.generation_route import GenerationRoute
from nano.serve.http.answers import ResponseObject, answers
from nano.serve.openai.chat_call import prepare_chat
from nano.serve.openai.chat_reply import ChatReply
from nano.serve.responses.body import ResponsesBody
from nano.serve.responses.reply import ResponsesReply

router = APIRouter(route_class=GenerationRoute)


@router.post("/v1/responses", responses=answers(ResponseObject, streams=True))
async def create_response(body: ResponsesBody, request: Request) -> Response:
    served = front_end(request)
    model = served.choose_model(body.model)
    chat = body.to_chat()
    reply_id = served.reply_id(request, "resp_")
    prepared = await prepare_chat(served, chat, reply_id)
    head = served.head(reply_id, model)
    told = ChatReply(chat, served.engine.tokenizer, head)
    reply = ResponsesReply(body, told, head, prepared.sampling_params)
    return await served.answer(request, reply, [prepared], is_streamed=bool(body.stream))
