"""check_invariants: whether a scheduler's requests, queues and KV blocks agree. For tests."""

from nano.scheduler.request import RequestStatus
from nano.scheduler.scheduler import Scheduler, by_urgency


def check_invariants(scheduler: Scheduler) -> None:
    """Raise AssertionError unless they do."""
    kv_cache, requests = scheduler.kv_cache, scheduler.requests
    kv_cache.check_invariants()
    assert len(scheduler.running) <= scheduler.max_num_requests
    assert len(scheduler.running) + len(scheduler.waiting) == len(requests)
    if scheduler.policy == "priority":
        assert scheduler.running == sorted(scheduler.running, key=by_urgency)
    for request in requests.values():
        name, num_tokens = request.request_id, request.num_tokens
        num_computed = request.num_computed_tokens
        num_slots = len(kv_cache.block_ids(request)) * kv_cache.block_size
        assert request.finish_reason is None, f"{name} has ended"
        assert num_tokens < request.max_num_tokens, f"{name} should have ended"
        assert 0 <= num_computed < num_tokens, f"{name}: {num_computed} of {num_tokens}"
        num_planned = request.num_planned_computed_tokens
        assert num_planned <= num_slots, f"{name}: {num_planned} tokens in {num_slots} slots"
        if request.num_planned_drafts:
            is_known = num_planned == request.num_planned_tokens - 1
            assert is_known, f"{name} has drafts too early"
        is_running = request in scheduler.running
        assert is_running == (request.status is RequestStatus.RUNNING), f"{name} is misplaced"
        assert is_running or (num_computed, num_slots) == (0, 0), f"{name} waits with blocks"
        assert is_running or not request.in_flight, f"{name} waits in flight"
