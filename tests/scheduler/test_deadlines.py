"""Deadlines of requests: the heap by itself, and a core that ends who is late."""

import time

import pytest

from nano.engine.core import EngineCore
from nano.engine.messages import EngineRequest
from nano.outputs import FinishReason, TokenOutput
from nano.sampling_params import SamplingParams
from nano.scheduler.deadlines import Deadlines
from nano.scheduler.request import Request, RequestStatus
from tests.engine.fake_core import FakeExecutor, fake_config, fake_request

LONG_AGO, FAR_AHEAD = 0.0, 1e12


def make_request(
    request_id: str, deadline: float | None = None, queue_deadline: float | None = None
) -> Request:
    params = SamplingParams(max_tokens=4)
    return Request(request_id, [1], params, deadline=deadline, queue_deadline=queue_deadline)


def late_request(request_id: str, *prompt: int, **deadlines: float) -> EngineRequest:
    request = fake_request(request_id, *prompt, max_tokens=30)
    for name, moment in deadlines.items():
        setattr(request, name, moment)
    return request


def finishes(outputs: list[TokenOutput]) -> list[tuple[str, FinishReason]]:
    return [(o.request_id, o.finish_reason) for o in outputs if o.finish_reason is not None]


def used_blocks(core: EngineCore) -> float:
    return core.control("stats")["kv_cache_usage"]


class TestDeadlines:
    def test_requests_are_due_at_their_deadline_in_its_order_and_once(self) -> None:
        deadlines = Deadlines()
        for request in (make_request("b", 2.0), make_request("never"), make_request("a", 1.0)):
            deadlines.watch(request)
        assert deadlines.due(0.999) == {}
        assert deadlines.due(2.0) == {FinishReason.TIMEOUT: ["a", "b"]}
        assert deadlines.due(FAR_AHEAD) == {}

    def test_the_earlier_of_two_deadlines_names_the_reason(self) -> None:
        deadlines = Deadlines()
        deadlines.watch(make_request("queue", deadline=2.0, queue_deadline=1.0))
        deadlines.watch(make_request("all", deadline=1.0, queue_deadline=2.0))
        assert deadlines.due(5.0) == {
            FinishReason.QUEUE_TIMEOUT: ["queue"],
            FinishReason.TIMEOUT: ["all"],
        }

    def test_a_queue_deadline_is_met_by_the_first_step(self) -> None:
        deadlines = Deadlines()
        request = make_request("a", deadline=3.0, queue_deadline=1.0)
        deadlines.watch(request)
        request.first_scheduled_time = 0.5
        assert deadlines.due(2.0) == {}
        assert deadlines.due(3.0) == {FinishReason.TIMEOUT: ["a"]}

    def test_requests_that_ended_are_not_due_and_not_kept(self) -> None:
        deadlines = Deadlines()
        for index in range(10_000):
            request = make_request(str(index), deadline=FAR_AHEAD)
            deadlines.watch(request)
            request.status = RequestStatus.FINISHED
        assert len(deadlines) < 100
        assert deadlines.due(2 * FAR_AHEAD) == {}


class TestCore:
    def test_a_request_that_waited_too_long_ends_without_anything_computed(self) -> None:
        executor = FakeExecutor()
        core = EngineCore(fake_config(), executor)
        core.add(late_request("late", 7, queue_deadline=LONG_AGO))
        assert finishes(core.step()) == [("late", FinishReason.QUEUE_TIMEOUT)]
        assert executor.plans == []
        assert not core.has_work

    def test_a_request_that_has_begun_in_time_is_not_held_to_its_queue_deadline(self) -> None:
        core = EngineCore(fake_config(), FakeExecutor())
        queue_deadline = time.monotonic() + 60
        core.add(late_request("a", 7, queue_deadline=queue_deadline))
        core.step()
        request = core._scheduler.requests["a"]
        assert request.first_scheduled_time is not None
        assert core._deadlines.due(queue_deadline + 1) == {}

    @pytest.mark.parametrize("num_steps", [0, 1, 3])
    def test_a_late_request_gives_its_blocks_back_before_the_next_step(
        self, num_steps: int
    ) -> None:
        core = EngineCore(fake_config(), FakeExecutor())
        core.add(late_request("late", *range(50), deadline=FAR_AHEAD))
        outputs = [output for _ in range(num_steps) for output in core.step()]
        assert (used_blocks(core) > 0) == (num_steps > 0)
        heap = core._deadlines._heap
        heap[0] = (LONG_AGO, *heap[0][1:])  # its time has come
        outputs += core.step()
        assert finishes(outputs) == [("late", FinishReason.TIMEOUT)]
        assert used_blocks(core) == 0
        assert not core.has_work

    def test_the_tokens_of_others_are_the_same_with_and_without_the_late(self) -> None:
        def run(with_late: bool) -> dict[str, list[int]]:
            core = EngineCore(fake_config(), FakeExecutor())
            for i in range(3):
                core.add(fake_request(f"r{i}", *range(10 * i, 10 * i + 9), max_tokens=8))
                if with_late:
                    core.add(late_request(f"q{i}", 1, 2, queue_deadline=LONG_AGO))
                    soon = time.monotonic() + 0.001
                    core.add(late_request(f"t{i}", 1, 2, deadline=soon))
            token_ids: dict[str, list[int]] = {}
            ended = []
            while core.has_work:
                outputs = core.step()
                ended += [request_id for request_id, _ in finishes(outputs)]
                for output in outputs:
                    token_ids.setdefault(output.request_id, []).extend(output.new_token_ids)
            assert len(ended) == len(set(ended)) == (9 if with_late else 3)
            return {name: tokens for name, tokens in token_ids.items() if name[0] == "r"}

        assert run(with_late=True) == run(with_late=False)

    def test_a_late_request_frees_its_place_for_who_waits_in_the_same_step(self) -> None:
        core = EngineCore(fake_config(), FakeExecutor())
        for i in range(5):  # four run, one waits
            core.add(late_request(f"r{i}", 1, deadline=FAR_AHEAD + i))
        core.step()
        heap = core._deadlines._heap
        heap[0] = (LONG_AGO, *heap[0][1:])
        outputs = core.step()
        assert finishes(outputs) == [("r0", FinishReason.TIMEOUT)]
        assert {o.request_id for o in outputs if o.new_token_ids} == {"r1", "r2", "r3", "r4"}
