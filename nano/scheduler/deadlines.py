"""Deadlines: which requests have run out of time. Torch-free; reads no clock."""

import heapq

from nano.outputs import FinishReason
from nano.scheduler.request import Request, RequestStatus

_MIN_SWEEP = 64  # entries that are not worth a look


class Deadlines:
    """The deadlines of requests, the next one first. O(log n) per deadline, O(1) while none is due.

    An entry that no longer matters (its request has ended, or has begun and had a deadline for that
    only) stays until it surfaces or until such entries may be the majority.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request, FinishReason]] = []
        self._num_entries = 0  # ever made: breaks ties, in order of arrival
        self._sweep_at = _MIN_SWEEP

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, request: Request) -> None:
        """Take in a new request; one without deadlines is none of ours."""
        if request.queue_deadline is not None:
            self._push(request.queue_deadline, request, FinishReason.QUEUE_TIMEOUT)
        if request.deadline is not None:
            self._push(request.deadline, request, FinishReason.TIMEOUT)

    def due(self, now: float) -> dict[FinishReason, list[str]]:
        """Ids of the requests to end at `now`, each once, by the reason. They are forgotten."""
        reasons: dict[str, FinishReason] = {}
        while self._heap and self._heap[0][0] <= now:
            _, _, request, reason = heapq.heappop(self._heap)
            if _matters(request, reason):
                reasons.setdefault(request.request_id, reason)
        late: dict[FinishReason, list[str]] = {}
        for request_id, reason in reasons.items():
            late.setdefault(reason, []).append(request_id)
        return late

    def _push(self, deadline: float, request: Request, reason: FinishReason) -> None:
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if _matters(entry[2], entry[3])]
            heapq.heapify(self._heap)
            self._sweep_at = max(_MIN_SWEEP, 2 * len(self._heap))
        heapq.heappush(self._heap, (deadline, self._num_entries, request, reason))
        self._num_entries += 1


def _matters(request: Request, reason: FinishReason) -> bool:
    if request.status is RequestStatus.FINISHED:
        return False
    return reason is FinishReason.TIMEOUT or request.first_scheduled_time is None
