"""Usage: the token counts at the end of an answer, in OpenAI's shape."""

from typing import Any

from nano.outputs import RequestOutput


class Usage:
    """Counts the tokens of one call, from its outputs, whole or in pieces."""

    def __init__(self, has_prediction: bool) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.accepted_prediction_tokens = 0
        self.rejected_prediction_tokens = 0
        self._has_prediction = has_prediction

    def count(self, output: RequestOutput) -> None:
        for completion in output.outputs:
            report = completion.speculative
            if report is not None:
                self.accepted_prediction_tokens += report.num_accepted_prediction_tokens
                self.rejected_prediction_tokens += report.num_rejected_prediction_tokens
        self.completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        if output.finished:
            self.prompt_tokens += len(output.prompt_token_ids)
            self.cached_tokens += output.num_cached_tokens or 0

    def to_json(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self._has_prediction:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": self.accepted_prediction_tokens,
                "rejected_prediction_tokens": self.rejected_prediction_tokens,
            }
        return usage
