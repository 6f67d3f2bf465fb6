"""Order of waiting requests, and removal from the middle of it."""

import random
from collections.abc import Iterable

import pytest

from nano.sampling_params import SamplingParams
from nano.scheduler.request import Request
from nano.scheduler.request_queue import FcfsQueue, PriorityQueue, RequestQueue, make_request_queue


def make_request(request_id: str, arrival_index: int = 0, priority: int = 0) -> Request:
    request = Request(request_id, [1], SamplingParams(), priority=priority)
    request.arrival_index = arrival_index
    return request


def fill(queue: RequestQueue, priorities: Iterable[int]) -> list[Request]:
    requests = [make_request(f"r{i}", i, p) for i, p in enumerate(priorities)]
    for request in requests:
        queue.add(request)
    return requests


def drain(queue: RequestQueue) -> list[str]:
    order = []
    while queue:
        request = queue.peek()
        assert queue.pop() is request
        order.append(request.request_id)
    return order


def test_fcfs_ignores_priorities() -> None:
    queue = make_request_queue("fcfs")
    fill(queue, [5, -1, 0])
    assert drain(queue) == ["r0", "r1", "r2"]


def test_fcfs_puts_preempted_requests_in_front_the_last_one_first() -> None:
    queue = FcfsQueue()
    fill(queue, [0])
    queue.put_back(make_request("late victim"))
    queue.put_back(make_request("early victim"))
    assert drain(queue) == ["early victim", "late victim", "r0"]


# B048: a lower number is more urgent, and equals keep their order of arrival.
def test_priority_serves_lower_numbers_first_and_equals_by_arrival() -> None:
    queue = make_request_queue("priority")
    fill(queue, [1, 0, 1, -3, 0])
    assert drain(queue) == ["r3", "r1", "r4", "r0", "r2"]


def test_priority_puts_a_preempted_request_back_in_its_old_place() -> None:
    queue = PriorityQueue()
    fill(queue, [0, 0, 0])
    victim = queue.pop()
    queue.add(make_request("r3", 3))
    queue.put_back(victim)
    assert drain(queue) == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_removed_requests_do_not_come_up(policy: str) -> None:
    queue = make_request_queue(policy)  # type: ignore[arg-type]
    fill(queue, [0] * 5)
    for request_id in ("r0", "r3"):
        queue.remove(request_id)
    assert len(queue) == 3
    assert drain(queue) == ["r1", "r2", "r4"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_an_id_can_be_used_again_after_its_removal(policy: str) -> None:
    queue = make_request_queue(policy)  # type: ignore[arg-type]
    fill(queue, [0, 0])
    queue.remove("r0")
    again = make_request("r0", 2)
    queue.add(again)
    assert queue.pop().request_id == "r1"
    assert queue.pop() is again
    assert not queue


def test_the_heap_does_not_grow_with_removed_requests() -> None:
    queue = PriorityQueue()
    for index in range(1000):
        queue.add(make_request(f"r{index}", index))
        queue.remove(f"r{index}")
    assert len(queue._heap) <= 20


def test_priority_agrees_with_sorting_under_random_adds_and_removals() -> None:
    rng = random.Random(0)
    queue, live = PriorityQueue(), {}
    for index in range(2000):
        if live and rng.random() < 0.4:
            request_id = rng.choice(list(live))
            queue.remove(request_id)
            del live[request_id]
        elif live and rng.random() < 0.3:
            del live[queue.pop().request_id]
        else:
            request = make_request(f"r{index}", index, rng.randrange(4))
            queue.add(request)
            live[request.request_id] = request
        assert len(queue) == len(live)
        if live:
            assert queue.peek() is min(live.values(), key=lambda r: r.urgency)
