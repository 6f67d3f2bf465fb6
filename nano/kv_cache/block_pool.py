"""BlockPool: every block of the KV cache, who can be evicted next, and what is cached where.

in use      ref_count > 0, held by one or more requests
free        ref_count = 0, in the free list; may still be published: cached, but evictable

free list   head -> [no content] ... [least recently used] ... [most recently used] -> tail
                     next to be handed out                      last to be evicted
"""

from collections.abc import Iterator, Sequence

from nano.kv_cache.block_hash import BlockHash


class Block:
    """One block. `block_hash` is set while the pool finds it by that hash, and only then."""

    __slots__ = ("block_hash", "block_id", "next_free", "prev_free", "ref_count")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: BlockHash | None = None
        self.prev_free: Block | None = None  # both None while in use
        self.next_free: Block | None = None

    def __repr__(self) -> str:
        name = self.block_hash.hex()[:8] if self.block_hash else None
        return f"Block({self.block_id}, ref_count={self.ref_count}, hash={name})"


class FreeList:
    """Free blocks in eviction order. Every operation is O(1), removal from the middle included.

    The links are in the blocks; a sentinel closes the ring, so no operation has an end case.
    """

    def __init__(self, blocks: Sequence[Block]):
        self._ring = Block(-1)
        self._ring.prev_free = self._ring.next_free = self._ring
        self._length = 0
        for block in blocks:
            self.push_back(block)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        block = self._ring.next_free
        while block is not None and block is not self._ring:
            yield block
            block = block.next_free

    def push_back(self, block: Block) -> None:
        """Last to be handed out."""
        self._insert_before(self._ring, block)

    def push_front(self, block: Block) -> None:
        """Next to be handed out."""
        assert self._ring.next_free is not None
        self._insert_before(self._ring.next_free, block)

    def pop_front(self) -> Block:
        block = self._ring.next_free
        assert block is not None
        assert block is not self._ring, "the free list is empty"
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        before, after = block.prev_free, block.next_free
        assert before is not None, f"{block} is not in the free list"
        assert after is not None
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self._length -= 1

    def _insert_before(self, after: Block, block: Block) -> None:
        assert block.next_free is None, f"{block} is in the free list already"
        before = after.prev_free
        assert before is not None
        before.next_free = after.prev_free = block
        block.prev_free, block.next_free = before, after
        self._length += 1


class BlockPool:
    """Owns `num_blocks` blocks, their reference counts, the free list and the hash index.

    At most one block is published per hash: a second block of equal content stays anonymous, so
    evicting or freeing either can never break the other's entry. Blocks are passed in chain
    order (a request's first block first); a chain loses its tail before its head, since a tail
    without its head cannot be found. Called by `KVCacheManager` alone.
    """

    def __init__(self, num_blocks: int):
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = FreeList(self.blocks)
        self._published: dict[BlockHash, Block] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no request holds, cached ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks that requests hold, 0 to 1. Cached but free blocks do not count."""
        return 1.0 - len(self._free) / len(self.blocks)

    @property
    def num_published(self) -> int:
        return len(self._published)

    def find(self, block_hash: BlockHash) -> Block | None:
        return self._published.get(block_hash)

    def allocate(self, num_blocks: int) -> list[Block]:
        """Hand out blocks with one reference each, evicting what they cached."""
        assert num_blocks <= len(self._free), f"{num_blocks} of {len(self._free)} free blocks"
        blocks = []
        for _ in range(num_blocks):
            block = self._free.pop_front()
            self.unpublish(block)
            block.ref_count = 1
            blocks.append(block)
        return blocks

    def touch(self, blocks: Sequence[Block]) -> None:
        """Add a reference to cached blocks, so that they cannot be evicted."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

    def free(self, blocks: Sequence[Block]) -> None:
        """Drop one reference to each block of a chain."""
        for block in reversed(blocks):  # the tail becomes the older one
            assert block.ref_count > 0, f"{block} is freed twice"
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.block_hash is None:
                    self._free.push_front(block)  # nobody can find it: evicting it costs nothing
                else:
                    self._free.push_back(block)

    def publish(self, block: Block, block_hash: BlockHash) -> None:
        """Let `find` return `block`, unless another block of this content is published."""
        assert block.ref_count > 0, f"{block} is published but not held"
        if self._published.setdefault(block_hash, block) is block:
            assert block.block_hash in (None, block_hash), f"{block} changes its content"
            block.block_hash = block_hash

    def unpublish(self, block: Block) -> None:
        """Evict what `block` caches, if anything. Its holders keep it."""
        if block.block_hash is not None:
            del self._published[block.block_hash]
            block.block_hash = None

    def reset(self) -> bool:
        """Evict everything; False, and nothing done, while any block is held."""
        if len(self._free) != len(self.blocks):
            return False
        for block in list(self._published.values()):
            self.unpublish(block)
        return True

    def check_invariants(self) -> None:
        """Raise AssertionError unless list, counts and index agree. O(num_blocks)."""
        free_ids = set()
        previous = self._free._ring
        for block in self._free:
            assert block.prev_free is previous, f"{block} has a broken back link"
            assert block.ref_count == 0, f"{block} is free but held"
            free_ids.add(block.block_id)
            previous = block
        assert self._free._ring.prev_free is previous, "the ring is broken"
        assert len(free_ids) == len(self._free), "a block is in the free list twice"
        for block_id, block in enumerate(self.blocks):
            assert block.block_id == block_id, f"{block} is at index {block_id}"
            assert (block.ref_count == 0) == (block_id in free_ids), f"{block} leaked"
            if block.block_hash is not None:
                assert self._published.get(block.block_hash) is block, f"{block} is not indexed"
        num_named = sum(block.block_hash is not None for block in self.blocks)
        assert num_named == len(self._published), "the index holds an evicted block"
