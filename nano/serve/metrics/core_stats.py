"""CoreStats: the core's own numbers, as lately as it gave them."""

import asyncio

from nano.errors import EngineDead
from nano.serve.async_engine import AsyncEngine

PATIENCE_SECONDS = 1.0
GAUGES = ("num_running", "num_waiting", "kv_cache_usage")


class CoreStats:
    """Asks between two steps, which costs the core microseconds, and never twice at once."""

    def __init__(self, engine: AsyncEngine):
        self._engine = engine
        self._latest: dict[str, float] = {}
        self._asking: asyncio.Task[None] | None = None

    async def latest(self) -> dict[str, float]:
        """`EngineCore.control("stats")`; what it said before, if it is dead or does not answer
        within `PATIENCE_SECONDS`, and {} if it never did. A dead core runs nothing.
        """
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await asyncio.wait((self._asking,), timeout=PATIENCE_SECONDS)
        return self._latest

    async def _ask(self) -> None:
        try:
            self._latest = await asyncio.to_thread(self._engine.client.control, "stats")
        except EngineDead:
            self._latest = {
                key: 0.0 if key in GAUGES else value for key, value in self._latest.items()
            }
