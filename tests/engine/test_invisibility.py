"""The promise: outputs are a function of prompt, parameters, seed and weights, and nothing else.

One set of 32 requests, as unlike one another as parameters allow, is computed by a naive loop and
by engines of every shape. In float32, on our own kernels, tokens and logprobs are compared bit by
bit. In float64, on torch's, logprobs may differ in the last bits, far below any gap between two
logits, and Hugging Face's model is close enough to be the reference.
"""

import itertools
import random
from pathlib import Path

import pytest

from nano import LLM, SamplingParams
from nano.outputs import CompletionOutput, RequestOutput
from tests.engine.naive import NaiveEngine
from tests.tiny import EOS_TOKEN_ID, make_checkpoint

NUM_REQUESTS = 32
MAX_MODEL_LEN = 128


def make_requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(7)
    shared = [rng.randrange(256) for _ in range(37)]
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 0.8, "min_p": 0.05, "presence_penalty": 0.8},
        {"temperature": 0.8, "logit_bias": {65: 3.0, 66: -5.0}, "min_tokens": 6, "max_tokens": 9},
        {"temperature": 0.0, "prompt_logprobs": 2},
        {"temperature": 0.8, "allowed_token_ids": [*range(32, 128), EOS_TOKEN_ID]},
    ]
    requests = []
    for i in range(NUM_REQUESTS):
        own = [rng.randrange(256) for _ in range(rng.choice([1, 2, 15, 16, 17, 40]))]
        prompt = shared[: rng.choice([16, 31, 32, 37])] + own if i % 3 else own
        length = {"max_tokens": rng.choice([1, 7, 24])}
        params = SamplingParams(seed=100 + i, logprobs=2, **(length | kinds[i % len(kinds)]))
        requests.append((prompt, params))
    return requests


REQUESTS = make_requests()


# float32: on native kernels, or without a C++ compiler on their twins. Equal bit by bit on both.
@pytest.fixture(scope="module", params=["float64", "float32"])
def dtype(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("invisible"), "llama")


def make_llm(checkpoint: Path, dtype: str, **engine_args) -> LLM:
    defaults = {"dtype": dtype, "max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 8192}
    return LLM(checkpoint, **(defaults | engine_args))


def run(llm: LLM, requests=REQUESTS) -> list[RequestOutput]:
    prompts = [prompt for prompt, _ in requests]
    return llm.generate(prompts, [params for _, params in requests], use_tqdm=False)


@pytest.fixture(scope="module")
def golden(checkpoint, dtype) -> list[RequestOutput]:
    """Each request alone, in an engine without a prefix cache."""
    with make_llm(checkpoint, dtype, enable_prefix_caching=False) as llm:
        return [run(llm, [request])[0] for request in REQUESTS]


def assert_same(outputs: list[RequestOutput], expected: list[RequestOutput], dtype: str) -> None:
    tolerance = 0.0 if dtype == "float32" else 1e-9
    for i, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        assert_same_completion(output.outputs[0], wanted.outputs[0], tolerance, f"request {i}")
        assert_same_logprobs(
            output.prompt_logprobs, wanted.prompt_logprobs, tolerance, f"prompt {i}"
        )


def assert_same_completion(
    ours: CompletionOutput, wanted: CompletionOutput, tolerance: float, what: str
) -> None:
    assert ours.token_ids == wanted.token_ids, what
    assert ours.text == wanted.text, what
    assert ours.finish_reason == wanted.finish_reason, what
    assert_same_logprobs(ours.logprobs, wanted.logprobs, tolerance, what)


def assert_same_logprobs(ours, wanted, tolerance: float, what: str) -> None:
    assert (ours is None) == (wanted is None), what
    for position, (left, right) in enumerate(zip(ours or [], wanted or [], strict=True)):
        where = f"{what}, position {position}"
        if right is None:
            assert left is None, where
            continue
        assert list(left) == list(right), where
        for token_id, logprob in right.items():
            difference = abs(left[token_id].logprob - logprob.logprob)
            assert difference <= tolerance or left[token_id].logprob == logprob.logprob, where
            assert left[token_id].rank == logprob.rank, where


def test_the_engine_equals_a_naive_loop_over_hugging_face(checkpoint, dtype, golden):
    naive = NaiveEngine(checkpoint)
    for (prompt, params), output in zip(REQUESTS, golden):
        assert output.outputs[0].token_ids == naive.generate(prompt, params, (EOS_TOKEN_ID,))


def test_prompt_logprobs_equal_hugging_faces(checkpoint, dtype, golden):
    naive = NaiveEngine(checkpoint)
    checked = 0
    for (prompt, params), output in zip(REQUESTS, golden):
        if params.prompt_logprobs is None:
            assert output.prompt_logprobs is None
            continue
        logprobs = naive.logits(prompt).log_softmax(-1)
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        for i in range(1, len(prompt)):
            entry = output.prompt_logprobs[i]
            assert entry[prompt[i]].logprob == pytest.approx(
                float(logprobs[i - 1, prompt[i]]), abs=1e-4
            )
            assert set(entry) == {prompt[i], *logprobs[i - 1].topk(2).indices.tolist()}
            checked += 1
    assert checked > 50


SHAPES = list(itertools.product((8, 64, 8192), (1, 16), (True, False), (True, False)))


@pytest.mark.parametrize(("budget", "block_size", "prefix_cache", "preempts"), SHAPES)
def test_budget_blocks_cache_and_preemption_are_invisible(
    checkpoint, dtype, golden, budget, block_size, prefix_cache, preempts
):
    order = random.Random(budget + block_size).sample(range(NUM_REQUESTS), NUM_REQUESTS)
    shape = {"num_gpu_blocks_override": 112 // block_size} if preempts else {}
    with make_llm(
        checkpoint,
        dtype,
        max_num_batched_tokens=budget,
        block_size=block_size,
        enable_prefix_caching=prefix_cache,
        **shape,
    ) as llm:
        for _ in range(2):  # the second time over a warm cache
            outputs = run(llm, [REQUESTS[i] for i in order])
            assert_same(outputs, [golden[i] for i in order], dtype)
        stats = llm.stats()
    assert (stats["num_prefix_hit_tokens"] > 0) == prefix_cache
    assert (stats["num_preemptions"] > 0) == preempts
    assert stats["kv_cache_usage"] == 0


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_the_chunk_size_of_long_prompts_is_invisible(checkpoint, dtype, golden, chunk):
    with make_llm(checkpoint, dtype, long_prefill_token_threshold=chunk) as llm:
        assert_same(run(llm), golden, dtype)


def test_priorities_and_few_rows_are_invisible(checkpoint, dtype, golden):
    with make_llm(checkpoint, dtype, max_num_seqs=3, scheduling_policy="priority") as llm:
        outputs = llm.generate(
            [prompt for prompt, _ in REQUESTS],
            [params for _, params in REQUESTS],
            priority=[i % 5 for i in range(NUM_REQUESTS)],
            use_tqdm=False,
        )
    assert_same(outputs, golden, dtype)


def test_the_reference_backend_is_invisible(checkpoint, dtype, golden):
    if dtype == "float32":
        pytest.skip("another kernel has other last bits in float32")
    with make_llm(
        checkpoint, dtype, attention_backend="reference", max_num_batched_tokens=64
    ) as llm:
        assert_same(run(llm, REQUESTS[:8]), golden[:8], dtype)


@pytest.mark.slow
@pytest.mark.parametrize("preempts", [False, True])
def test_a_process_of_its_own_is_invisible(checkpoint, dtype, golden, preempts):
    shape = {"num_gpu_blocks_override": 7, "max_num_batched_tokens": 64} if preempts else {}
    with make_llm(checkpoint, dtype, use_subprocess=True, **shape) as llm:
        assert_same(run(llm), golden, dtype)
        assert (llm.stats()["num_preemptions"] > 0) == preempts


def test_streamed_increments_add_up_to_the_whole(checkpoint, dtype, golden):
    with make_llm(checkpoint, dtype) as llm:
        texts = [""] * NUM_REQUESTS
        tokens: list[list[int]] = [[] for _ in texts]
        index: dict[str, int] = {}
        stream = llm.generate(
            [prompt for prompt, _ in REQUESTS], [params for _, params in REQUESTS], stream=True
        )
        for output in stream:
            i = index.setdefault(output.request_id, int(output.request_id.rsplit("-", 1)[1]))
            texts[i] += output.outputs[0].text
            tokens[i] += output.outputs[0].token_ids
    assert texts == [output.outputs[0].text for output in golden]
    assert tokens == [output.outputs[0].token_ids for output in golden]


def test_child_zero_of_many_equals_the_only_child_and_each_child_its_seed(checkpoint, dtype):
    prompt = REQUESTS[1][0]
    with make_llm(checkpoint, dtype) as llm:
        params = SamplingParams(n=4, temperature=0.9, seed=50, max_tokens=12)
        together = llm.generate(prompt, params, use_tqdm=False)[0].outputs
        for index, child in enumerate(together):
            alone = SamplingParams(temperature=0.9, seed=50 + index, max_tokens=12)
            output = llm.generate(prompt, alone, use_tqdm=False)[0].outputs[0]
            assert (child.index, child.seed) == (index, 50 + index)
            assert child.token_ids == output.token_ids
    assert len({tuple(child.token_ids) for child in together}) > 1


@pytest.mark.parametrize("budget", [256, 8192])
def test_eight_completions_of_a_long_prompt_compute_it_once(tmp_path, budget):
    folder = make_checkpoint(tmp_path / "long", max_position_embeddings=4096)
    rng = random.Random(0)
    prompt = [rng.randrange(256) for _ in range(2000)]
    with LLM(folder, max_num_batched_tokens=budget) as llm:
        params = SamplingParams(n=8, temperature=1.0, seed=1, max_tokens=4, ignore_eos=True)
        output = llm.generate(prompt, params, use_tqdm=False)[0]
        stats = llm.stats()
    assert [len(child.token_ids) for child in output.outputs] == [4] * 8
    num_computed = stats["num_prefix_query_tokens"] - stats["num_prefix_hit_tokens"]
    assert num_computed <= 1.1 * len(prompt)
