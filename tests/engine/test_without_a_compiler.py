"""On a machine without a C++ compiler the promise is kept as well, only slowly."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import make_checkpoint

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
from nano import LLM, SamplingParams
from nano.layers.native_kernels import NativeKernels

assert not NativeKernels.is_available()
prompts = [list(range(i, i + length)) for i, length in enumerate((1, 15, 17, 40))]
params = [
    SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=8, logprobs=2) for i in range(4)
]


def generate(llm, some):
    outputs = llm.generate([prompts[i] for i in some], [params[i] for i in some], use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


with LLM(sys.argv[1], max_model_len=64, max_num_batched_tokens=256) as llm:
    together = generate(llm, range(4))
with LLM(sys.argv[1], max_model_len=64, max_num_batched_tokens=16, block_size=4, threads=1) as llm:
    alone = [generate(llm, [i])[0] for i in range(4)]
print("equal" if together == alone else "different")
"""


@pytest.mark.slow
def test_a_request_gets_the_same_bits_alone_and_in_company(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    (tmp_path / "bin").mkdir()
    environment = os.environ | {
        "PATH": str(tmp_path / "bin"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, checkpoint],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "equal", done.stderr[-2000:]
