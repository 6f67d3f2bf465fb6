"""Custom logits processors, a row at a time: what they see, what stands, whom a mistake harms."""

import functools
import json
import re

import numpy as np
import pytest
import torch

from nano import EngineConfig, LogitsProcessor, SamplingParams
from nano.errors import ConfigError
from nano.model_input.input_batch import LogitsRows
from nano.model_input.request_states import RequestStates
from nano.sampling.backend import NO_TOKEN
from nano.sampling.logits import edit_logits
from nano.sampling.logits_processor import LogitsProcessors
from nano.sampling.sampler import Sampler, accept
from nano.sampling.torch_backend import TorchSampling
from nano.serve.__main__ import parse_arguments
from nano.step import NewRequest, StepPlan

V = 16
PROMPT = [1, 2, 2, 7]
CPU = torch.device("cpu")
LOGITS = torch.randn(V, generator=torch.Generator().manual_seed(0)) * 2
PLAIN = SamplingParams(seed=3)


class Scripted(LogitsProcessor):
    """Its function is whatever `function` of the class is, for requests with extra_args."""

    function = None
    is_invariant = False

    def is_argmax_invariant(self):
        return self.is_invariant

    def new_req_logits_processor(self, params):
        return type(self).function if params.extra_args else None


class Other(Scripted):
    pass


class Unmade(LogitsProcessor):
    def __init__(self, config, device, is_pin_memory):
        raise OSError("no dictionary")

    def new_req_logits_processor(self, params):
        return None


class Refusing(LogitsProcessor):
    def new_req_logits_processor(self, params):
        raise KeyError("grammar")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for kind in (Scripted, Other):
        monkeypatch.setattr(kind, "function", None)
    monkeypatch.setattr(Scripted, "is_invariant", False)


def marked(**params) -> SamplingParams:
    """Parameters of a request that `Scripted` and `Other` edit."""
    return SamplingParams(**({"seed": 3, "extra_args": {"any": 1}} | params))


def make_states(
    requests: list[tuple[SamplingParams, list[int]]], *kinds: type, drafts: tuple[int, ...] = ()
) -> tuple[LogitsRows, RequestStates]:
    """Each (params, output), with `drafts` behind it: len(drafts) + 1 logits rows for each."""
    config = EngineConfig.from_args({"logits_processors": list(kinds) or [Scripted]})
    states = RequestStates(len(requests), 64, 16, LogitsProcessors(config, CPU).start)
    plan = StepPlan(step=0)
    for i, (params, output) in enumerate(requests):
        plan.new_requests.append(
            NewRequest(str(i), PROMPT + output, len(PROMPT), 0, [], sampling_params=params)
        )
        plan.draft_token_ids[str(i)] = list(drafts)
    states.apply(plan)
    num_rows = len(drafts) + 1
    row = np.array([states.row_of[str(i)] for i in range(len(requests))]).repeat(num_rows)
    place = np.tile(np.arange(num_rows), len(requests))
    return LogitsRows(row, states.num_tokens[row] + place), states


def edit(rows: LogitsRows, states: RequestStates) -> tuple[torch.Tensor, dict[int, str]]:
    logits = LOGITS.repeat(len(rows.row), 1)
    return edit_logits(logits, rows, states, None, TorchSampling())


def test_a_processor_edits_after_the_bias_and_before_the_penalties():
    seen = []

    def halve(output_ids, logits):
        seen.append(logits.clone())
        return logits / 2

    Scripted.function = staticmethod(halve)
    params = marked(logit_bias={4: 3.0}, presence_penalty=1.0)
    edited, errors = edit(*make_states([(params, [4])]))
    biased = LOGITS.clone()
    biased[4] += 3.0
    assert torch.equal(seen[0], biased)
    expected = biased / 2
    expected[4] -= 1.0
    assert torch.equal(edited[0], expected)
    assert not errors


def test_processors_are_applied_in_the_order_of_listing():
    Scripted.function = staticmethod(lambda output_ids, logits: logits + 1)
    Other.function = staticmethod(lambda output_ids, logits: logits * 3)
    for kinds, expected in (((Scripted, Other), (LOGITS + 1) * 3), ((Other, Scripted), None)):
        edited, _ = edit(*make_states([(marked(), [])], *kinds))
        assert torch.equal(edited[0], LOGITS * 3 + 1 if expected is None else expected)


def test_a_drafted_row_sees_the_drafts_before_it_as_output():
    seen = []

    def look(prompt_ids, output_ids, logits):
        seen.append((prompt_ids, output_ids))
        return logits

    Scripted.function = staticmethod(look)
    edit(*make_states([(marked(), [9, 8])], drafts=(5, 6)))
    assert seen == [(PROMPT, [9, 8]), (PROMPT, [9, 8, 5]), (PROMPT, [9, 8, 5, 6])]
    assert all(type(token_id) is int for prompt, output in seen for token_id in prompt + output)


def test_rows_that_end_amid_known_tokens_are_not_edited():
    Scripted.function = staticmethod(lambda output_ids, logits: 1 / 0)
    rows, states = make_states([(marked(), [9, 8])])
    rows.num_known -= 3
    assert edit(rows, states)[1] == {}


@pytest.mark.parametrize(
    "function",
    [
        lambda output_ids, logits: logits + len(output_ids),
        lambda prompt_ids, output_ids, logits: logits + len(output_ids),
        lambda output_ids, logits, more=0: logits + len(output_ids) + more,
        functools.partial(lambda output_ids, logits, more: logits + len(output_ids), more=0),
        functools.partial(lambda first, output_ids, logits: logits + len(output_ids), 7),
    ],
)
def test_the_prompt_is_given_to_functions_of_three_arguments_only(function):
    Scripted.function = staticmethod(function)
    edited, errors = edit(*make_states([(marked(), [9, 8])]))
    assert not errors
    assert torch.equal(edited[0], LOGITS + 2)


def test_without_a_processor_of_its_own_a_row_is_not_touched():
    def clear(output_ids, logits):
        output_ids.clear()
        return logits.fill_(0.0)

    Scripted.function = staticmethod(clear)
    rows, states = make_states([(PLAIN, [1]), (PLAIN, [2])])
    logits = LOGITS.repeat(2, 1)
    assert edit_logits(logits, rows, states, None, TorchSampling())[0] is logits
    rows, states = make_states([(PLAIN, [1]), (marked(), [2]), (PLAIN, [3])])
    before = states.token_ids.copy()
    logits = LOGITS.repeat(3, 1)
    edited, _ = edit_logits(logits, rows, states, None, TorchSampling())
    assert torch.equal(edited, torch.stack((LOGITS, torch.zeros(V), LOGITS)))
    assert torch.equal(logits, LOGITS.repeat(3, 1))
    assert (states.token_ids == before).all()


def test_what_a_processor_keeps_and_writes_to_later_is_no_row_of_ours():
    kept = []

    def keep(output_ids, logits):
        for other in kept:
            other.fill_(0.0)
        kept.append(logits)
        return logits

    Scripted.function = staticmethod(keep)
    edited, _ = edit(*make_states([(marked(), [1]), (marked(), [2])]))
    assert torch.equal(edited, LOGITS.repeat(2, 1))


MISTAKES = {
    "raised ZeroDivisionError": lambda output_ids, logits: 1 / 0,
    "returned NoneType": lambda output_ids, logits: None,
    r"returned \[15\] torch.float32": lambda output_ids, logits: logits[1:],
    r"returned \[16\] torch.float64": lambda output_ids, logits: logits.double(),
    r"returned \[1, 16\]": lambda output_ids, logits: logits[None],
    "returned NaN": lambda output_ids, logits: logits.index_fill_(0, torch.tensor([5]), torch.nan),
    r"\+infinity": lambda output_ids, logits: logits.index_fill_(0, torch.tensor([5]), torch.inf),
    "raised TypeError": lambda logits: logits,
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_an_error_of_its_row_alone(backend, mistake, temperature):
    Scripted.function = staticmethod(MISTAKES[mistake])
    plain = SamplingParams(seed=1, temperature=temperature, logprobs=2, presence_penalty=0.5)
    requests = [(plain, [1]), (marked(temperature=temperature), [1]), (plain, [2])]
    logits = LOGITS.repeat(3, 1)
    rows, states = make_states(requests)
    samples = Sampler(backend=backend).sample_rows(logits, rows, states)
    assert list(samples.errors) == [1]
    assert re.search(f"Scripted .*{mistake}", samples.errors[1])
    alone = Sampler(backend=backend).sample_rows(
        logits[:2], *make_states([(plain, [1]), (plain, [2])])
    )
    assert [samples.token_ids[i] for i in (0, 2)] == alone.token_ids
    assert [samples.logprobs[i] for i in (0, 2)] == alone.logprobs


def test_a_function_that_cannot_be_had_is_an_error_of_its_request_alone():
    rows, states = make_states([(marked(), [])], Refusing)
    samples = Sampler().sample_rows(LOGITS[None], rows, states)
    assert "Refusing raised KeyError('grammar')" in samples.errors[0]
    Scripted.function = 7
    samples = Sampler().sample_rows(LOGITS[None], *make_states([(marked(), [])]))
    assert "7 is not a callable object" in samples.errors[0]


def test_bad_logits_of_the_model_are_not_laid_at_a_processors_door(backend):
    Scripted.function = staticmethod(lambda output_ids, logits: 1 / 0)
    rows, states = make_states([(marked(), [])])
    samples = Sampler(backend=backend).sample_rows(torch.full((1, V), torch.nan), rows, states)
    assert "the model produced" in samples.errors[0]


def test_a_processor_that_leaves_no_token_is_told_apart_from_a_mistake(backend):
    Scripted.function = staticmethod(lambda output_ids, logits: logits.fill_(-torch.inf))
    samples = Sampler(backend=backend).sample_rows(LOGITS[None], *make_states([(marked(), [])]))
    assert "exclude all" in samples.errors[0]


def test_drafts_before_a_failed_row_stand_and_the_failure_comes_next():
    best = int(LOGITS.argmax())
    failing = {0: [], 1: [best], 2: [best, best]}  # outputs at which it fails -> what is accepted
    for num_outputs, expected in failing.items():

        def fail(output_ids, logits, num_outputs=num_outputs):
            return logits if len(output_ids) < num_outputs else None

        Scripted.function = staticmethod(fail)
        rows, states = make_states([(marked(temperature=0.0), [])], drafts=(best, best))
        samples = Sampler().sample_rows(LOGITS.repeat(3, 1), rows, states)
        output = accept(one_request(states), states, samples)
        assert output.token_ids == [expected]
        assert bool(output.errors) == (num_outputs == 0)


def one_request(states: RequestStates):
    """What `accept` reads of a batch of request "0" with two drafts."""

    class Batch:
        request_ids = ("0",)
        rows = np.array([states.row_of["0"]])
        logits_start = np.array([0, 3])
        is_sampling = np.array([True])

    return Batch()


def test_drafts_are_sampled_under_the_processors_and_not_at_all_where_they_fail(backend):
    Scripted.function = staticmethod(lambda output_ids, logits: logits * -1)
    sampler = Sampler(backend=backend)
    rows, states = make_states([(marked(temperature=0.0), [9])])
    assert sampler.sample_drafts(LOGITS[None], rows, states)[0].tolist() == [int(LOGITS.argmin())]
    Scripted.function = staticmethod(lambda output_ids, logits: None)
    rows, states = make_states([(marked(), [9])])
    assert sampler.sample_drafts(LOGITS[None], rows, states)[0].tolist() == [NO_TOKEN]


def test_greedy_requests_do_without_a_processor_that_keeps_the_best_token():
    Scripted.is_invariant = True
    Scripted.function = staticmethod(lambda output_ids, logits: logits * 2)
    edited, _ = edit(*make_states([(marked(temperature=0.0), []), (marked(), [])]))
    assert torch.equal(edited, torch.stack((LOGITS, LOGITS * 2)))


def load(*listed: str | type) -> LogitsProcessors:
    return LogitsProcessors(EngineConfig.from_args({"logits_processors": list(listed)}), CPU)


@pytest.mark.parametrize("path", [f"{__name__}:Scripted", f"{__name__}.Scripted"])
def test_a_class_is_found_by_either_form_of_its_path(path):
    Scripted.function = staticmethod(lambda output_ids, logits: logits + 1)
    assert len(load(path).start(marked(), PROMPT)) == 1


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("no.such.module:X", "cannot import 'no.such.module:X': ModuleNotFoundError"),
        (f"{__name__}:Absent", "has no attribute 'Absent'"),
        ("nano config", "cannot import 'nano config': ValueError"),
        ("nano.config", "'nano.config' is not a class"),
        ("nano.config:EngineConfig", "'nano.config:EngineConfig' is not derived from nano.Logits"),
        (f"{__name__}:Unmade", r"cannot be made: OSError\('no dictionary'\)"),
        ("nano.LogitsProcessor", "cannot be made: TypeError"),
    ],
)
def test_a_path_that_names_no_processor_is_refused_with_the_reason(path, why):
    with pytest.raises(ConfigError, match=why):
        load(path)


def test_flags_recipes_and_arguments_list_processors_alike(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\nlogits_processors = ["a:B", "c.D"]\n')
    flags = parse_arguments(["--logits-processors", "a:B", "c.D"])
    configs = [
        EngineConfig.from_args({"logits_processors": flags.logits_processors}),
        EngineConfig.from_args({"logits_processors": ("a:B", "c.D")}),
        EngineConfig.from_toml(recipe),
    ]
    assert configs[0].model.logits_processors == ("a:B", "c.D")
    assert all(config == configs[0] for config in configs)
    with pytest.raises(ConfigError, match="must be a list of str or type, got 'a:B'"):
        EngineConfig.from_args({"logits_processors": "a:B"})


def test_a_class_goes_to_another_process_by_its_path_or_not_at_all():
    class Local(Scripted):
        pass

    sections = EngineConfig.from_args({"logits_processors": [Scripted, "a:B"]}).to_sections()
    again = EngineConfig.from_sections(json.loads(json.dumps(sections)))
    assert again.model.logits_processors == (f"{__name__}:Scripted", "a:B")
    config = EngineConfig.from_args({"logits_processors": [Local]})
    with pytest.raises(ConfigError, match=r"another process cannot import .*Local"):
        config.to_sections()
