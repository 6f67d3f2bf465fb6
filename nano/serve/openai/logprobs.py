"""Log probabilities as JSON holds them."""

from nano.outputs import RequestOutput
from nano.serve.reply import Json

LOWEST_LOGPROB = -9999.0  # JSON has no infinity; vLLM's stand-in


def prompt_logprobs(output: RequestOutput) -> list[Json | None]:
    """vLLM's shape: per prompt token, token id -> its log probability."""
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in position.items()
        }
        for position in output.prompt_logprobs or ()
    ]


def finite(logprob: float) -> float:
    """`logprob` as JSON can hold it."""
    return max(logprob, LOWEST_LOGPROB)
