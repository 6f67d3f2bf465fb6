"""KVCacheManager: which blocks each request holds, and which prefixes can be read from the cache.

Torch-free: it deals in block ids and token ids, never in tensors. Owns the block tables; only the
scheduler calls it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from nano.kv_cache.block_hash import BlockHash, chain_root, hash_blocks
from nano.kv_cache.block_pool import Block, BlockPool


class CachedRequest(Protocol):
    """What the manager reads of a request. It writes `block_hashes` and nothing else."""

    request_id: str
    token_ids: list[int]  # known tokens, append-only
    max_num_tokens: int  # `token_ids` never grows past this
    block_hashes: list[BlockHash]  # of the first full blocks of token_ids; extended when needed
    cache_salt: str | None

    @property
    def num_planned_computed_tokens(self) -> int: ...  # those of a step in flight included
    @property
    def reads_prefix_cache(self) -> bool: ...


@dataclass(slots=True)
class PrefixHit:
    """The longest cached prefix of a request, as whole blocks. Valid until blocks are handed out.

    `num_tokens` is at most the request's num_tokens - 1: one token must be computed to have
    logits to sample from.
    """

    block_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0


@dataclass(slots=True)
class _BlockTable:
    blocks: list[Block]
    num_published: int  # leading blocks that were offered to the prefix cache


class KVCacheManager:
    """Gives requests blocks, shares blocks of equal prefixes, takes them back.

    A request holds blocks from `allocate` to `free`. Blocks grow lazily, with the tokens that a
    step computes plus `num_lookahead_tokens` slots that a proposer may write past them, and never
    past the request's `max_num_tokens`. Full blocks of known tokens are published by
    `cache_blocks` and then found by `match_prefix`, also by other requests of the same step: an
    attention backend writes a step's KV before it reads any. `root` names how KV is computed (the
    engine's numerics_id); prefixes are shared only under equal roots and equal cache salts.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        num_lookahead_tokens: int = 0,
        root: str = "",
    ):
        assert num_blocks >= 1, f"num_blocks must be at least 1, got {num_blocks}"
        assert block_size >= 1, f"block_size must be at least 1, got {block_size}"
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_lookahead_tokens = num_lookahead_tokens
        self.root = root
        self._pool = BlockPool(num_blocks)
        self._tables: dict[str, _BlockTable] = {}

    @property
    def num_slots(self) -> int:
        """Tokens that the whole cache can hold."""
        return len(self._pool.blocks) * self.block_size

    @property
    def usage(self) -> float:
        """Share of blocks that requests hold, 0 to 1. Cached but free blocks do not count."""
        return self._pool.usage

    def block_ids(self, request: CachedRequest) -> list[int]:
        """The request's block table; empty if it holds nothing."""
        table = self._tables.get(request.request_id)
        return [block.block_id for block in table.blocks] if table else []

    def match_prefix(self, request: CachedRequest) -> PrefixHit:
        """The cached prefix that `allocate` may start `request` from. Changes no block."""
        if not self.enable_prefix_caching or not request.reads_prefix_cache:
            return PrefixHit()
        num_blocks = (len(request.token_ids) - 1) // self.block_size
        self._hash(request, num_blocks)
        block_ids = [block.block_id for block in self._find(request.block_hashes[:num_blocks])]
        return PrefixHit(block_ids, len(block_ids) * self.block_size)

    def extend_prefix(self, request: CachedRequest) -> list[int]:
        """Cached blocks that continue what a running request has computed; it holds them now.

        Another request may have computed them since this one was admitted: with equal prompts in
        chunks, each chunk is then computed by one of them. The ids are to be appended to the block
        table, and count as computed. [] unless the request stands at the end of its last block.
        """
        table = self._tables[request.request_id]
        num_held = len(table.blocks)
        if (
            not self.enable_prefix_caching
            or not request.reads_prefix_cache
            or num_held * self.block_size != request.num_planned_computed_tokens
        ):
            return []
        num_blocks = (len(request.token_ids) - 1) // self.block_size
        self._hash(request, num_blocks)
        found = self._find(request.block_hashes[num_held:num_blocks])
        self._pool.touch(found)
        table.blocks += found
        table.num_published = len(table.blocks) if found else table.num_published
        return [block.block_id for block in found]

    def allocate(
        self, request: CachedRequest, num_new_tokens: int, hit: PrefixHit | None = None
    ) -> list[int] | None:
        """Blocks for the next `num_new_tokens` tokens; None if there is no room, nothing changed.

        A request that holds blocks computes on from what is planned; the result is the new ids, to
        be appended to its block table, and often empty. A request that holds none is
        admitted: it computes from the end of `hit` on, and the result is its whole table, the
        hit's ids first. Admission takes blocks for `num_new_tokens` only, but is refused unless
        all known tokens would fit now: half a prompt in a full cache helps nobody.
        """
        table = self._tables.get(request.request_id)
        if table is None:
            return self._admit(request, num_new_tokens, hit or PrefixHit())
        assert hit is None, f"{request.request_id} is admitted twice"
        num_tokens = request.num_planned_computed_tokens + num_new_tokens
        num_missing = self._num_blocks(request, num_tokens) - len(table.blocks)
        if num_missing <= 0:
            return []
        if num_missing > self._pool.num_free:
            return None
        blocks = self._pool.allocate(num_missing)
        table.blocks += blocks
        return [block.block_id for block in blocks]

    def cache_blocks(self, request: CachedRequest, num_tokens: int) -> None:
        """Publish the full blocks among the first `num_tokens` known tokens.

        Their KV must be valid, or be written by the step that is being scheduled; then `forget`
        takes it back if that write does not happen. Drafts are not known tokens.
        """
        if not self.enable_prefix_caching:
            return
        table = self._tables[request.request_id]
        num_blocks = num_tokens // self.block_size
        if num_blocks <= table.num_published:
            return
        assert num_tokens <= len(request.token_ids), f"{request.request_id}: a draft is published"
        self._hash(request, num_blocks)
        for index in range(table.num_published, num_blocks):
            self._pool.publish(table.blocks[index], request.block_hashes[index])
        table.num_published = num_blocks

    def forget(self, request: CachedRequest, num_valid_tokens: int = 0) -> None:
        """Un-publish the request's blocks past the first `num_valid_tokens` tokens, for good.

        For KV that is not what its hash says: a write that failed or did not happen, NaN. Other
        holders keep the blocks, but nobody finds them any more.
        """
        table = self._tables.get(request.request_id)
        if table is not None:
            for block in table.blocks[num_valid_tokens // self.block_size : table.num_published]:
                self._pool.unpublish(block)

    def free(self, request: CachedRequest) -> None:
        """Give back all blocks. What is published stays cached until its block is reused."""
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            self._pool.free(table.blocks)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False, and nothing done, while any request holds blocks."""
        return self._pool.reset()

    def check_invariants(self) -> None:
        """Raise AssertionError unless tables, reference counts and pool agree."""
        self._pool.check_invariants()
        holders: Counter[int] = Counter()
        for request_id, table in self._tables.items():
            ids = [block.block_id for block in table.blocks]
            assert len(set(ids)) == len(ids), f"{request_id} holds a block twice: {ids}"
            assert table.num_published <= len(ids), f"{request_id} published more than it holds"
            for block in table.blocks[table.num_published :]:
                assert block.block_hash is None, f"{request_id}: {block} is published unasked"
            holders.update(ids)
        for block in self._pool.blocks:
            assert block.ref_count == holders[block.block_id], (
                f"{block} is held by {holders[block.block_id]} requests"
            )

    def _admit(
        self, request: CachedRequest, num_new_tokens: int, hit: PrefixHit
    ) -> list[int] | None:
        cached = [self._pool.blocks[block_id] for block_id in hit.block_ids]
        # A cached block that nobody holds is in the free list: using it uses up a free one.
        num_free = self._pool.num_free - sum(block.ref_count == 0 for block in cached)
        if self._num_blocks(request, len(request.token_ids)) - len(cached) > num_free:
            return None
        num_missing = self._num_blocks(request, hit.num_tokens + num_new_tokens) - len(cached)
        self._pool.touch(cached)  # before handing out blocks, which could evict them
        blocks = cached + self._pool.allocate(num_missing)
        self._tables[request.request_id] = _BlockTable(blocks, num_published=len(cached))
        return [block.block_id for block in blocks]

    def _find(self, block_hashes: Sequence[BlockHash]) -> list[Block]:
        """The cached blocks of a chain, up to the first that is missing."""
        found = []
        for block_hash in block_hashes:
            block = self._pool.find(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def _num_blocks(self, request: CachedRequest, num_tokens: int) -> int:
        """Blocks a request needs once `num_tokens` of its tokens are computed.

        Nobody guesses ahead in the middle of a prompt, whose next blocks may still be found.
        """
        reaches_end = num_tokens >= len(request.token_ids)
        num_slots = num_tokens + (self.num_lookahead_tokens if reaches_end else 0)
        num_slots = min(num_slots, request.max_num_tokens)
        return -(-num_slots // self.block_size)

    def _hash(self, request: CachedRequest, num_blocks: int) -> None:
        """Extend `request.block_hashes` to `num_blocks`; known tokens never change."""
        hashes = request.block_hashes
        if len(hashes) < num_blocks:
            salt = () if request.cache_salt is None else (request.cache_salt,)
            parent = hashes[-1] if hashes else chain_root(self.root, salt)
            start, stop = len(hashes) * self.block_size, num_blocks * self.block_size
            hashes += hash_blocks(parent, request.token_ids, self.block_size, start, stop)
