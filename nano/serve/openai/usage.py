"""Usage: the token counts at the end of an answer, in OpenAI's shape."""

from typing import Any

from nano.outputs import CompletionOutput, RequestOutput


class Usage:
    """Counts the tokens of one call, from its outputs, whole or in pieces."""

    def __init__(self, has_prediction: bool) -> None:
        self._num_prompt_tokens: dict[str, int] = {}  # by request id
        self._num_cached_tokens: dict[str, int] = {}
        self.completion_tokens = 0
        self.accepted_prediction_tokens = 0
        self.rejected_prediction_tokens = 0
        self._has_prediction = has_prediction

    @property
    def prompt_tokens(self) -> int:
        return sum(self._num_prompt_tokens.values())

    @property
    def cached_tokens(self) -> int:
        return sum(self._num_cached_tokens.values())

    def count(self, output: RequestOutput) -> None:
        """Add an output, or what is new of it."""
        self.count_prompt(output)
        for completion in output.outputs:
            self.count_completion(completion)

    def count_prompt(self, output: RequestOutput) -> None:
        """Every output of a request shows its prompt: it counts once."""
        self._num_prompt_tokens[output.request_id] = len(output.prompt_token_ids)
        self._num_cached_tokens[output.request_id] = output.num_cached_tokens or 0

    def count_completion(self, completion: CompletionOutput) -> None:
        self.completion_tokens += len(completion.token_ids)
        report = completion.speculative
        if report is not None:
            self.accepted_prediction_tokens += report.num_accepted_prediction_tokens
            self.rejected_prediction_tokens += report.num_rejected_prediction_tokens

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
