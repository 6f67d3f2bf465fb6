"""A chat on its way to the engine, whichever API it came by."""

from nano.engine.input_processor import PreparedRequest
from nano.errors import InvalidRequest
from nano.serve.front_end import FrontEnd
from nano.serve.openai.chat_body import ChatBody


async def prepare_chat(served: FrontEnd, body: ChatBody, reply_id: str) -> PreparedRequest:
    """Validate, render and tokenise. Raises `InvalidRequest`, in the caller's words, and what
    `FrontEnd.prepare` does."""
    engine = served.engine
    try:
        values = body.sampling_values()
    except InvalidRequest as error:
        raise body.respelled(error) from None
    values.setdefault("max_tokens", engine.model_max_tokens)
    trusts_templates = served.options.trust_request_chat_template
    (prepared,) = await served.prepare(
        body,
        reply_id,
        values,
        lambda: [body.prompt(engine.tokenizer, trusts_templates)],
        add_special_tokens=bool(body.add_special_tokens),
    )
    return prepared
