"""Every position's logits are the same bits, however the work is cut and whoever shares it."""

import random

import pytest
import torch

from nano.layers.native_kernels import NativeKernels
from nano.native.build import load_threads
from tests.tiny import make_checkpoint
from tests.worker.positions import load_worker, logits_of_prompts

pytestmark = pytest.mark.skipif(not NativeKernels.is_available(), reason="needs a C++ compiler")

ROWS = (1, 2, 5, 8, 64)
VARIANTS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "int8": {"quantization": "int8"},
    "w8a8": {"quantization": "w8a8"},
    "int4": {"quantization": "int4"},
    "w4a8": {"quantization": "w4a8"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16-kv": {"kv_cache_dtype": "bfloat16"},
    "blocks-of-3": {"block_size": 3},
}


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(250) for _ in range(rng.choice([1, 7, 33, 64]))] for _ in range(count)]


@pytest.fixture(params=VARIANTS)
def worker(request, tmp_path):
    family = request.param if request.param.startswith(("llama", "qwen")) else "llama"
    worker = load_worker(str(make_checkpoint(tmp_path / "m", family)), **VARIANTS[request.param])
    yield worker
    worker.close()


def test_cut_into_any_rows_alone_and_among_32_and_on_any_number_of_threads(worker):
    long = [random.Random(1).randrange(250) for _ in range(64)]
    company = [long, *prompts(31)]
    pool = load_threads()
    assert pool is not None
    (whole,) = logits_of_prompts(worker, [long], rows=64)
    assert whole.std() > 0.1  # rows that were all alike would prove nothing
    for num_threads in (1, 2):
        pool.nano_set_num_threads(num_threads)
        for rows in ROWS:
            (alone,) = logits_of_prompts(worker, [long], rows)
            assert torch.equal(alone, whole), f"{rows} rows, {num_threads} threads"
            among, *_ = logits_of_prompts(worker, company, rows)
            assert torch.equal(among, whole), f"{rows} rows among 32, {num_threads} threads"
