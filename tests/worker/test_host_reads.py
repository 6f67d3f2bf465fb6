"""A step waits for its device once, whatever its requests ask for."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nano import SamplingParams
from nano.config import EngineConfig
from nano.device import Transfers
from nano.resolve import resolve
from nano.sampling.sampler import Sampler
from nano.sampling.torch_backend import TorchSampling
from nano.sampling.torch_batch_backend import TorchBatchSampling
from nano.step import NewRequest, StepOutput, StepPlan
from nano.worker import worker
from nano.worker.worker import Worker
from tests.host_reads import DeviceOfItsOwn, HostRead, NoHostReads, mark
from tests.tiny import make_checkpoint

BLOCKS_EACH = 4
PROMPTS = [[5, 9, 9, 7], list(range(40)), [200], [3, 1, 3, 1, 3, 1]]
# What a request may ask for, each in a request of its own, and much of it in one.
ASKED: list[dict] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 1.2, "top_k": 9},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.9, "logit_bias": {7: 2.0, 90: -100.0}},
    {"temperature": 0.9, "allowed_token_ids": tuple(range(40, 90))},
    {"temperature": 0.9, "min_tokens": 5, "stop_token_ids": (11,)},
    {"temperature": 0.9, "logprobs": 0},
    {"temperature": 0.9, "logprobs": 3, "prompt_logprobs": 2},
    {
        "temperature": 1.1,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "logit_bias": {3: 1.0},
        "logprobs": 3,
    },
]
BAD_WORDS = {4: ((9, 7), (12,))}  # request -> token ids of its bad words


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("host_reads"))


class Steps:
    """A worker of its own, and the steps of one request for each of ASKED."""

    def __init__(self, checkpoint: Path, device: DeviceOfItsOwn | None, sampler: Sampler):
        options = {
            "model": str(checkpoint),
            "max_model_len": 64,
            "max_num_seqs": len(ASKED),
            "num_gpu_blocks_override": BLOCKS_EACH * len(ASKED),
            "compile_mode": "eager",
            "generation_config": "vllm",
        }
        with pytest.MonkeyPatch.context() as patch:
            if device is not None:
                patch.setattr(worker, "make_device", lambda *_: device)
            loaded = Worker(resolve(EngineConfig.from_args(options)))
            loaded.load(show_progress=False)
        self.runner = loaded.runner
        self.runner.sampler = sampler
        if device is not None:
            model = self.runner.model
            mark([*model.parameters(), *model.buffers(), *self.runner.context.kv_caches])
            mark(tensor for module in model.modules() for tensor in tensors_of(module))
        self._known = [list(PROMPTS[i % len(PROMPTS)]) for i in range(len(ASKED))]

    def prompts(self) -> StepPlan:
        plan = StepPlan(step=0)
        for i, asked in enumerate(ASKED):
            blocks = list(range(i * BLOCKS_EACH, (i + 1) * BLOCKS_EACH))
            known = list(self._known[i])
            params = SamplingParams(seed=i, **asked)
            new = NewRequest(
                str(i), known, len(known), 0, blocks, params, (11,), BAD_WORDS.get(i, ())
            )
            plan.new_requests.append(new)
            plan.num_scheduled_tokens[str(i)] = len(known)
        return plan

    def verification(self, step: int, foretold: list[list[int]]) -> StepPlan:
        """Of up to three drafts each, the right ones or not quite."""
        plan = StepPlan(step)
        for i, known in enumerate(self._known):
            drafts = list(foretold[i][: i % 4])
            if drafts and i % 3 == 0:
                drafts[-1] = (drafts[-1] + 1) % 256
            if drafts:
                plan.draft_token_ids[str(i)] = drafts
            plan.num_scheduled_tokens[str(i)] = 1 + len(drafts)
            plan.num_computed_tokens[str(i)] = len(known) - 1
        return plan

    def run(self, plan: StepPlan) -> StepOutput:
        output = self.runner.execute(plan)
        for request_id, token_ids in zip(output.request_ids, output.token_ids):
            self._known[int(request_id)] += token_ids
        return output


def tensors_of(module: torch.nn.Module) -> list[Tensor]:
    """Weights that are no parameters: packed ones."""
    return [value for value in vars(module).values() if isinstance(value, Tensor)]


def expected_steps(checkpoint: Path, num_steps: int) -> tuple[list[StepPlan], list[StepOutput]]:
    """Plans, and what the twin says to them, which looks at every number it likes."""
    steps = Steps(checkpoint, None, Sampler(backend=TorchSampling()))
    foretold = one_by_one(checkpoint)
    plans, outputs = [steps.prompts()], []
    outputs.append(steps.run(plans[0]))
    for step in range(1, num_steps):
        done = [len(known) - len(PROMPTS[i % 4]) for i, known in enumerate(steps._known)]
        plans.append(steps.verification(step, [ids[n:] for ids, n in zip(foretold, done)]))
        outputs.append(steps.run(plans[-1]))
    return plans, outputs


def one_by_one(checkpoint: Path) -> list[list[int]]:
    """The tokens that come, without drafts."""
    steps = Steps(checkpoint, None, Sampler(backend=TorchSampling()))
    steps.run(steps.prompts())
    for step in range(1, 12):
        steps.run(steps.verification(step, [[]] * len(ASKED)))
    return [known[len(PROMPTS[i % 4]) :] for i, known in enumerate(steps._known)]


def test_every_kind_of_request_is_sampled_and_verified_in_one_wait(checkpoint):
    plans, expected = expected_steps(checkpoint, 4)
    assert {len(ids) for output in expected[1:] for ids in output.token_ids} == {1, 2, 3, 4}
    device = DeviceOfItsOwn()
    steps = Steps(checkpoint, device, on_device(device))
    for plan, wanted in zip(plans, expected, strict=True):
        device.num_waits = 0
        with NoHostReads():
            output = steps.run(plan)
        assert device.num_waits == 1
        assert output.errors == wanted.errors == {}
        assert output.token_ids == wanted.token_ids
        for got, should in (
            (output.logprobs, wanted.logprobs),
            (output.prompt_logprobs, wanted.prompt_logprobs),
        ):
            assert got.keys() == should.keys()
            assert all(got[r].token_ids == should[r].token_ids for r in got)
            assert all(got[r].ranks == should[r].ranks for r in got)
            for r in got:
                np.testing.assert_allclose(got[r].logprobs, should[r].logprobs, atol=1e-5)
    assert "11" in expected[0].prompt_logprobs


def on_device(device: Transfers, backend: type[TorchSampling] = TorchBatchSampling) -> Sampler:
    return Sampler(backend=backend(device), transfers=device)


class LooksOnce(TorchBatchSampling):
    """As it must not be."""

    def draw(self, *args):
        token_ids = super().draw(*args)
        assert token_ids[0].item() >= 0
        return token_ids


@pytest.mark.parametrize("backend", [LooksOnce, TorchSampling])
def test_a_step_that_looks_at_a_number_is_caught(checkpoint, backend):
    device = DeviceOfItsOwn()
    steps = Steps(checkpoint, device, on_device(device, backend))
    with NoHostReads(), pytest.raises(HostRead, match="of a tensor of the device"):
        steps.run(steps.prompts())


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x[0].item(),
        lambda x: x.sum().tolist(),
        lambda x: float(x.max()),
        lambda x: x.cpu(),
        lambda x: np.asarray(x),
        lambda x: 1 if (x > 0).any() else 0,
        lambda x: [7, 8, 9, 10][x.long()[0]],
        lambda x: x[x > 0],
        lambda x: x.masked_fill_(x > 0, 0.0)[x.isnan()],
        lambda x: x.view(2, 2)[torch.from_numpy(np.array([1]))],
        lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]),
        lambda x: torch.from_numpy(np.zeros(4, np.float32)).copy_(x),
        lambda x: (x > 0).nonzero(),
        lambda x: torch.unique(x),
        lambda x: torch.equal(x, x * 2),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_what_would_wait_for_a_gpu_is_refused(look, inference):
    device = DeviceOfItsOwn()
    with torch.inference_mode(inference):
        x = device.to_device(np.arange(4, dtype=np.float32))
        look(x.clone())  # without the guard it is no mistake
        with NoHostReads(), pytest.raises(HostRead):
            look(x * 1)
        look(x)


def test_what_the_host_holds_it_may_look_at():
    device = DeviceOfItsOwn()
    with NoHostReads():
        mine = torch.tensor([3, 1, 2])
        assert mine.tolist() == [int(mine[0]), 1, mine[2].item()]
        x = device.to_device(np.arange(5)) + torch.arange(5)
        (array,) = device.to_host([x.index_select(0, device.to_device(np.array([4, 2])))]).wait()
    assert array.tolist() == [8, 4]
    assert (device.num_copies, device.num_waits) == (1, 1)
