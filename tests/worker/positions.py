"""Logits of every position of a prompt, computed by a worker in any pieces and any company."""

import torch
from torch import Tensor

from nano import SamplingParams
from nano.config import EngineConfig
from nano.resolve import resolve
from nano.step import NewRequest, StepPlan
from nano.worker.worker import Worker


def load_worker(model: str, **engine_args) -> Worker:
    settings = {
        "max_model_len": 128,
        "num_gpu_blocks_override": 1024,
        "max_num_batched_tokens": 2048,
    }
    worker = Worker(resolve(EngineConfig.from_args({"model": model} | settings | engine_args)))
    worker.load(show_progress=False)
    return worker


@torch.inference_mode()
def logits_of_prompts(worker: Worker, prompts: list[list[int]], rows: int) -> list[Tensor]:
    """[len(prompt), V] per prompt: all prompts side by side, `rows` tokens of each a step."""
    hidden = _every_hidden_state(worker)
    block_size = worker.config.kv_cache.block_size
    blocks_each = -(-max(map(len, prompts)) // block_size)
    found: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), rows):
        ids = [i for i, prompt in enumerate(prompts) if len(prompt) > start]
        new = [
            NewRequest(
                request_id=str(i),
                token_ids=prompts[i],
                num_prompt_tokens=len(prompts[i]),
                num_computed_tokens=0,
                block_ids=list(range(i * blocks_each, (i + 1) * blocks_each)),
                sampling_params=SamplingParams(temperature=0.0, seed=0),
            )
            for i in ids
        ]
        plan = StepPlan(
            step=start,
            num_scheduled_tokens={str(i): min(rows, len(prompts[i]) - start) for i in ids},
            num_computed_tokens={str(i): start for i in ids},
            new_requests=new if start == 0 else [],
        )
        worker.runner.forward(plan)
        logits = worker.target.model.compute_logits(hidden.pop())
        first = 0
        for request_id in worker.runner.sample().request_ids:
            count = plan.num_scheduled_tokens[request_id]
            found[int(request_id)].append(logits[first : first + count])
            first += count
    finished = [str(i) for i in range(len(prompts))]
    worker.runner.states.apply(
        StepPlan(step=-1, num_scheduled_tokens={}, finished_request_ids=finished)
    )
    return [torch.cat(parts) for parts in found]


def _every_hidden_state(worker: Worker) -> list[Tensor]:
    """Where those of each step will be, [T, hidden]. By itself the engine asks for fewer."""
    forward, found = worker.target.forward, []

    def compute_all(input_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        hidden = forward(input_ids, positions, torch.arange(len(input_ids)))
        found.append(hidden)
        return hidden[rows]

    worker.runner.model_forward = compute_all
    return found
