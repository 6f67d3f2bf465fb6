"""The routes of Anthropic's Messages API."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from nano.serve.front_end import front_end
from nano.serve.generation_route import GenerationRoute
from nano.serve.http.answers import InputTokens, Message, answers
from nano.serve.http.errors import error_responses
from nano.serve.http.json_route import JsonRoute
from nano.serve.messages.body import CountTokensBody, MessagesBody
from nano.serve.messages.errors import AnthropicError
from nano.serve.messages.reply import MessagesReply
from nano.serve.openai.chat_call import prepare_chat
from nano.serve.openai.chat_reply import ChatReply

PREFIX = "/v1/messages"  # below it, errors have Anthropic's shape

router = APIRouter(responses=error_responses(AnthropicError))
generation = APIRouter(route_class=GenerationRoute)
counting = APIRouter(route_class=JsonRoute)


@generation.post(PREFIX, responses=answers(Message, streams=True))
async def create_message(body: MessagesBody, request: Request) -> Response:
    served = front_end(request)
    model = served.choose_model(body.model)
    chat = body.to_chat()
    reply_id = served.reply_id(request, "msg_")
    prepared = await prepare_chat(served, chat, reply_id)
    head = served.head(reply_id, model)
    told = ChatReply(chat, served.engine.tokenizer, head)
    reply = MessagesReply(told, head, prepared)
    return await served.answer(request, reply, [prepared], is_streamed=bool(body.stream))


@counting.post(f"{PREFIX}/count_tokens", responses=answers(InputTokens))
async def count_tokens(body: CountTokensBody, request: Request) -> Response:
    served = front_end(request)
    served.choose_model(body.model)
    chat, tokenizer = body.to_chat(), served.engine.tokenizer

    def count() -> int:
        return len(tokenizer.encode(chat.prompt(tokenizer), add_special_tokens=False))

    return JSONResponse({"input_tokens": await served.engine.prepare(count)})


router.include_router(generation)
router.include_router(counting)
