"""Eviction order, reference counts, and one published block per content."""

import pytest

from nano.kv_cache.block_pool import Block, BlockPool


def names(num: int) -> list[bytes]:
    return [f"hash-{index}".encode() for index in range(num)]


def publish_chain(pool: BlockPool, hashes: list[bytes]) -> list[Block]:
    blocks = pool.allocate(len(hashes))
    for block, block_hash in zip(blocks, hashes):
        pool.publish(block, block_hash)
    return blocks


def test_a_freed_block_stays_cached_until_it_is_handed_out_again() -> None:
    pool = BlockPool(2)
    [block] = publish_chain(pool, [b"a"])
    pool.free([block])
    assert pool.find(b"a") is block
    pool.allocate(2)
    assert pool.find(b"a") is None
    pool.check_invariants()


def test_the_tail_of_a_chain_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    hashes = names(3)
    pool.free(publish_chain(pool, hashes))
    pool.allocate(1)
    assert [pool.find(h) is not None for h in hashes] == [True, True, False]
    pool.allocate(1)
    assert [pool.find(h) is not None for h in hashes] == [True, False, False]


def test_the_least_recently_used_chain_is_evicted_first() -> None:
    pool = BlockPool(3)
    a, b, c = (publish_chain(pool, [name])[0] for name in (b"a", b"b", b"c"))
    for block in (a, b, c):
        pool.free([block])
    pool.touch([a])  # used again: now the youngest
    pool.free([a])
    evicted = [pool.allocate(1)[0] for _ in range(3)]
    assert evicted == [b, c, a]


def test_blocks_that_cache_nothing_are_handed_out_before_cached_ones() -> None:
    pool = BlockPool(2)
    cached, blank = pool.allocate(2)
    pool.publish(cached, b"a")
    pool.free([cached])
    pool.free([blank])
    assert pool.allocate(1) == [blank]
    assert pool.find(b"a") is cached


def test_a_block_with_two_holders_is_freed_by_the_second() -> None:
    pool = BlockPool(2)
    blocks = publish_chain(pool, [b"a"])
    pool.touch(blocks)
    pool.free(blocks)
    assert (pool.num_free, pool.usage) == (1, 0.5)
    pool.free(blocks)
    assert (pool.num_free, pool.usage) == (2, 0.0)
    pool.check_invariants()


@pytest.mark.parametrize("first_freed", [0, 1])
def test_of_two_blocks_with_equal_content_one_is_published_and_neither_breaks_it(
    first_freed: int,
) -> None:
    pool = BlockPool(2)
    published, twin = pool.allocate(2)
    pool.publish(published, b"a")
    pool.publish(twin, b"a")
    assert pool.find(b"a") is published
    assert twin.block_hash is None
    blocks = [published, twin]
    pool.free([blocks.pop(first_freed)])
    pool.check_invariants()
    assert pool.find(b"a") is published
    pool.free(blocks)
    assert pool.allocate(1) == [twin]  # the twin caches nothing
    assert pool.find(b"a") is published
    assert pool.allocate(1) == [published]
    assert pool.find(b"a") is None
    pool.check_invariants()


def test_publishing_a_block_again_under_its_own_hash_changes_nothing() -> None:
    pool = BlockPool(1)
    [block] = publish_chain(pool, [b"a"])
    pool.publish(block, b"a")
    assert pool.num_published == 1
    pool.check_invariants()


def test_an_unpublished_block_is_kept_by_its_holder() -> None:
    pool = BlockPool(2)
    [block] = publish_chain(pool, [b"a"])
    pool.unpublish(block)
    assert pool.find(b"a") is None
    assert pool.num_free == 1
    pool.unpublish(block)  # nothing left to do
    pool.check_invariants()


def test_reset_is_refused_while_a_block_is_held() -> None:
    pool = BlockPool(3)
    held = publish_chain(pool, [b"a"])
    pool.free(publish_chain(pool, [b"b"]))
    assert not pool.reset()
    assert pool.num_published == 2
    pool.free(held)
    assert pool.reset()
    assert pool.num_published == 0
    pool.check_invariants()


def test_freeing_twice_and_taking_too_many_are_caught() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)
    with pytest.raises(AssertionError, match="3 of 2 free"):
        pool.allocate(3)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool, block: setattr(block, "ref_count", 0),  # leaked
        lambda pool, block: pool._published.clear(),  # an entry lost
        lambda pool, block: setattr(block, "block_hash", None),  # an entry that names nothing
        lambda pool, block: setattr(pool.blocks[2], "ref_count", 1),  # held, yet free
        lambda pool, block: setattr(pool.blocks[2], "prev_free", None),  # a link cut
    ],
)
def test_check_invariants_notices_damage(damage) -> None:
    pool = BlockPool(3)
    [block] = publish_chain(pool, [b"a"])
    pool.check_invariants()
    damage(pool, block)
    with pytest.raises(AssertionError):
        pool.check_invariants()
