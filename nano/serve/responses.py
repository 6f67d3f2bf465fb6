"""Response bodies of the OpenAI routes, whole and streamed, made from RequestOutputs."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from nano.engine.tokenizer import Tokenizer
from nano.outputs import CompletionOutput, FinishReason, Logprob, PositionLogprobs, RequestOutput
from nano.serve.schemas import ChatBody, CompletionBody

LOWEST_LOGPROB = -9999.0  # JSON has no infinity; vLLM's stand-in

Json = dict[str, Any]


class Usage:
    """Counts the tokens of one call from its outputs, whole or in pieces."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0

    def count(self, output: RequestOutput) -> None:
        self.completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        if output.finished:
            self.prompt_tokens += len(output.prompt_token_ids)
            self.cached_tokens += output.num_cached_tokens or 0

    def body(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Reply[AnyBody: (ChatBody, CompletionBody)](ABC):
    pass
