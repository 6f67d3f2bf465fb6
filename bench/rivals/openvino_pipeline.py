"""OpenVINO GenAI's continuous batching pipeline, on a GGUF file."""

import openvino_genai
from job import Job, measure


def main() -> None:
    job = Job.read()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.LLMPipeline(
        job.model,
        "CPU",
        scheduler_config=scheduler,
        INFERENCE_NUM_THREADS=job.threads,
        **job.options,
    )
    words = "alpha beta gamma delta stone river cloud table window garden paper silver".split()

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        # It takes text here; a word is about a token, and decoding does not depend on which.
        texts = [" ".join(words[token % len(words)] for token in ids) for ids in prompts]
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
        config.apply_chat_template = False
        pipeline.generate(texts, config)

    measure(job, generate)


if __name__ == "__main__":
    main()
