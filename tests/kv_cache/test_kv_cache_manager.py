"""Block tables and prefix hits, rule by rule. The random test is test_kv_cache_model.py."""

import subprocess
import sys

import pytest

from nano.kv_cache.kv_cache_manager import KVCacheManager, PrefixHit
from nano.sampling_params import SamplingParams
from nano.scheduler.request import Request


def make_request(
    request_id: str,
    token_ids: list[int],
    *,
    max_num_tokens: int = 10_000,
    cache_salt: str | None = None,
    prompt_logprobs: int | None = None,
) -> Request:
    params = SamplingParams(prompt_logprobs=prompt_logprobs)
    request = Request(request_id, token_ids, params, cache_salt=cache_salt)
    request.max_num_tokens = max_num_tokens
    return request


def compute_all(kv_cache: KVCacheManager, request: Request) -> PrefixHit:
    """Admit `request` and compute and publish all of its known tokens."""
    hit = kv_cache.match_prefix(request)
    assert kv_cache.allocate(request, request.num_tokens - hit.num_tokens, hit) is not None
    request.num_computed_tokens = request.num_tokens
    kv_cache.cache_blocks(request, request.num_tokens)
    kv_cache.check_invariants()
    return hit


# B028: a prompt whose blocks are all cached must still compute a token.
@pytest.mark.parametrize(
    ("num_tokens", "num_hit"), [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32)]
)
def test_a_repeated_prompt_hits_its_full_blocks_but_never_its_last_token(
    num_tokens: int, num_hit: int
) -> None:
    kv_cache = KVCacheManager(16, 16)
    prompt = list(range(num_tokens))
    for index in range(3):
        request = make_request(f"r{index}", prompt)
        hit = compute_all(kv_cache, request)
        assert hit.num_tokens == (num_hit if index else 0)
        kv_cache.free(request)


def test_with_block_size_1_everything_but_the_last_token_is_hit() -> None:
    kv_cache = KVCacheManager(16, 1)
    compute_all(kv_cache, make_request("a", [1, 2, 3]))
    assert kv_cache.match_prefix(make_request("b", [1, 2, 3])).num_tokens == 2
    assert kv_cache.match_prefix(make_request("c", [1, 9, 3])).num_tokens == 1


def test_blocks_grow_only_when_a_token_needs_one() -> None:
    kv_cache = KVCacheManager(8, 4)
    request = make_request("a", list(range(6)))
    assert len(kv_cache.allocate(request, 3) or []) == 1
    request.num_computed_tokens = 3
    assert kv_cache.allocate(request, 1) == []
    assert len(kv_cache.allocate(request, 2) or []) == 1
    assert len(kv_cache.block_ids(request)) == 2
    kv_cache.check_invariants()


def test_an_admission_returns_the_hit_blocks_first() -> None:
    kv_cache = KVCacheManager(8, 2)
    a, b = make_request("a", [1, 2, 3, 4, 5]), make_request("b", [1, 2, 3, 4, 6])
    compute_all(kv_cache, a)
    hit = kv_cache.match_prefix(b)
    block_ids = kv_cache.allocate(b, 1, hit)
    assert block_ids == kv_cache.block_ids(b)
    assert block_ids is not None
    assert block_ids[:2] == hit.block_ids == kv_cache.block_ids(a)[:2]
    assert block_ids[2] not in kv_cache.block_ids(a)


def test_without_room_nothing_changes() -> None:
    kv_cache = KVCacheManager(4, 2)
    a = make_request("a", [1, 2, 3, 4, 5, 6])
    compute_all(kv_cache, a)
    b = make_request("b", [1, 2, 3, 4, 7, 8, 9])
    hit = kv_cache.match_prefix(b)
    assert hit.num_tokens == 4
    assert kv_cache.allocate(b, 3, hit) is None
    assert kv_cache.block_ids(b) == []
    assert kv_cache.usage == 0.75
    assert kv_cache.match_prefix(b) == hit
    assert kv_cache.allocate(a, 3) is None
    kv_cache.check_invariants()


def test_hit_blocks_that_nobody_holds_use_up_free_blocks() -> None:
    kv_cache = KVCacheManager(4, 2)
    a = make_request("a", [1, 2, 3, 4, 5, 6])
    compute_all(kv_cache, a)
    kv_cache.free(a)
    b = make_request("b", [1, 2, 3, 4, 5, 6, 7, 8, 9])  # five blocks; three hit, one other is free
    hit = kv_cache.match_prefix(b)
    assert hit.num_tokens == 6
    assert kv_cache.allocate(b, 3, hit) is None
    assert kv_cache.usage == 0.0
    kv_cache.check_invariants()


def test_a_request_is_admitted_only_if_all_it_knows_fits() -> None:
    kv_cache = KVCacheManager(4, 2)
    assert kv_cache.allocate(make_request("a", list(range(9))), 2, PrefixHit()) is None
    fits = make_request("b", list(range(8)))
    assert len(kv_cache.allocate(fits, 2, PrefixHit()) or []) == 1  # yet it takes what it uses


def test_lookahead_slots_are_held_past_the_step_but_not_past_the_end_of_the_request() -> None:
    kv_cache = KVCacheManager(8, 2, num_lookahead_tokens=3)
    request = make_request("a", [1, 2], max_num_tokens=6)
    assert len(kv_cache.allocate(request, 2) or []) == 3  # 2 + 3 tokens
    request.num_computed_tokens = 4
    assert kv_cache.allocate(request, 1) == []  # 5 + 3, but the request ends at 6


def test_only_known_tokens_can_be_published() -> None:
    kv_cache = KVCacheManager(8, 2)
    request = make_request("a", [1, 2, 3])
    kv_cache.allocate(request, 3)
    with pytest.raises(AssertionError, match="a draft is published"):
        kv_cache.cache_blocks(request, 4)


def test_output_tokens_are_cached_like_prompt_tokens() -> None:
    kv_cache = KVCacheManager(8, 2)
    request = make_request("a", [1, 2, 3])
    compute_all(kv_cache, request)
    request.token_ids += [4, 5]
    kv_cache.allocate(request, 1)
    request.num_computed_tokens = 4
    kv_cache.cache_blocks(request, 4)
    assert kv_cache.match_prefix(make_request("b", [1, 2, 3, 4, 5, 6])).num_tokens == 4


# B031: tenants with different salts share nothing.
def test_a_cache_salt_separates_requests() -> None:
    kv_cache = KVCacheManager(32, 4)
    prompt = list(range(16))
    cached = []
    for index, salt in enumerate(["a", "b", "a", None, ""]):
        request = make_request(f"r{index}", prompt, cache_salt=salt)
        cached.append(compute_all(kv_cache, request).num_tokens)
        kv_cache.free(request)
    assert cached == [0, 0, 12, 0, 0]


def test_kv_computed_in_another_way_has_another_name() -> None:
    hashes = []
    for root in ("eager", "compiled"):
        request = make_request("a", [1, 2, 3])
        compute_all(KVCacheManager(4, 2, root=root), request)
        hashes.append(request.block_hashes)
    assert hashes[0] != hashes[1]


def test_a_request_for_prompt_logprobs_fills_the_cache_but_does_not_read_it() -> None:
    kv_cache = KVCacheManager(16, 2)
    for index in range(2):
        request = make_request(f"p{index}", [1, 2, 3, 4, 5], prompt_logprobs=1)
        assert compute_all(kv_cache, request) == PrefixHit()
    assert kv_cache.match_prefix(make_request("b", [1, 2, 3, 4, 5])).num_tokens == 4


def test_without_prefix_caching_nothing_is_hashed_or_hit() -> None:
    kv_cache = KVCacheManager(8, 2, enable_prefix_caching=False)
    a, b = make_request("a", [1, 2, 3, 4, 5]), make_request("b", [1, 2, 3, 4, 5])
    compute_all(kv_cache, a)
    assert compute_all(kv_cache, b) == PrefixHit()
    assert a.block_hashes == b.block_hashes == []


def test_forgotten_blocks_are_not_found_and_not_published_again() -> None:
    kv_cache = KVCacheManager(8, 2)
    a = make_request("a", [1, 2, 3, 4, 5, 6])
    compute_all(kv_cache, a)
    kv_cache.forget(a, num_valid_tokens=3)  # block 0 is valid, block 1 in part, block 2 is not
    probe = make_request("b", [1, 2, 3, 4, 5, 6, 7])
    assert kv_cache.match_prefix(probe).num_tokens == 2
    kv_cache.cache_blocks(a, 6)
    assert kv_cache.match_prefix(probe).num_tokens == 2
    kv_cache.forget(a)
    assert kv_cache.match_prefix(probe).num_tokens == 0
    kv_cache.free(a)
    assert kv_cache.usage == 0.0
    kv_cache.check_invariants()


def test_forgetting_a_duplicate_leaves_the_published_block_alone() -> None:
    kv_cache = KVCacheManager(8, 2)
    a, b = make_request("a", [1, 2, 3]), make_request("b", [1, 2, 3])
    for request in (a, b):  # both computed the block, neither hit the other's
        kv_cache.allocate(request, 3, PrefixHit())
    kv_cache.cache_blocks(a, 3)
    kv_cache.cache_blocks(b, 3)
    kv_cache.forget(b)
    kv_cache.free(b)
    hit = kv_cache.match_prefix(make_request("c", [1, 2, 3]))
    assert hit.block_ids == kv_cache.block_ids(a)[:1]
    kv_cache.check_invariants()


# B029: a freed block that is overwritten must not be found under its old content.
def test_a_prompt_whose_blocks_were_reused_is_not_hit() -> None:
    kv_cache = KVCacheManager(12, 16)
    prompts = [[100 * index + offset for offset in range(96)] for index in range(6)]
    # Twelve blocks hold two prompts of six, and each prompt comes back after five others.
    for turn in range(18):
        request = make_request(f"r{turn}", prompts[turn % 6])
        assert compute_all(kv_cache, request).num_tokens == 0
        kv_cache.free(request)
    previous = make_request("previous", prompts[4])
    assert kv_cache.match_prefix(previous).num_tokens == 80


# B034: blocks come back, whatever the length and whoever shared them.
def test_usage_returns_to_zero_and_one_request_can_then_take_every_block() -> None:
    kv_cache = KVCacheManager(32, 4)
    live: list[Request] = []
    for index in range(300):
        length = 4 * (index % 7) + [3, 4, 5][index % 3]
        request = make_request(f"r{index}", [index % 5] * length)
        compute_all(kv_cache, request)
        live.append(request)
        if len(live) == 3:
            kv_cache.free(live.pop(index % 3))
    for request in live:
        kv_cache.free(request)
    assert kv_cache.usage == 0.0
    assert len(kv_cache.allocate(make_request("big", [9] * 128), 128) or []) == 32
    kv_cache.check_invariants()


def test_the_prefix_cache_can_be_reset_only_when_nothing_runs() -> None:
    kv_cache = KVCacheManager(8, 2)
    request = make_request("a", [1, 2, 3])
    compute_all(kv_cache, request)
    assert not kv_cache.reset_prefix_cache()
    kv_cache.free(request)
    assert kv_cache.match_prefix(make_request("b", [1, 2, 3])).num_tokens == 2
    assert kv_cache.reset_prefix_cache()
    assert kv_cache.match_prefix(make_request("b", [1, 2, 3])).num_tokens == 0


def test_unknown_requests_hold_nothing_to_forget_or_free() -> None:
    kv_cache = KVCacheManager(2, 2)
    request = make_request("a", [1])
    kv_cache.forget(request)
    kv_cache.free(request)
    assert kv_cache.block_ids(request) == []


def test_check_invariants_notices_a_block_that_nobody_gave_back() -> None:
    kv_cache = KVCacheManager(4, 2)
    compute_all(kv_cache, make_request("a", [1, 2, 3]))
    del kv_cache._tables["a"]
    with pytest.raises(AssertionError, match="is held by 0 requests"):
        kv_cache.check_invariants()


def test_the_control_plane_imports_no_torch() -> None:
    code = (
        "import sys, nano.scheduler.scheduler, nano.kv_cache.kv_cache_manager;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
