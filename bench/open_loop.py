"""Calls that come whether or not the earlier ones are answered, from a client that costs little.

One thread, raw sockets, one epoll, a new connection for each call: on a machine that client and
server share, what a call costs here is missing there.
"""

import selectors
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

READ_BYTES = 1 << 16


@dataclass(slots=True)
class Call:
    """One request. `status` is 0 if the connection broke before an answer came."""

    request: bytes
    due: float  # time.monotonic()
    size: int  # of the answer, as the caller counts; for its own use
    status: int = 0
    seconds: float = 0.0  # from when it was due to the last byte


class Caller:
    """Sends calls to one port; `wait` collects what is answered."""

    def __init__(self, port: int):
        self.num_open = 0
        self._address = ("127.0.0.1", port)
        self._selector = selectors.EpollSelector()

    def send(self, call: Call) -> None:
        line = socket.socket()
        line.setblocking(False)
        line.connect_ex(self._address)
        self._selector.register(line, selectors.EVENT_WRITE, call)  # once it is connected
        self.num_open += 1

    def wait(self, seconds: float) -> Iterator[Call]:
        """The calls that end within so many seconds, or at once if any has."""
        for key, _ in self._selector.select(max(0.0, seconds)):
            line, call = key.fileobj, key.data
            assert isinstance(line, socket.socket)
            try:
                if key.events & selectors.EVENT_WRITE:
                    line.send(call.request)
                    self._selector.modify(line, selectors.EVENT_READ, call)
                    continue
                data = line.recv(READ_BYTES)
            except OSError:
                data = b""
            if data and not call.status:
                call.status = int(data[9:12])
            if not data:
                call.seconds = time.monotonic() - call.due
                self._selector.unregister(line)
                line.close()
                self.num_open -= 1
                yield call


def offer(port: int, calls: Iterable[Call]) -> list[Call]:
    """Send each call when it is due, in that order; all of them, once all are answered."""
    caller, ended = Caller(port), list[Call]()
    for call in calls:
        while (left := call.due - time.monotonic()) > 0:
            ended += caller.wait(left)
        caller.send(call)
        ended += caller.wait(0.0)
    while caller.num_open:
        ended += caller.wait(1.0)
    return ended


def keep_open(port: int, num_open: int, seconds: float, calls: Iterator[Call]) -> list[Call]:
    """For so long, send another call as soon as fewer than `num_open` are open."""
    caller, ended = Caller(port), list[Call]()
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        while caller.num_open < num_open:
            call = next(calls)
            call.due = time.monotonic()
            caller.send(call)
        ended += caller.wait(0.1)
    while caller.num_open:
        ended += caller.wait(1.0)
    return ended
