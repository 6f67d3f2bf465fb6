"""What a step launches, in order, is what the design says; and what would break it is seen.

The device has recorded graphs. Operators of torch are left out where their number is nobody's
business; what waits, copies, plans and replays is compared as a whole.
"""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from nano.config import EngineConfig
from nano.device.recording_graph import RecordingCpu
from nano.launches.__main__ import main
from nano.launches.rehearsal import Rehearsal
from nano.launches.sequence import Launch, Step
from nano.layers.native_kernels import NativeKernels
from nano.step import StepOutput, StepPlan
from nano.worker.worker import Worker
from tests.tiny import make_checkpoint

pytestmark = pytest.mark.skipif(not NativeKernels.is_available(), reason="needs a C++ compiler")

NUM_LAYERS, NUM_REQUESTS, NUM_DRAFTS = 3, 4, 3
SIZES = {
    "max_model_len": 128,
    "max_num_seqs": NUM_REQUESTS + 1,
    "max_num_batched_tokens": 40,
    "num_gpu_blocks_override": 40,
    "compile_mode": "eager",
}
INPUTS = ["copy"] * 5  # token ids, positions, block table, slots, rows of logits
RESULT = ["sampling", "read", "wait"]
FULL = [*INPUTS, "plan", "graph", "replay", *RESULT]
PIECES = [*["replay", "attention"] * NUM_LAYERS, "replay"]
PIECEWISE = [*INPUTS, "plan", "graph", *PIECES, *RESULT]
EAGER = [*INPUTS, "plan", "eager", *["attention"] * NUM_LAYERS, *RESULT]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launches")
    return make_checkpoint(folder, num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("draft"), num_hidden_layers=1)


def rehearse(
    checkpoint: Path,
    *,
    num_requests: int = NUM_REQUESTS,
    simulates_graphs: bool = True,
    change: Callable[[Rehearsal], None] = lambda rehearsal: None,
    **args,
) -> dict[str, Step]:
    """By name. `change` is done to the worker before it runs."""
    drafting = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS}
    args = {"model": str(checkpoint), "speculative_config": json.dumps(drafting)} | SIZES | args
    config = EngineConfig.from_args(args)
    rehearsal = Rehearsal(config, num_requests, NUM_DRAFTS, simulates_graphs)
    change(rehearsal)
    return {step.name: step for step in rehearsal.run()}


def kinds(step: Step, model: str = "") -> list[str]:
    return [x.kind for x in step.launches if x.kind != "operator" and x.model == model]


def told(step: Step, kind: str) -> list[str]:
    return [x.what for x in step.launches if x.kind == kind]


@pytest.fixture(scope="module")
def both(checkpoint) -> dict[str, Step]:
    """With full graphs and pieces."""
    return rehearse(checkpoint)


def check_whole_step(step: Step, key: str) -> None:
    """Copies, one plan, one replay, sampling, one read: nothing twice, nothing between."""
    assert kinds(step) == FULL
    assert told(step, "graph")[0].startswith(f"{key}:")


def test_a_decode_step_is_one_plan_one_replay_and_one_read(both):
    check_whole_step(both["decode"], "full 4 x 1")
    assert told(both["decode"], "graph") == ["full 4 x 1: 4 requests of 1 token each, no padding"]
    assert told(both["decode"], "plan") == ["cpu, for a graph of 4 x 1: 4 requests, 4 rows"]


def test_so_is_a_step_that_verifies_as_many_drafts_of_every_request(both):
    check_whole_step(both["verify"], f"full 4 x {NUM_DRAFTS + 1}")
    assert told(both["verify"], "read") == [f"[{NUM_REQUESTS * (NUM_DRAFTS + 1)}] int64"]


def test_a_mixed_step_is_a_graph_more_than_layers_with_attention_between(both):
    step = both["mixed"]
    assert kinds(step) == PIECEWISE
    assert told(step, "replay") == [f"piece {i + 1}" for i in range(NUM_LAYERS + 1)]
    assert told(step, "attention") == [f"layer {i + 1}" for i in range(NUM_LAYERS)]
    assert told(step, "graph") == ["piecewise 32: 5 requests of up to 24 tokens, 1 of padding"]
    assert told(step, "plan") == ["cpu, any mix of rows: 5 requests, 31 rows"]


def test_what_is_copied_to_the_device_is_what_the_step_reads(both):
    copies = [what.split(maxsplit=1) for what in told(both["verify"], "copy")]
    shapes = sorted(shape for _, shape in copies)
    num_rows = NUM_REQUESTS * (NUM_DRAFTS + 1)
    rows, wide_rows = f"[{num_rows}] int32", f"[{num_rows}] int64"
    assert shapes == sorted([rows, wide_rows, wide_rows, wide_rows, f"[{NUM_REQUESTS}, 2] int32"])
    assert {"positions", "block_table", "slots"} <= {name for name, _ in copies}


def test_requests_fewer_than_a_graph_has_are_padded(checkpoint):
    step = rehearse(checkpoint, num_requests=3)["verify"]
    check_whole_step(step, "full 4 x 4")
    assert told(step, "graph") == ["full 4 x 4: 3 requests of 4 tokens each, 4 of padding"]


@pytest.mark.parametrize(
    ("mode", "decode", "mixed", "why"),
    [
        ("FULL_AND_PIECEWISE", FULL, PIECEWISE, "piecewise 32"),
        ("PIECEWISE", PIECEWISE, PIECEWISE, "piecewise 32"),
        ("FULL_DECODE_ONLY", FULL, EAGER, "queries of several lengths"),
        ("NONE", EAGER, EAGER, "no graphs on this device, or none wanted"),
    ],
)
def test_each_mode_has_its_sequence(checkpoint, mode, decode, mixed, why):
    steps = rehearse(checkpoint, cudagraph_mode=mode)
    assert kinds(steps["decode"]) == kinds(steps["verify"]) == decode
    assert kinds(steps["mixed"]) == mixed
    (said,) = told(steps["mixed"], "graph") + told(steps["mixed"], "eager")
    assert said.partition(":")[0] == why


def test_a_device_without_graphs_runs_every_step_eagerly(checkpoint):
    for step in rehearse(checkpoint, simulates_graphs=False).values():
        assert kinds(step) == EAGER


def test_a_full_graph_saves_all_operators_of_the_model(checkpoint, both):
    """What is left copies inputs to where the graph reads them, and makes logits and tokens."""
    eager = rehearse(checkpoint, cudagraph_mode="NONE")["decode"]
    names = set(told(both["decode"], "operator"))
    assert names == {"copy_", "index", "linear_float32", "sample_rows"}
    assert eager.counts["operator"] > 3 * both["decode"].counts["operator"]


def check_passes(step: Step, num_passes: int) -> None:
    """Of a draft model: each is one plan and one replay, and none waits for a token."""
    passes = [kind for kind in kinds(step, "draft_model") if kind not in ("copy", "read", "wait")]
    assert passes == ["plan", "graph", "replay", "sampling"] * num_passes
    assert {what.partition(":")[0] for what in told(step, "graph")[1:]} == {"full 4 x 1"}


def test_a_draft_model_guesses_in_as_many_replays_and_nobody_waits_for_them(checkpoint, draft):
    drafting = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": NUM_DRAFTS}
    step = rehearse(checkpoint, speculative_config=json.dumps(drafting))["verify"]
    check_whole_step(step, f"full 4 x {NUM_DRAFTS + 1}")
    check_passes(step, NUM_DRAFTS)
    # A core that plans step by step is told the drafts: all of them at once, at the end.
    assert [x.kind for x in step.launches][-2:] == ["read", "wait"]
    assert kinds(step, "draft_model").count("wait") == 1


def test_drafts_for_a_plan_that_is_ahead_are_awaited_behind_the_next_forward(checkpoint, draft):
    drafting = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": NUM_DRAFTS}
    config = json.dumps(drafting)
    step = rehearse(checkpoint, speculative_config=config, async_scheduling=True)["verify"]
    check_passes(step, NUM_DRAFTS)
    assert step.launches[-1].kind == "read"  # and nobody has waited for it
    order = [kind for kind in kinds(step) if kind != "copy"]
    assert order == ["plan", "graph", "replay", "wait", *RESULT]


def plan_for_every_layer(rehearsal: Rehearsal) -> None:
    attention = rehearsal.worker.runner.context.backend.inner
    plan, forward = attention.plan, attention.forward
    planned = []
    attention.plan = lambda metadata: (planned.append(metadata), plan(metadata))
    attention.forward = lambda *args: (plan(planned[-1]), forward(*args))


def read_twice(rehearsal: Rehearsal) -> None:
    sampler = rehearsal.worker.runner.sampler
    draw = sampler.backend.draw

    def draw_and_look(*args):
        token_ids = draw(*args)
        sampler.transfers.to_host([token_ids]).wait()
        return token_ids

    sampler.backend.draw = draw_and_look


def look_at_a_value(rehearsal: Rehearsal) -> None:
    model = rehearsal.worker.runner.model
    compute_logits = model.compute_logits
    model.compute_logits = lambda hidden: compute_logits(hidden) * (hidden[0, 0].item() != 0.5)


def copy_after_the_plan(rehearsal: Rehearsal) -> None:
    runner = rehearsal.worker.runner
    forward, device = runner.model_forward, rehearsal.worker.device

    def copy_and_compute(input_ids, positions, rows):
        return forward(input_ids, device.to_device(positions.numpy().copy()), rows)

    runner.model_forward = copy_and_compute


@pytest.mark.parametrize(
    ("change", "name", "more"),
    [
        (plan_for_every_layer, "mixed", {"plan": NUM_LAYERS}),
        (read_twice, "decode", {"read": 1, "wait": 1}),
        (look_at_a_value, "decode", {"read": 1, "wait": 1}),
        (copy_after_the_plan, "decode", {"copy": 1}),
    ],
)
def test_a_change_for_the_worse_is_seen(checkpoint, both, change, name, more):
    step = rehearse(checkpoint, change=change)[name]
    assert kinds(step) != kinds(both[name])
    assert Counter(kinds(step)) - Counter(kinds(both[name])) == more


def test_a_worker_that_is_listened_to_computes_what_it_always_does(checkpoint):
    heard: list[tuple[StepPlan, list[list[int]]]] = []
    workers: list[Worker] = []

    def keep(rehearsal: Rehearsal) -> None:
        worker, execute = rehearsal.worker, rehearsal.worker.execute
        workers.append(worker)

        def execute_and_keep(plan: StepPlan) -> StepOutput:
            output = execute(plan)
            heard.append((plan, output.token_ids))
            return output

        worker.execute = execute_and_keep

    rehearse(checkpoint, change=keep)
    alone = Worker(workers[0].config, RecordingCpu())
    alone.load(show_progress=False)
    for plan, token_ids in heard:
        assert alone.execute(plan).token_ids == token_ids


def test_the_program_prints_what_repeats_once(checkpoint, capsys):
    arguments = [
        "--model",
        str(checkpoint),
        "--simulate-graphs",
        "--requests",
        "2",
        "--drafts",
        "1",
    ]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "layers:     3" in lines
    assert "verify: 2 requests, 4 tokens" in lines
    place = lines.index("   3 x replay     piece 1 ... piece 3")
    assert lines[place + 1 : place + 3] == [
        "       attention  layer 1 ... layer 3",
        "       replay     piece 4",
    ]
    assert sum(line.startswith("     = copy 5,") for line in lines) == 3


def test_the_program_prints_data(checkpoint, capsys):
    arguments = ["--model", str(checkpoint), "--json", "--requests", "1", "--drafts", "0"]
    assert main(arguments) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["graphs"] == "none"
    assert [step["name"] for step in data["steps"]] == ["decode", "mixed"]
    (decode, _) = data["steps"]
    assert decode["counts"]["attention"] == NUM_LAYERS
    assert decode["launches"][0] == {"kind": "copy", "model": ""} | {
        "what": decode["launches"][0]["what"]
    }


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--max-num-seqs", "2"], "max_num_seqs must be at least 5 here, got 2"),
        (["--max-model-len", "20"], "max_model_len must be at least 76 here, got 20"),
        (["--requests", "0"], "--requests must be at least 1, got 0"),
        (["--cudagraph-mode", "FULL"], "cudagraph_mode=FULL needs device=cuda"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_words(checkpoint, capsys, arguments, complaint):
    assert main(["--model", str(checkpoint), *arguments]) == 1
    assert complaint in capsys.readouterr().err


def test_repetitions_are_drawn_together_and_nothing_else():
    layer = (("replay", "piece"), ("attention", "layer"))
    launches = [
        Launch("copy", "a"),
        *[Launch("operator", name) for name in ("add", "mul", "add")],
        *[Launch(kind, f"{what} {i}") for i in (1, 2) for kind, what in layer],
        Launch("read", "b", "some_model"),
    ]
    assert Step("decode", 1, 1, launches).text().splitlines() == [
        "decode: 1 request, 1 token",
        "       copy       a",
        "       operator   3: add x 2, mul",
        "   2 x replay     piece 1 ... piece 2",
        "       attention  layer 1 ... layer 2",
        "       read       b [some_model]",
        "     = copy 1, operator 3, replay 2, attention 2, read 1",
    ]
