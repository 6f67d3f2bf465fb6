"""The obvious slow twin of the engine: no cache, no batch, the whole prefix for every token.

The model is Hugging Face's, so nothing of ours computes the logits; only the choice of a token
from them is shared, and that has closed-form tests of its own.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from nano.sampling.sampler import Sampler
from nano.sampling_params import SamplingParams
from tests.sampling.rows import make_rows


class NaiveEngine:
    def __init__(self, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        self.model = model.double().eval()

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[len(token_ids), V] float64."""
        return self.model(torch.tensor([token_ids])).logits[0]

    def generate(
        self, prompt: list[int], params: SamplingParams, eos_token_ids: tuple[int, ...]
    ) -> list[int]:
        """Output token ids, the stop token included."""
        output: list[int] = []
        assert params.max_tokens is not None
        while len(output) < params.max_tokens:
            rows, states = make_rows([(params, prompt, output)], eos_token_ids=eos_token_ids)
            last = self.logits(prompt + output)[-1:]
            token = Sampler().sample_rows(last, rows, states).token_ids[0]
            output.append(token)
            stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
            if token in stops and len(output) >= params.min_tokens:
                break
        return output
