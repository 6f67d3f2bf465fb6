import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from tokenizers import Tokenizer, processors

from tests.serve.server import Server
from tests.serve.words import make_words
from tests.tiny import BOS_TOKEN_ID, make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A context so long that a request which is not aborted runs for minutes."""
    return make_checkpoint(tmp_path_factory.mktemp("serve") / "tiny", max_position_embeddings=32768)


@pytest.fixture(scope="session")
def server(checkpoint: Path) -> Iterator[Server]:
    server = Server(checkpoint, "--max-num-seqs", "4", "--max-num-batched-tokens", "256")
    yield server
    server.stop()


CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.content == "forbidden" %}{{ raise_exception("not that word") }}{% endif %}
{%- if loop.first %}{{ bos_token }}{% endif -%}
[{{ message.role }}{{ message.name }}{{ message.tool_call_id }}]{{ message.content }}
{%- for call in message.tool_calls %}{{ call.id }}:{{ call.function.name }}
{%- for name, value in call.function.arguments.items() %}<{{ name }}={{ value }}>{% endfor %}
{%- endfor %};
{%- endfor %}
{%- for document in documents or [] %}<{{ document.title }}>{% endfor %}
{%- if tone %}({{ tone }}){% endif %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""


@pytest.fixture(scope="session")
def chat_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Adds BOS to plain texts, and has a chat template of ours, which prints all that it is told.

    Takes templates from requests, priorities and speculation; drafts by n-gram; has two names.
    """
    folder = make_checkpoint(tmp_path_factory.mktemp("serve") / "tiny")
    write_bos(folder)
    template = folder / "our.jinja"
    template.write_text(CHAT_TEMPLATE)
    proposers = {"proposers": [{"method": "ngram", "num_speculative_tokens": 4}]}
    server = Server(
        folder,
        *("--chat-template", str(template), "--trust-request-chat-template"),
        *("--scheduling-policy", "priority", "--speculative-config", json.dumps(proposers)),
        *("--logits-processors", "tests.serve.script:Script"),
        *("--served-model-name", "tiny", "other"),
    )
    yield server
    server.stop()


def write_bos(folder: Path) -> None:
    """Let the tokenizer of a checkpoint put BOS in front of texts."""
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS_TOKEN_ID)]
    )
    tokenizer.save(path)


@pytest.fixture(scope="session")
def short_server(checkpoint: Path) -> Iterator[Server]:
    """A context so short that calls made at random take no time."""
    server = Server(checkpoint, "--max-model-len", "64", "--max-num-seqs", "4")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def words_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Tokens are pieces of words. Its KV cache holds 512 tokens, half of its context.

    Log probabilities are those of what is sampled from, so that some are infinite.
    """
    server = Server(
        make_words(tmp_path_factory.mktemp("serve") / "words"),
        *("--chat-template", "{% for message in messages %}{{ message.content }}{% endfor %}"),
        *("--num-gpu-blocks-override", "32", "--max-num-seqs", "4"),
        *("--max-num-batched-tokens", "128", "--logprobs-mode", "processed_logprobs"),
        *("--logits-processors", "tests.serve.script:Script"),
    )
    yield server
    server.stop()


@pytest.fixture(scope="session")
def client(server: Server) -> OpenAI:
    return server.client()
