"""FrontEndProcess: a process that answers HTTP, as the supervisor that started it sees it."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator

from nano.serve.processes.orders import Briefing, FromProcess, FromSupervisor, Serving, from_process

COMMAND = (sys.executable, "-m", "nano.serve.processes.program")


class FrontEndProcess:
    """Made by `start`. The line to the process breaks when either end of it dies."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ):
        self.has_served = False
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, briefing: Briefing) -> "FrontEndProcess":
        ours, theirs = socket.socketpair()
        with theirs:
            # Not in our process group: Ctrl-C goes to the supervisor alone.
            process = await asyncio.create_subprocess_exec(
                *COMMAND,
                stdin=theirs.fileno(),
                pass_fds=(briefing.listener_fd,),
                process_group=0,
            )
        started = cls(process, *await asyncio.open_connection(sock=ours))
        started.tell(briefing)
        return started

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, word: FromSupervisor) -> None:
        """To one that is gone already, nothing happens."""
        self._writer.write(word.line())

    async def words(self) -> AsyncIterator[FromProcess]:
        """What it says, until it ends."""
        try:
            async for line in self._reader:
                word = from_process(line)
                self.has_served |= isinstance(word, Serving)
                yield word
        except ConnectionError:
            pass  # it was killed with words of ours unread
        self._writer.close()

    async def end(self) -> str:
        """Wait for it; how it ended, in words."""
        status = await self._process.wait()
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
