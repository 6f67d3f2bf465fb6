"""What the compiler makes of every kind of model, against the model itself, bit by bit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nano.attention.op import ForwardContext, attend, forward_context
from nano.compile import artifact
from nano.compile.build_artifact import build_artifact
from nano.compile.skeleton import dump_skeleton, load_skeleton
from nano.layers.native_kernels import NativeKernels
from nano.models.decoder import Decoder
from nano.native.build import compiler
from tests.models.whole_prompt import WholePromptBackend, load, prompt
from tests.tiny import make_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler"),
]
SIZES = (1, 2, 7, 8, 33)
ATTENTION = {"nano::attention": attend}


def compile_skeleton(model: Decoder, folder: Path) -> Callable[..., Tensor]:
    """The forward of `model` in pieces that were compiled without its weights."""
    torch._dynamo.reset()
    folder.mkdir()
    skeleton = load_skeleton(dump_skeleton(model))
    manifest = build_artifact(skeleton, model.INPUTS, tuple(ATTENTION), {}, folder)
    assert manifest.report.uses == [1, model.config.num_layers - 1, 1]
    *_, forward = artifact.load(folder, model, ATTENTION)
    assert forward is not None
    return forward


def some_rows(num_tokens: int) -> Tensor:
    """In no order, and not all."""
    return torch.arange(num_tokens).roll(1)[: num_tokens // 2 + 1]


@contextmanager
def attending(model: Decoder) -> Iterator[None]:
    backend = WholePromptBackend(16, model.config.head_dim**-0.5)
    caches = [torch.empty(0)] * model.config.num_layers
    with torch.inference_mode(), forward_context(ForwardContext(backend, caches)):
        yield


@pytest.mark.skipif(not NativeKernels.is_available(), reason="needs native kernels")
@pytest.mark.parametrize(
    ("family", "overrides", "cpu_flags"),
    [
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}, None),
        ("mistral", {"head_dim": 24, "hidden_size": 72}, "-march=x86-64"),
        ("qwen2", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "-march=x86-64-v3"),
        ("qwen3", {"num_hidden_layers": 4}, None),
    ],
)
def test_every_family_on_native_kernels_keeps_its_bits(
    tmp_path, monkeypatch, family, overrides, cpu_flags
):
    model = load(make_checkpoint(tmp_path / family, family, **overrides))
    model.pack(NativeKernels())
    if cpu_flags is not None:
        monkeypatch.setenv("NANO_CPU_FLAGS", cpu_flags)
    forward = compile_skeleton(model, tmp_path / "artifact")
    with attending(model):
        for num_tokens in SIZES:
            inputs = prompt(num_tokens).int(), torch.arange(num_tokens), some_rows(num_tokens)
            assert torch.equal(forward(*inputs), model(*inputs))


def test_other_kernels_and_dtypes_agree_up_to_rounding(tmp_path):
    model = load(make_checkpoint(tmp_path / "m"), dtype=torch.float64)
    forward = compile_skeleton(model, tmp_path / "artifact")
    with attending(model):
        for num_tokens in SIZES:
            inputs = prompt(num_tokens).int(), torch.arange(num_tokens), some_rows(num_tokens)
            torch.testing.assert_close(forward(*inputs), model(*inputs), rtol=1e-9, atol=1e-9)
