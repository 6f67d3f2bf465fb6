"""What a supervisor and the processes that answer HTTP for it say to each other: lines of JSON."""

from typing import Any

import msgspec

from nano.serve.options import ServerOptions


class _Word(msgspec.Struct, tag=True, frozen=True):
    def line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


class Briefing(_Word, frozen=True):
    """The first line to a process: all that it has to know."""

    index: int  # among the processes of the server, from 1; for the log
    listener_fd: int  # the socket on which callers arrive, which the process has inherited
    options: ServerOptions
    config: dict[str, Any]  # resolved, as sections


class CoreReady(_Word, frozen=True):
    """A core has loaded; its sockets are in `folder`."""

    folder: str


class CoreDead(_Word, frozen=True):
    """The last core is dead."""

    reason: str


class Stop(_Word, frozen=True):
    """Drain; said a second time: do not wait."""


class Serving(_Word, frozen=True):
    """A process is about to answer callers."""


class CoreLost(_Word, frozen=True):
    """A process found the core of `folder` dead or stuck."""

    folder: str


FromSupervisor = Briefing | CoreReady | CoreDead | Stop
FromProcess = Serving | CoreLost

_FROM_SUPERVISOR = msgspec.json.Decoder(FromSupervisor)
_FROM_PROCESS = msgspec.json.Decoder(FromProcess)


def from_supervisor(line: bytes) -> FromSupervisor:
    return _FROM_SUPERVISOR.decode(line)


def from_process(line: bytes) -> FromProcess:
    return _FROM_PROCESS.decode(line)
