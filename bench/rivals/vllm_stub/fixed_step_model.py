"""A model for vLLM whose device is `bench.step_clock`: an out-of-tree architecture, by its plugin.

It is a Llama on paper only (that is where vLLM reads the KV cache's size): its forward pass takes
the step's time and computes nothing, its logits are flat but for the step's token.
"""

from typing import Any

import torch
from vllm import ModelRegistry
from vllm.model_executor.models.llama import LlamaForCausalLM

from bench.step_clock import StepClock

ARCHITECTURE = "FixedStepForCausalLM"


class FixedStepForCausalLM(LlamaForCausalLM):
    _clock: StepClock | None = None
    _token_id = 0

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self._clock is None:  # in the process that has the device, and no other
            self._clock = StepClock.from_environment()
        self._token_id = self._clock.step()
        return torch.zeros(len(positions), self.config.hidden_size, dtype=torch.float32)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(hidden_states), self.config.vocab_size)
        logits[:, self._token_id] = 1.0
        return logits


def register() -> None:
    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}:{ARCHITECTURE}")
