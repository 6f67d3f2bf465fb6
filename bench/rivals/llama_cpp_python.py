"""llama.cpp through llama-cpp-python's low-level calls: what `llama-bench` measures.

Streams are sequences of one batch, so that it is measured at its best with several, too.
"""

import ctypes

import llama_cpp
import numpy as np
from job import Job, measure


def main() -> None:
    job = Job.read()
    llama_cpp.llama_log_set(_QUIET, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(job.model.encode(), model_params)
    context_params = llama_cpp.llama_context_default_params()
    context_params.n_ctx = max(8192, 256 * max([1, *job.streams]))
    context_params.n_batch = context_params.n_ubatch = 512
    context_params.n_seq_max = max([1, *job.streams])
    context_params.kv_unified = True
    context_params.n_threads = context_params.n_threads_batch = job.threads
    context = llama_cpp.llama_init_from_model(model, context_params)
    num_tokens = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(512, 0, max([1, *job.streams]))

    def decode(entries: list[tuple[int, int, int, bool]]) -> None:
        """entries: (token id, position, sequence, whether its logits are wanted)."""
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = wanted
        assert llama_cpp.llama_decode(context, batch) == 0

    def best(index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, index)
        array = np.ctypeslib.as_array(logits, shape=(num_tokens,))
        return int(array.argmax())

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        last = []
        for sequence, ids in enumerate(prompts):
            for start in range(0, len(ids), 512):
                part = ids[start : start + 512]
                ends = start + len(part) == len(ids)
                decode(
                    [
                        (token, start + i, sequence, ends and i == len(part) - 1)
                        for i, token in enumerate(part)
                    ]
                )
            last.append(best(len(part) - 1))
        for step in range(new_tokens - 1):
            decode([(t, len(p) + step, s, True) for s, (t, p) in enumerate(zip(last, prompts))])
            last = [best(i) for i in range(len(last))]

    measure(job, generate)


@llama_cpp.llama_log_callback
def _QUIET(level, text, data):  # noqa: N802
    pass


if __name__ == "__main__":
    main()
