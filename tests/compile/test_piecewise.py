"""Compiled pieces against the eager model, and how many of them there are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nano import LLM, SamplingParams
from nano.attention.op import ForwardContext, forward_context
from nano.compile.compile_model import CompiledModel, compile_model
from nano.compile.piecewise import PiecewiseBackend
from nano.layers.cpu_linear import PackedWeight
from nano.models.decoder import Decoder
from tests.models.whole_prompt import WholePromptBackend, load, prompt
from tests.tiny import make_checkpoint

SPLIT_OPS = ("nano::attention",)
SIZES = (8, 1, 2, 3, 33)


def run(forward: Callable[[Tensor, Tensor], Tensor], model: Decoder, num_tokens: int) -> Tensor:
    backend = WholePromptBackend(16, model.config.head_dim**-0.5)
    caches = [torch.empty(0)] * model.config.num_layers
    with torch.inference_mode(), forward_context(ForwardContext(backend, caches)):
        return forward(prompt(num_tokens), torch.arange(num_tokens))


def compiled_without_inductor(model: Decoder, monkeypatch) -> CompiledModel:
    """Traced, cut, deduplicated and stitched as ever, with the pieces run by torch itself."""
    monkeypatch.setattr(
        "nano.compile.compile_model.compile_with_inductor", lambda piece, examples: piece
    )
    torch._dynamo.reset()
    return CompiledModel(model, SPLIT_OPS)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
        ("mistral", {"head_dim": 24}),
        ("qwen2", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
        ("qwen3", {}),
    ],
)
def test_stitched_pieces_of_every_family_equal_the_model(tmp_path, monkeypatch, family, overrides):
    model = load(make_checkpoint(tmp_path / family, family, **overrides))
    compiled = compiled_without_inductor(model, monkeypatch)
    for num_tokens in SIZES:  # one trace serves them all
        assert torch.equal(run(compiled, model, num_tokens), run(model.forward, model, num_tokens))


@pytest.mark.parametrize("num_layers", [2, 5])
@pytest.mark.parametrize("packs", [False, True])
def test_three_pieces_are_distinct_whatever_the_depth(tmp_path, monkeypatch, num_layers, packs):
    model = load(make_checkpoint(tmp_path / "m", num_hidden_layers=num_layers))
    if packs:
        if not PackedWeight.is_available():
            pytest.skip("needs a C++ compiler")
        model.pack()
    compiled = compiled_without_inductor(model, monkeypatch)
    run(compiled, model, 8)
    report = compiled.report
    assert report is not None
    assert (report.num_pieces, report.num_split_calls) == (num_layers + 1, num_layers)
    assert report.num_distinct == 3
    assert report.source.count("op_submod") == num_layers


def test_pieces_that_differ_in_a_constant_are_not_taken_for_one_another(tmp_path, monkeypatch):
    model = load(make_checkpoint(tmp_path / "m", num_hidden_layers=4))
    model.layers[2].input_layernorm.eps = 0.5
    compiled = compiled_without_inductor(model, monkeypatch)
    assert torch.equal(run(compiled, model, 8), run(model.forward, model, 8))
    assert compiled.report is not None
    assert compiled.report.num_distinct == 4


def test_a_second_trace_is_an_error():
    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    for node in graph.graph.nodes:
        node.meta["example_value"] = torch.zeros(2)
    backend = PiecewiseBackend(SPLIT_OPS, lambda piece, examples: piece)
    assert backend(graph, [])(torch.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="traced a second time"):
        backend(graph, [])


def test_eager_is_the_model_itself(tmp_path):
    model = load(make_checkpoint(tmp_path / "m"))
    assert compile_model(model, "eager") == model.forward


@pytest.mark.slow
def test_inductor_pieces_equal_the_model_for_every_size(tmp_path):
    model = load(make_checkpoint(tmp_path / "m", num_hidden_layers=3))
    torch._dynamo.reset()
    compiled = compile_model(model, "compiled", split_ops=SPLIT_OPS)
    for num_tokens in SIZES:
        eager = run(model.forward, model, num_tokens)
        torch.testing.assert_close(run(compiled, model, num_tokens), eager, rtol=1e-4, atol=1e-4)
    assert compiled.report.num_distinct == 3


@pytest.mark.slow
@pytest.mark.skipif(not PackedWeight.is_available(), reason="needs a C++ compiler")
def test_a_compiled_engine_gives_the_same_bits_in_any_shape(tmp_path_factory):
    folder: Path = make_checkpoint(tmp_path_factory.mktemp("compiled"))
    requests = [
        (
            list(range(i, i + length)),
            SamplingParams(seed=i, temperature=0.8 * (i % 2), max_tokens=12, logprobs=2),
        )
        for i, length in enumerate((1, 15, 17, 40, 16, 33))
    ]

    def generate(llm: LLM, some: list[tuple[list[int], SamplingParams]]) -> list[Any]:
        outputs = llm.generate([p for p, _ in some], [s for _, s in some], use_tqdm=False)
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

    results = []
    for shape in (
        {"max_num_batched_tokens": 512},
        {"max_num_batched_tokens": 8, "block_size": 1},
        {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 5},
    ):
        torch._dynamo.reset()
        with LLM(folder, max_model_len=64, compile_mode="compiled", **shape) as llm:
            results.append(generate(llm, requests))
            if len(results) == 1:
                alone = [generate(llm, [request])[0] for request in requests]
    assert results[0] == results[1] == results[2] == alone
