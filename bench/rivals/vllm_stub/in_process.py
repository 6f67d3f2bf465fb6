"""vLLM's engine with the fixed-step model, without processes, text and HTTP: the server's floor.

python in_process.py FOLDER TOKENS STREAMS...; prints {streams: {p50, p99}} as a line of JSON.
"""

import json
import os
import sys
import time

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import EngineArgs, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from bench.step_clock import FILE_VARIABLE, StepTimes, percentile
from bench.stream_client import PROMPT, SHARE_LEFT_OUT


def run(engine: LLMEngine, num_streams: int, num_tokens: int) -> dict[str, float]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    for index in range(num_streams):
        request_id = f"{num_streams}-{index}"
        engine.add_request(request_id, {"prompt_token_ids": list(PROMPT.encode())}, params)
    arrivals: dict[str, list[float]] = {}
    letters: dict[str, str] = {}
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.monotonic()
        for output in outputs:
            token_ids = output.outputs[0].token_ids  # all so far
            known = arrivals.setdefault(output.request_id, [])
            known += [now] * (len(token_ids) - len(known))
            letters[output.request_id] = bytes(token_ids).decode()
    times = StepTimes(os.environ[FILE_VARIABLE])
    delays: list[float] = []
    left_out = int(SHARE_LEFT_OUT * num_tokens)
    for request_id, text in letters.items():
        assert len(text) == num_tokens
        delays += times.delays(text, arrivals[request_id])[left_out : num_tokens - left_out]
    return {"p50": percentile(delays, 0.5), "p99": percentile(delays, 0.99)}


def main() -> None:
    folder, num_tokens = sys.argv[1], int(sys.argv[2])
    arguments = EngineArgs(
        model=folder,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
    )
    engine = LLMEngine.from_engine_args(arguments)
    run(engine, 2, 20)  # first calls set things up
    print(json.dumps({n: run(engine, int(n), num_tokens) for n in sys.argv[3:]}))


if __name__ == "__main__":
    main()
