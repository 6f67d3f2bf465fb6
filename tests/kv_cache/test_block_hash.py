"""A hash names a block's content and everything before it."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano.kv_cache.block_hash import chain_root, hash_blocks

ROOT = chain_root("model")


def test_a_hash_covers_the_parent_and_the_tokens_as_little_endian_int32() -> None:
    packed = struct.pack("<3i", 1, 2, 151_935)
    expected = hashlib.sha256(ROOT + packed).digest()
    assert hash_blocks(ROOT, [1, 2, 151_935], 3, 0, 3) == [expected]


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40),
    st.integers(1, 5),
    st.data(),
)
def test_hashing_in_pieces_equals_hashing_at_once(
    token_ids: list[int], block_size: int, data: st.DataObject
) -> None:
    num_blocks = len(token_ids) // block_size
    split = data.draw(st.integers(0, num_blocks)) * block_size
    stop = num_blocks * block_size
    whole = hash_blocks(ROOT, token_ids, block_size, 0, stop)
    head = hash_blocks(ROOT, token_ids, block_size, 0, split)
    tail = hash_blocks(head[-1] if head else ROOT, token_ids, block_size, split, stop)
    assert head + tail == whole


def test_equal_blocks_after_different_prefixes_have_different_names() -> None:
    a = hash_blocks(ROOT, [1, 2, 9, 9], 2, 0, 4)
    b = hash_blocks(ROOT, [3, 4, 9, 9], 2, 0, 4)
    assert a[1] != b[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("eager",), ("compiled",)),
        (("m", ["a"]), ("m", ["b"])),
        (("m", [""]), ("m", [])),
        (("m", ["a", "b"]), ("m", ["ab"])),
        (("m", ["a", "b"]), ("m", ["b", "a"])),
        (("ma", []), ("m", ["a"])),
        (("m", ['a", "b']), ("m", ["a", "b"])),
    ],
)
def test_roots_differ_when_the_name_or_any_extra_key_differs(one: tuple, other: tuple) -> None:
    assert chain_root(*one) != chain_root(*other)


def test_a_lone_surrogate_in_a_salt_is_hashed_like_any_text() -> None:
    assert chain_root("m", ["\ud800"]) != chain_root("m", ["?"])
