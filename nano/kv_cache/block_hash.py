"""Block hashes: a name for the content of a full block and of everything before it. Torch-free.

    root -> H(root, tokens 0..15) -> H(that, tokens 16..31) -> ...

Equal hash means equal prefix, so one lookup per block finds the longest cached prefix. The root
holds whatever else decides the numbers in a block: how they are computed, and for whom.
"""

import json
import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256

BlockHash = bytes

_TOKEN_BYTES = array("i").itemsize


def chain_root(root: str, extra_keys: Iterable[str] = ()) -> BlockHash:
    """The parent of a first block. `extra_keys` (cache salt, adapter) are ordered, "" counts.

    JSON, because joined strings would let two lists of keys collide.
    """
    return sha256(json.dumps([root, *extra_keys]).encode()).digest()


def hash_blocks(
    parent: BlockHash, token_ids: Sequence[int], block_size: int, start: int, stop: int
) -> list[BlockHash]:
    """Hashes of `token_ids[start:stop]`, which is whole blocks; `parent` names what is before.

    Tokens are packed as little-endian int32 in one call: there is no Python work per token.
    """
    assert (stop - start) % block_size == 0
    packed = array("i", token_ids[start:stop])
    if sys.byteorder == "big":
        packed.byteswap()
    data = packed.tobytes()
    num_bytes = block_size * _TOKEN_BYTES
    hashes = []
    for offset in range(0, len(data), num_bytes):
        parent = sha256(parent + data[offset : offset + num_bytes]).digest()
        hashes.append(parent)
    return hashes
