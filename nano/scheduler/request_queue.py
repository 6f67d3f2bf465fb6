"""Waiting requests in the order they will be admitted: FCFS or by priority."""

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Literal

from nano.scheduler.request import Request

Policy = Literal["fcfs", "priority"]


class RequestQueue(ABC):
    """An ordered set of waiting requests. Every operation is O(log n) or better."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def add(self, request: Request) -> None:
        """Queue a new request."""

    @abstractmethod
    def put_back(self, request: Request) -> None:
        """Queue a preempted request, which has waited for its turn before."""

    @abstractmethod
    def peek(self) -> Request:
        """The next to be admitted. The queue must not be empty."""

    @abstractmethod
    def pop(self) -> Request:
        """Remove and return the next to be admitted. The queue must not be empty."""

    @abstractmethod
    def remove(self, request_id: str) -> None:
        """Take a queued request out, wherever it stands."""


class FcfsQueue(RequestQueue):
    """First come, first served; a preempted request returns to the front.

    An OrderedDict is a deque whose middle can be reached by id.
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def put_back(self, request: Request) -> None:
        self.add(request)
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        return self._requests.popitem(last=False)[1]

    def remove(self, request_id: str) -> None:
        del self._requests[request_id]


class PriorityQueue(RequestQueue):
    """Most urgent first: `Request.urgency`, the same before and after a preemption.

    A removed request leaves its entry in the heap, to be skipped when it surfaces; the heap is
    rebuilt once such entries are the majority.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []  # urgencies differ: never compares
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        heapq.heappush(self._heap, (request.urgency, request))

    def put_back(self, request: Request) -> None:
        self.add(request)

    def peek(self) -> Request:
        while not self._is_queued(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        del self._requests[request.request_id]
        return request

    def remove(self, request_id: str) -> None:
        del self._requests[request_id]
        if len(self._heap) > 2 * len(self._requests) + 16:
            self._heap = [entry for entry in self._heap if self._is_queued(entry[1])]
            heapq.heapify(self._heap)

    def _is_queued(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request


def make_request_queue(policy: Policy) -> RequestQueue:
    return PriorityQueue() if policy == "priority" else FcfsQueue()
