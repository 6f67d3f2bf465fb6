"""A traced model cut into pieces: how many there are, and that they still are the model.

The pieces are run by torch itself here, so that a case takes a second; what becomes of them is in
test_start_up.py.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nano.attention.op import ForwardContext, forward_context
from nano.compile import piecewise
from nano.compile.artifact import split_op_name
from nano.compile.piecewise import TracedModel, trace
from nano.compile.skeleton import describe, dump_skeleton, load_skeleton
from nano.layers.kernels import Kernels
from nano.layers.native_kernels import NativeKernels
from nano.layers.row_kernels import RowKernels
from nano.models.decoder import Decoder
from tests.models.whole_prompt import WholePromptBackend, load, prompt
from tests.tiny import make_checkpoint

SPLIT_OPS = ("nano::attention",)
SIZES = (8, 1, 2, 3, 33)
FAMILIES = [
    ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
    ("mistral", {"head_dim": 24}),
    ("qwen2", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
    ("qwen3", {}),
]


def inputs(num_tokens: int) -> dict[str, Tensor]:
    """In the dtypes of an InputBatch. Every other token's result is wanted, the last one's too."""
    return {
        "input_ids": prompt(num_tokens).int(),
        "positions": torch.arange(num_tokens),
        "rows": torch.arange(num_tokens - 1, -1, -2).flip(0),
    }


def run(forward: Callable[..., Tensor], model: Decoder, num_tokens: int) -> Tensor:
    backend = WholePromptBackend(16, model.config.head_dim**-0.5)
    caches = [torch.empty(0)] * model.config.num_layers
    with torch.inference_mode(), forward_context(ForwardContext(backend, caches)):
        return forward(**inputs(num_tokens))


def traced(model: nn.Module) -> TracedModel:
    torch._dynamo.reset()
    return trace(model, Decoder.INPUTS, SPLIT_OPS)


def stitched(traced_model: TracedModel, model: nn.Module) -> Callable[..., Tensor]:
    """The traced model over the weights of `model`, its pieces run by torch."""
    tensors = piecewise.named_tensors(model)
    names: dict[str, object] = {f"w{i}": tensors[n] for i, n in enumerate(traced_model.weights)}
    names |= {f"piece_{i}": piece.graph for i, piece in enumerate(traced_model.pieces)}
    names |= {split_op_name(SPLIT_OPS[0]): torch.ops.nano.attention}
    exec(traced_model.source, names)
    return names["run"]


@pytest.mark.parametrize(("family", "overrides"), FAMILIES)
def test_stitched_pieces_of_every_family_equal_the_model(tmp_path, family, overrides):
    model = load(make_checkpoint(tmp_path / family, family, **overrides))
    forward = stitched(traced(model), model)
    for num_tokens in SIZES:  # one trace serves them all
        assert torch.equal(run(forward, model, num_tokens), run(model.forward, model, num_tokens))


def test_a_skeleton_gives_the_code_of_the_model_and_runs_on_the_models_weights(tmp_path):
    model = load(make_checkpoint(tmp_path / "m", "qwen3"))
    skeleton = load_skeleton(dump_skeleton(model))
    assert describe(skeleton) == describe(model)
    of_skeleton, of_model = traced(skeleton), traced(model)
    assert (of_skeleton.source, of_skeleton.weights) == (of_model.source, of_model.weights)
    forward = stitched(of_skeleton, model)
    assert torch.equal(run(forward, model, 5), run(model.forward, model, 5))


@pytest.mark.parametrize("num_layers", [2, 5])
@pytest.mark.parametrize("kernels", [None, NativeKernels(), RowKernels()], ids=str)
def test_three_pieces_are_distinct_whatever_the_depth(tmp_path, num_layers, kernels: Kernels):
    model = load(make_checkpoint(tmp_path / "m", num_hidden_layers=num_layers))
    if kernels is not None:
        if isinstance(kernels, NativeKernels) and not NativeKernels.is_available():
            pytest.skip("needs a C++ compiler")
        model.pack(kernels)
    of_model = traced(model)
    assert (of_model.num_calls, of_model.num_split_calls) == (num_layers + 1, num_layers)
    assert [piece.num_uses for piece in of_model.pieces] == [1, num_layers - 1, 1]
    assert of_model.source.count("nano_attention(") == num_layers


def test_pieces_that_differ_in_a_constant_are_not_taken_for_one_another(tmp_path):
    model = load(make_checkpoint(tmp_path / "m", num_hidden_layers=4))
    alike = describe(model)
    model.layers[2].input_layernorm.eps = 0.5
    assert describe(model) != alike
    of_model = traced(model)
    assert len(of_model.pieces) == 4
    assert torch.equal(run(stitched(of_model, model), model, 8), run(model.forward, model, 8))


def test_the_code_has_no_size_of_the_trace_in_it(tmp_path, monkeypatch):
    model = load(make_checkpoint(tmp_path / "m"))
    of_eight = traced(model)
    monkeypatch.setattr(piecewise, "_TRACE_SIZE", 1)
    of_one = traced(model)
    assert of_one.source == of_eight.source
    for one, eight in zip(of_one.pieces, of_eight.pieces, strict=True):
        assert piecewise.structural_key(one.graph) == piecewise.structural_key(eight.graph)


def test_a_graph_that_breaks_is_an_error():
    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return x + 1

    torch._dynamo.reset()
    with pytest.raises(Exception, match="graph_break"):
        trace(Breaks(), {"x": ("float32", "n")}, ())


def test_a_size_that_decides_something_cannot_be_traced():
    class Decides(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if x.shape[0] > 4 else x

    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"(?i)data.dependent"):
        trace(Decides(), {"x": ("float32", "n")}, ())


def test_a_skeleton_takes_no_memory_and_keeps_what_is_shared():
    huge = nn.Linear(8, 8, bias=False)
    with torch.device("meta"):
        huge.weight = nn.Parameter(torch.empty(40_000, 40_000), requires_grad=False)  # 6.4 GB
    huge.again = huge.weight
    data = dump_skeleton(huge)
    assert len(data) < 10_000
    before = resident_bytes()
    skeleton = load_skeleton(data)
    assert skeleton.again is skeleton.weight
    assert skeleton.weight.device.type == "cpu"
    assert resident_bytes() - before < 50 * 2**20


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
