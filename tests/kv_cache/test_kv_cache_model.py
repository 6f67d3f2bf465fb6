"""The KV manager against a model so naive that it must be right: a dict of what each block holds.

The model knows contents as plain token tuples, and learns which blocks were reused only from the
ids that `allocate` returns. It has no free list and no hashes.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from nano.kv_cache.kv_cache_manager import KVCacheManager
from nano.sampling_params import SamplingParams
from nano.scheduler.request import Request

Content = tuple[str | None, tuple[int, ...]]  # salt, all tokens up to the end of the block


class KVCacheModel(RuleBasedStateMachine):
    """Requests come, compute, grow, publish, fail and go, over few tokens so that they collide."""

    live = Bundle("live")

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.integers(1, 3),
        num_lookahead_tokens=st.sampled_from([0, 0, 2]),
    )
    def start(self, num_blocks: int, block_size: int, num_lookahead_tokens: int) -> None:
        self.kv_cache = KVCacheManager(
            num_blocks, block_size, num_lookahead_tokens=num_lookahead_tokens
        )
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tables: dict[str, list[int]] = {}
        self.published: dict[Content, int] = {}
        self.valid: dict[int, Content] = {}  # what was written to each full block
        self.num_requests = 0

    def content(self, request: Request, index: int) -> Content:
        return request.cache_salt, tuple(request.token_ids[: (index + 1) * self.block_size])

    def num_needed(self, request: Request, num_tokens: int) -> int:
        if num_tokens >= len(request.token_ids):
            num_tokens += self.kv_cache.num_lookahead_tokens
        num_tokens = min(num_tokens, request.max_num_tokens)
        return (num_tokens + self.block_size - 1) // self.block_size

    def num_free(self) -> int:
        held = {block_id for table in self.tables.values() for block_id in table}
        return self.num_blocks - len(held)

    def write(self, request: Request, num_tokens: int) -> None:
        """The step computed: it writes its own blocks and offers them to the cache."""
        request.num_computed_tokens += num_tokens
        self.kv_cache.cache_blocks(request, request.num_computed_tokens)
        for index in range(request.num_computed_tokens // self.block_size):
            block_id, content = self.tables[request.request_id][index], self.content(request, index)
            if block_id in self.valid:
                assert self.valid[block_id] == content, "a block was overwritten while held"
                continue
            self.valid[block_id] = content
            self.published.setdefault(content, block_id)

    def hand_out(self, block_ids: list[int]) -> None:
        held = {block_id for table in self.tables.values() for block_id in table}
        assert held.isdisjoint(block_ids), "a held block was handed out"
        for block_id in block_ids:
            content = self.valid.pop(block_id, None)
            if content is not None and self.published.get(content) == block_id:
                del self.published[content]

    @rule(
        target=live,
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        salt=st.sampled_from([None, None, "x"]),
        data=st.data(),
    )
    def admit(self, token_ids: list[int], salt: str | None, data: st.DataObject):
        request = Request(f"r{self.num_requests}", token_ids, SamplingParams(), cache_salt=salt)
        request.max_num_tokens = max(len(token_ids) + 1, 16)
        self.num_requests += 1

        expected: list[int] = []
        while (len(expected) + 1) * self.block_size < len(token_ids):
            block_id = self.published.get(self.content(request, len(expected)))
            if block_id is None:
                break
            expected.append(block_id)
        hit = self.kv_cache.match_prefix(request)
        assert hit.block_ids == expected
        assert hit.num_tokens == len(expected) * self.block_size

        num_new = data.draw(st.integers(1, len(token_ids) - hit.num_tokens))
        held = {block_id for table in self.tables.values() for block_id in table}
        num_free = self.num_free() - len(set(expected) - held)
        num_whole = self.num_needed(request, len(token_ids)) - len(expected)
        block_ids = self.kv_cache.allocate(request, num_new, hit)
        assert (block_ids is None) == (num_whole > num_free)
        if block_ids is None:
            return multiple()
        assert block_ids[: len(expected)] == expected
        assert len(block_ids) == self.num_needed(request, hit.num_tokens + num_new)
        self.hand_out(block_ids[len(expected) :])
        self.tables[request.request_id] = block_ids
        request.num_computed_tokens = hit.num_tokens
        self.write(request, num_new)
        return request

    @rule(request=live, token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def grow(self, request: Request, token_ids: list[int]) -> None:
        if request.num_tokens + len(token_ids) <= request.max_num_tokens:
            request.token_ids += token_ids
        num_new = request.num_tokens - request.num_computed_tokens
        table = self.tables[request.request_id]
        num_missing = max(0, self.num_needed(request, request.num_tokens) - len(table))
        num_free = self.num_free()
        block_ids = self.kv_cache.allocate(request, num_new)
        assert (block_ids is None) == (num_missing > num_free)
        if block_ids is not None:
            assert len(block_ids) == num_missing
            self.hand_out(block_ids)
            table += block_ids
            self.write(request, num_new)

    @rule(request=live)
    def extend(self, request: Request) -> None:
        table = self.tables[request.request_id]
        expected: list[int] = []
        if len(table) * self.block_size == request.num_computed_tokens:
            while (len(table) + len(expected) + 1) * self.block_size < request.num_tokens:
                content = self.content(request, len(table) + len(expected))
                if content not in self.published:
                    break
                expected.append(self.published[content])
        assert self.kv_cache.extend_prefix(request) == expected
        table += expected
        request.num_computed_tokens += len(expected) * self.block_size
        self.write(request, 0)

    @rule(request=consumes(live))
    def free(self, request: Request) -> None:
        self.kv_cache.free(request)
        del self.tables[request.request_id]

    @rule(request=consumes(live), data=st.data())
    def fail(self, request: Request, data: st.DataObject) -> None:
        num_valid = data.draw(st.integers(0, request.num_computed_tokens))
        self.kv_cache.forget(request, num_valid)
        table = self.tables.pop(request.request_id)
        for index in range(num_valid // self.block_size, len(table)):
            content = self.valid.get(table[index])
            if content is not None and self.published.get(content) == table[index]:
                del self.published[content]
        self.kv_cache.free(request)

    @rule()
    def reset(self) -> None:
        done = self.kv_cache.reset_prefix_cache()
        assert done == (not self.tables)
        if done:
            self.published.clear()

    @precondition(lambda self: self.tables)
    @invariant()
    def tables_agree(self) -> None:
        held = {block_id for table in self.tables.values() for block_id in table}
        assert abs(self.kv_cache.usage - len(held) / self.num_blocks) < 1e-9

    @invariant()
    def the_manager_is_consistent(self) -> None:
        if hasattr(self, "kv_cache"):
            self.kv_cache.check_invariants()


KVCacheModel.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
TestKVCacheAgainstAModel = KVCacheModel.TestCase
