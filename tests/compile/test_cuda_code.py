"""What Inductor writes for a GPU that is not here: generated from fake tensors, never run.

torch is told of an H100 where it asks, and is stopped when the code is written: the rest would
load it.
"""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nano.compile import bundle
from nano.compile.piecewise import Piece, TracedModel, trace
from nano.compile.skeleton import dump_skeleton, load_skeleton
from nano.models.decoder import Decoder
from tests.models.whole_prompt import load
from tests.tiny import make_checkpoint
from tests.triton_compiler import compile_for

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.slow

H100 = SimpleNamespace(
    name="H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    shared_memory_per_multiprocessor=228 * 2**10,
    total_memory=80 * 2**30,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
)


class Written(Exception):
    pass


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where the code goes, while there seems to be a GPU."""
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.graph import GraphLowering
    from triton.backends.compiler import GPUTarget

    written: list[str] = []

    def save(code: str) -> None:
        written.append(code)
        raise Written

    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "synchronize": None,
        "_lazy_init": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "_get_device_properties": H100,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer, raising=False)
    for passes in (joint_graph, post_grad):  # traced on the device: patterns that we do not have
        monkeypatch.setattr(passes, "lazy_init", lambda *_: None)
    monkeypatch.setattr("torch._inductor.scheduler.has_triton", lambda *_: True)
    monkeypatch.setattr(GraphLowering, "save_output_code", save)
    monkeypatch.setitem(bundle._OPTIONS, "triton.autotune_at_compile_time", False)
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda:0"),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    return written


def traced(checkpoint: Any) -> TracedModel:
    torch._dynamo.reset()
    model = load_skeleton(dump_skeleton(load(checkpoint, dtype=torch.bfloat16)))
    # To index a tensor by another is what a torch without CUDA refuses, so all rows are wanted.
    inputs = {name: kind for name, kind in Decoder.INPUTS.items() if name != "rows"}
    return trace(model, inputs, ("nano::attention",))


def on_gpu(piece: Piece) -> Piece:
    """The piece as a trace on a GPU would give it."""
    nodes = piece.graph.graph.find_nodes(op="placeholder")
    mode = next(x.fake_mode for x in piece.examples if isinstance(x, Tensor))
    examples = []
    for node, example in zip(nodes, piece.examples):
        if isinstance(example, Tensor):
            with mode:
                example = torch.empty_strided(
                    example.shape, example.stride(), dtype=example.dtype, device="cuda:0"
                )
        node.meta["example_value"] = example
        examples.append(example)
    return Piece(piece.graph, examples, piece.num_uses)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> list[Piece]:
    folder = tmp_path_factory.mktemp("cuda") / "m"
    return traced(make_checkpoint(folder, "qwen3", num_hidden_layers=3)).pieces


@pytest.mark.parametrize(
    ("index", "num_products", "num_kernels"),
    [
        # The first one indexes, too.
        (1, 4, 5),  # o, gate and up, down, qkv | norm, activation, norm, q with norm and RoPE, k
        (2, 3, 3),  # o, gate and up, down | norm, activation, norm
    ],
)
def test_a_gpu_runs_a_few_fused_kernels_between_products_which_assemble_for_it(
    pieces, codes, tmp_path, index, num_products, num_kernels
):
    with pytest.raises(Exception, match="Written"):
        bundle.compile_bundle(on_gpu(pieces[index]), tmp_path / "piece")
    (code,) = codes
    function = code[code.index("def call(args):") :]
    assert function.count("extern_kernels.") == num_products
    assert function.count(".run(") == num_kernels
    assert "u0 = arg" in function  # any number of tokens
    for name, source in re.findall(r"async_compile\.triton\('(\w+)', '{3}(.*?)'{3}", code, re.S):
        assert "'batch_invariant': True" in source
        assert assembled(name, source, tmp_path).stack_bytes == 0


def assembled(name: str, source: str, folder: Path) -> Any:
    """The kernel compiled for the GPU, without Inductor's launcher around it."""
    (signature,) = re.findall(r"'signature': (\{.*?\})", source)
    types = {name: kind for name, kind in eval(signature).items() if kind != "constexpr"}
    blocks = re.findall(r"(\w+) : tl\.constexpr", source)
    source = re.sub(r"@triton_heuristics.*?(?=@triton\.jit)", "", source, flags=re.S)
    path = folder / f"{name[:40]}.py"
    path.write_text(source.replace("triton_helpers.set_driver_to_gpu()", ""))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return compile_for(90, getattr(module, name), types, dict.fromkeys(blocks, 16))
