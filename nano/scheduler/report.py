"""What the front end hears of a request after a step. Torch-free."""

from nano.outputs import TokenOutput
from nano.scheduler.request import Request
from nano.step import StepOutput, StepPlan, TokenLogprobs


def report(request: Request, new_token_ids: list[int]) -> TokenOutput:
    """The news of `request`, which has `new_token_ids` by now and perhaps has ended."""
    update = TokenOutput(
        request.request_id, new_token_ids, request.finish_reason, request.stop_token_id
    )
    if request.num_output_tokens == len(new_token_ids):
        update.num_cached_tokens = request.num_cached_tokens
    if not request.has_reported:
        request.has_reported = True
        update.first_scheduled_time = request.first_scheduled_time
    if request.finish_reason is not None:
        update.speculation = request.speculation_stats
    return update


def new_prompt_logprobs(
    request: Request, plan: StepPlan, output: StepOutput
) -> TokenLogprobs | None:
    """The prompt logprobs of this step that were not delivered before a preemption."""
    if not output.prompt_logprobs:
        return None
    logprobs = output.prompt_logprobs.get(request.request_id)
    if logprobs is None:
        return None
    # Entry i of a request is prompt token i + 1: nothing precedes token 0.
    start = plan.num_computed_tokens[request.request_id]
    stop = start + len(logprobs.token_ids)
    num_known = request.num_prompt_logprobs
    assert start <= num_known, f"{request.request_id}: no logprobs {num_known} to {start}"
    if stop <= num_known:
        return None
    request.num_prompt_logprobs = stop
    return slice_logprobs(logprobs, num_known - start, stop - start)


def slice_logprobs(logprobs: TokenLogprobs, start: int, stop: int) -> TokenLogprobs:
    return TokenLogprobs(
        logprobs.token_ids[start:stop], logprobs.logprobs[start:stop], logprobs.ranks[start:stop]
    )
