"""POST /tokenize and /detokenize: text to token ids and back, as the model sees them."""

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from nano.engine.tokenizer import Tokenizer
from nano.errors import InvalidRequest
from nano.serve.front_end import front_end
from nano.serve.http.answers import Text, Tokens, answers
from nano.serve.http.json_route import JsonRoute
from nano.serve.openai.chat_body import Messages
from nano.serve.openai.conversation import ConversationBody
from nano.serve.openai.parameters import Body, applied

router = APIRouter(route_class=JsonRoute)


class TokenizeBody(ConversationBody):
    """A text, or messages and what steers the chat template. The longest is the body limit's."""

    model: str | None = applied("a name that /v1/models lists; null: the first of them")
    prompt: str | None = applied("a text; excludes messages")
    messages: Messages | None = applied("a conversation; excludes prompt")
    add_special_tokens: bool | None = applied(
        "true or false: what the model expects around a text (default: true for a prompt, false "
        "for a conversation, whose template writes it)"
    )
    return_token_strs: bool | None = applied("true or false: tokens as the vocabulary writes them")

    def token_ids(self, tokenizer: Tokenizer, trusts_templates: bool) -> list[int]:
        """Takes a while. Raises `InvalidRequest`."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", "prompt")
        if self.messages is not None:
            text = self.render(tokenizer, self.messages, trusts_templates)
            return tokenizer.encode(text, bool(self.add_special_tokens))
        for name in ConversationBody.model_fields:
            if getattr(self, name) is not None:
                raise InvalidRequest(f"{name} needs messages", name)
        assert self.prompt is not None
        return tokenizer.encode(self.prompt, self.add_special_tokens is not False)


class DetokenizeBody(Body):
    model: str | None = applied("a name that /v1/models lists; null: the first of them")
    tokens: Annotated[list[int], Field(fail_fast=True)] = applied("token ids", ...)


@router.post("/tokenize", responses=answers(Tokens))
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    served = front_end(request)
    served.choose_model(body.model)
    input_processor = served.engine.input_processor

    def work() -> dict[str, Any]:
        tokenizer = input_processor.tokenizer
        ids = body.token_ids(tokenizer, served.options.trust_request_chat_template)
        strings = [tokenizer.vocabulary_entry(i) for i in ids] if body.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": input_processor.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }

    return await served.engine.prepare(lambda: JSONResponse(work()))


@router.post("/detokenize", responses=answers(Text))
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    served = front_end(request)
    served.choose_model(body.model)
    input_processor = served.engine.input_processor

    def work() -> Response:
        input_processor.check_token_ids("tokens", body.tokens)
        text = input_processor.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text})

    return await served.engine.prepare(work)
