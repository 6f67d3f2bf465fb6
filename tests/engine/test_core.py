import pytest

from nano.engine.core import EngineCore
from nano.engine.messages import EngineRequest
from nano.errors import CheckpointError
from nano.outputs import FinishReason, TokenOutput
from tests.engine.fake_core import (
    FAIL_TOKEN,
    RAISE_TOKEN,
    FakeExecutor,
    fake_config,
    fake_request,
)


def run(core: EngineCore, *requests: EngineRequest) -> dict[str, list[TokenOutput]]:
    """Add `requests`, step until all is done; the outputs of each."""
    outputs: dict[str, list[TokenOutput]] = {}
    for request in requests:
        refusal = core.add(request)
        if refusal is not None:
            outputs.setdefault(refusal.request_id, []).append(refusal)
    while core.has_work:
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


def finishes(outputs: list[TokenOutput]) -> list[FinishReason]:
    return [output.finish_reason for output in outputs if output.finish_reason is not None]


def test_requests_of_any_mix_of_lengths_get_their_tokens_and_one_finish() -> None:
    core = EngineCore(fake_config(), FakeExecutor())
    requests = [fake_request(f"r{i}", *range(i, i + 1 + 9 * i), max_tokens=3) for i in range(9)]
    outputs = run(core, *requests)
    for i, request in enumerate(requests):
        last = request.prompt_token_ids[-1]
        assert tokens(outputs[f"r{i}"]) == [last + 1, last + 2, last + 3]
        assert finishes(outputs[f"r{i}"]) == [FinishReason.LENGTH]


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (fake_request("bad"), "at least 1 token"),
        (fake_request("bad", *range(100)), "max_model_len, 100 tokens"),
    ],
)
def test_a_request_that_can_never_run_is_refused_alone(
    request_: EngineRequest, reason: str
) -> None:
    core = EngineCore(fake_config(), FakeExecutor())
    outputs = run(core, fake_request("before", 1), request_, fake_request("after", 1))
    assert finishes(outputs["bad"]) == [FinishReason.ERROR]
    assert reason in (outputs["bad"][0].error or "")
    assert tokens(outputs["before"]) == tokens(outputs["after"]) == [2, 3, 4, 5]


def test_a_request_whose_computation_fails_ends_alone_with_the_reason() -> None:
    core = EngineCore(fake_config(), FakeExecutor())
    outputs = run(core, fake_request("good", 1), fake_request("bad", FAIL_TOKEN))
    assert [o.error for o in outputs["bad"]] == ["the fake logits are NaN"]
    assert tokens(outputs["good"]) == [2, 3, 4, 5]


def test_an_aborted_request_ends_once_whether_it_waits_or_runs() -> None:
    core = EngineCore(fake_config(), FakeExecutor())
    for i in range(6):  # four run, two wait
        core.add(fake_request(f"r{i}", 1, max_tokens=50))
    core.step()
    aborted = core.abort(["r0", "r5", "unknown", "r0"])
    assert [(o.request_id, o.finish_reason) for o in aborted] == [
        ("r0", FinishReason.ABORT),
        ("r5", FinishReason.ABORT),
    ]
    assert core.abort(["r0", "r5"]) == []
    while core.has_work:
        assert not {"r0", "r5"} & {output.request_id for output in core.step()}


def test_the_worker_hears_of_finished_requests() -> None:
    executor = FakeExecutor()
    core = EngineCore(fake_config(), executor)
    run(core, fake_request("a", 1, max_tokens=2), fake_request("b", 1, max_tokens=4))
    run(core, fake_request("c", 1))
    forgotten = [i for plan in executor.plans for i in plan.finished_request_ids]
    assert forgotten == ["a", "b"]


def test_a_failing_step_raises() -> None:
    core = EngineCore(fake_config(), FakeExecutor())
    core.add(fake_request("r", RAISE_TOKEN))
    with pytest.raises(RuntimeError, match="on fire"):
        core.step()


def test_a_step_without_work_computes_nothing() -> None:
    executor = FakeExecutor()
    core = EngineCore(fake_config(), executor)
    assert core.step() == []
    assert executor.plans == []


def test_stats_count_what_happened() -> None:
    core = EngineCore(fake_config(), FakeExecutor())
    for i in range(5):
        core.add(fake_request(f"r{i}", *range(8), max_tokens=3))
    core.step()
    stats = core.control("stats")
    assert (stats["num_running"], stats["num_waiting"], stats["num_steps"]) == (4, 1, 1)
    assert 0 < stats["kv_cache_usage"] <= 1
    while core.has_work:
        core.step()
    stats = core.control("stats")
    assert (stats["num_running"], stats["num_waiting"], stats["kv_cache_usage"]) == (0, 0, 0)
    assert stats["num_prefix_query_tokens"] == 5 * 8
    assert stats["num_prefix_hit_tokens"] > 0


def test_resetting_the_prefix_cache_forgets_prefixes_but_only_while_idle() -> None:
    core = EngineCore(fake_config(), FakeExecutor())
    prompt = tuple(range(20))
    core.add(fake_request("a", *prompt))
    core.step()
    assert core.control("reset_prefix_cache") == {"is_reset": 0.0}
    run(core)
    assert run(core, fake_request("b", *prompt))["b"][0].num_cached_tokens == 16
    assert core.control("reset_prefix_cache") == {"is_reset": 1.0}
    assert run(core, fake_request("c", *prompt))["c"][0].num_cached_tokens == 0


def test_a_full_kv_cache_preempts_and_changes_no_token() -> None:
    core = EngineCore(fake_config(), FakeExecutor(num_blocks=8))
    requests = [fake_request(f"r{i}", *range(10 * i, 10 * i + 6), max_tokens=9) for i in range(4)]
    outputs = run(core, *requests)
    assert core.control("stats")["num_preemptions"] > 0
    for i in range(4):
        assert tokens(outputs[f"r{i}"]) == list(range(10 * i + 6, 10 * i + 15))


def test_an_error_of_loading_is_passed_on() -> None:
    with pytest.raises(CheckpointError, match="it is damaged"):
        EngineCore(fake_config(), FakeExecutor(load_error="it is damaged"))


def test_closing_lets_go_of_the_worker() -> None:
    executor = FakeExecutor()
    EngineCore(fake_config(), executor).close()
    assert executor.is_closed
