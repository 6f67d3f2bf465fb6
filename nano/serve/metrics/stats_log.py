"""StatsLog: a line every ten seconds about what the engine does, for as long as it does anything.

The numbers are the core's, so they are of the whole engine, however many front ends it has.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from nano.log import get_logger
from nano.serve.metrics.core_stats import CoreStats

logger = get_logger(__name__)

INTERVAL_SECONDS = 10.0

Stats = Mapping[str, float]


class StatsLog:
    """Compares what the core says with what it said before."""

    def __init__(self, stats: CoreStats):
        self._stats = stats

    async def run(self) -> None:
        """Until cancelled."""
        before, then = await self._stats.latest(), time.monotonic()
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            stats, now = await self._stats.latest(), time.monotonic()
            line = describe(before, stats, now - then)
            if line is not None:
                logger.info("%s", line)
            before, then = stats, now


@contextmanager
def logging_stats(stats: CoreStats, is_disabled: bool) -> Iterator[None]:
    """Keep a log, unless it is disabled, within the running event loop."""
    log = None if is_disabled else asyncio.create_task(StatsLog(stats).run())
    try:
        yield
    finally:
        if log is not None:
            log.cancel()


def describe(before: Stats, after: Stats, seconds: float) -> str | None:
    """What was done in `seconds` between two answers of the core; None if nothing was."""

    def grown(key: str) -> float:
        grown_by = after.get(key, 0) - before.get(key, 0)
        return grown_by if grown_by >= 0 else after.get(key, 0)  # another core, from zero

    num_queried, num_hit = grown("num_prefix_query_tokens"), grown("num_prefix_hit_tokens")
    is_busy = after.get("num_running", 0) or after.get("num_waiting", 0)
    if not (grown("num_steps") or is_busy):
        return None
    parts = [
        f"prompt throughput: {(num_queried - num_hit) / seconds:.1f} tokens/s",
        f"generation throughput: {grown('num_generated_tokens') / seconds:.1f} tokens/s",
        f"running: {after['num_running']:.0f} reqs",
        f"waiting: {after['num_waiting']:.0f} reqs",
        f"KV cache usage: {after['kv_cache_usage']:.1%}",
        f"prefix cache hit rate: {num_hit / num_queried if num_queried else 0:.1%}",
    ]
    num_drafted = grown("spec_decode_num_draft_tokens")
    if num_drafted:
        num_accepted = grown("spec_decode_num_accepted_tokens")
        # Of the steps that had drafts: what they gave, with the target's own token.
        length = 1 + num_accepted / grown("spec_decode_num_drafts")
        parts.append(f"drafts accepted: {num_accepted / num_drafted:.1%}")
        parts.append(f"mean acceptance length: {length:.2f}")
    return ", ".join(parts)
