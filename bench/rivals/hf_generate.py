"""transformers' `generate`, float32, one stream after another."""

import torch
from job import Job, measure
from transformers import AutoModelForCausalLM


def main() -> None:
    job = Job.read()
    torch.set_num_threads(job.threads)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32).eval()
    limits = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        with torch.inference_mode():
            ids = torch.tensor(prompts)
            mask = torch.ones_like(ids)
            model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, **limits)

    measure(job, generate)


if __name__ == "__main__":
    main()
