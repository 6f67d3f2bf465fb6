"""The FlashInfer backend on a torch model of FlashInfer, against the reference backend."""

import dataclasses
import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from nano.attention import flashinfer_backend
from nano.attention.backend import PAD_SLOT, AttentionMetadata, AttentionSetup, GraphSupport
from nano.attention.flashinfer_backend import FlashInferBackend
from nano.attention.reference_backend import ReferenceBackend
from nano.attention.select import select_backend
from nano.attention.torch_backend import TorchBackend
from nano.config import EngineConfig, KVSplit
from nano.errors import ConfigError
from nano.kv_spec import LayerKVSpec
from tests.attention.flashinfer_model import DecodeWrapper, Misuse, ModelRuntime
from tests.attention.sequences import Ranges, Sequences

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SPEC = LayerKVSpec("layer", num_kv_heads=2, head_dim=64, dtype="bfloat16")
FLOAT16 = dataclasses.replace(SPEC, dtype="float16")
FLOAT8 = dataclasses.replace(SPEC, dtype="float8_e4m3fn")
NUM_HEADS = 6
AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)
# (computed, scheduled): decode, verification, first chunk, later chunk, whole prompt, one token
MIX = [(7, 1), (40, 1), (12, 4), (0, 9), (16, 16), (0, 33), (0, 1), (60, 5)]


class Pair:
    """The same sequences behind FlashInfer's model and behind the reference, rounded alike."""

    def __init__(
        self,
        lengths: list[int],
        spec: LayerKVSpec = SPEC,
        block_size: int = 16,
        num_heads: int = NUM_HEADS,
        capability: tuple[int, int] = HOPPER,
        kv_split: KVSplit = "scheduler",
    ):
        self.dtype = torch.float16 if spec.dtype == "float16" else torch.bfloat16
        self.runtime = ModelRuntime(capability)
        self.spec, self.block_size = spec, block_size

        def make(block_size: int, scale: float) -> FlashInferBackend:
            setup = AttentionSetup(block_size, spec, num_heads, self.dtype, CPU, kv_split)
            return FlashInferBackend(setup, self.runtime)

        self.ours = Sequences(lengths, make, spec, block_size, num_heads)  # type: ignore[arg-type]
        self.ours.dtype = self.dtype
        exact = dataclasses.replace(spec, dtype="float64")
        self.reference = Sequences(lengths, ReferenceBackend, exact, block_size, num_heads)
        cached = self.ours.cache.dtype
        self.reference.q = [x.to(self.dtype).double() for x in self.reference.q]
        for x in (self.reference.k, self.reference.v):
            x[:] = [part.to(self.dtype).to(cached).double() for part in x]

    @property
    def backend(self) -> FlashInferBackend:
        backend = self.ours.backend
        assert isinstance(backend, FlashInferBackend)
        return backend

    def assert_equal(self, out: Tensor, wanted: Tensor) -> None:
        """Up to the rounding of `out`."""
        close = 2 * torch.finfo(self.dtype).eps
        torch.testing.assert_close(out.double(), wanted, rtol=close, atol=close / 4)

    def step(self, ranges: Ranges, num_padding: int = 0) -> Tensor:
        """Both compute a step; the output, padding rows last."""
        out = self.ours.step(ranges, num_padding)
        wanted = self.reference.step(ranges)
        self.assert_equal(out[: len(wanted)], wanted)
        return out

    def start(self, computed: list[int]) -> None:
        """Compute the first tokens of each request."""
        self.step(sorted(((i, 0, n) for i, n in enumerate(computed)), key=lambda entry: entry[2]))

    def graph_metadata(
        self, ranges: Ranges, num_requests: int, max_blocks: int
    ) -> AttentionMetadata:
        """A uniform step as it is given to `plan_graph`."""
        query_len = ranges[0][2] - ranges[0][1] if ranges else 1
        table = torch.zeros(num_requests, max_blocks, dtype=torch.int32)
        slots = torch.full((num_requests * query_len,), PAD_SLOT)
        for row, (request, start, end) in enumerate(ranges):
            blocks = torch.tensor(self.ours.blocks[request])
            table[row, : len(blocks)] = blocks
            at = torch.arange(start, end)
            slots[row * query_len : (row + 1) * query_len] = (
                blocks[at // self.block_size] * self.block_size + at % self.block_size
            )
        counts = [end - start for _, start, end in ranges]
        return AttentionMetadata(
            num_requests=len(ranges),
            num_tokens=sum(counts),
            max_query_len=query_len,
            max_seq_len=max((end for *_, end in ranges), default=0),
            num_decode_requests=counts.count(1),
            query_start_loc=np.cumsum([0, *counts]).astype(np.int32),
            seq_lens=np.array([end for *_, end in ranges], np.int32),
            block_table=table,
            slot_mapping=slots,
        )

    def num_written(self) -> int:
        """Numbers in the pages of blocks; all is NaN at first."""
        return int((~self.ours.cache[1:].float().isnan()).sum())

    def num_expected(self, lengths: list[int]) -> int:
        return sum(lengths) * 2 * self.spec.num_kv_heads * self.spec.head_dim


def ragged(**options: object) -> tuple[Pair, Ranges]:
    """The sequences of MIX with what is computed already in the cache, and their next step."""
    shape = sorted(MIX, key=lambda request: request[1])
    pair = Pair([sum(entry) for entry in shape], **options)  # type: ignore[arg-type]
    earlier = [(i, 0, computed) for i, (computed, _) in enumerate(shape) if computed]
    pair.step(sorted(earlier, key=lambda entry: entry[2]))
    return pair, [(i, c, c + s) for i, (c, s) in enumerate(shape)]


@pytest.mark.parametrize(
    ("spec", "capability"),
    [(SPEC, AMPERE), (FLOAT16, HOPPER), (FLOAT8, HOPPER), (SPEC, BLACKWELL)],
    ids=lambda value: getattr(value, "dtype", None),
)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_ragged_mixes_equal_the_reference(spec, capability, block_size):
    pair, ranges = ragged(spec=spec, capability=capability, block_size=block_size)
    pair.step(ranges)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (8, 1)])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_every_head_size_and_group_equals_the_reference(num_heads, num_kv_heads, head_dim):
    spec = LayerKVSpec("layer", num_kv_heads, head_dim, "bfloat16")
    pair = Pair([5, 20, 33], spec, num_heads=num_heads)
    pair.start([4, 17, 30])
    pair.step([(0, 4, 5), (1, 17, 20), (2, 30, 33)])


@pytest.mark.parametrize("spec", [SPEC, FLOAT8], ids=lambda spec: spec.dtype)
def test_padding_rows_and_foreign_blocks_are_untouched(spec):
    pair, ranges = ragged(spec=spec)
    out = pair.step(ranges, num_padding=5)
    assert (out[-5:] == 77.0).all()
    assert not out[:-5].isnan().any()
    assert pair.num_written() == pair.num_expected([end for *_, end in ranges])


def test_a_request_reads_kv_that_another_writes_in_the_same_step():
    pair = Pair([6, 8], block_size=4)
    for sequences in (pair.ours, pair.reference):
        for x in (sequences.k, sequences.v):
            x[0][:4] = x[1][:4]
        sequences.blocks[0][0] = sequences.blocks[1][0]  # shared; only request 1 computes it
    pair.step([(0, 4, 6), (1, 0, 8)])


def test_tokens_may_be_views_into_a_fused_projection():
    pair = Pair([5])
    ranges = [(0, 0, 5)]
    wanted = pair.step(ranges)
    parts = [pair.ours.gather(x, ranges) for x in (pair.ours.q, pair.ours.k, pair.ours.v)]
    fused = torch.cat([part.flatten(1) for part in parts], 1)
    sizes = [part[0].numel() for part in parts]
    views = [part.unflatten(1, (-1, 64)) for part in fused.split(sizes, 1)]
    out = torch.empty_like(parts[0])
    pair.ours.plan(ranges)
    pair.backend.forward(*views, pair.ours.cache, out)
    assert torch.equal(out, wanted)


def graph_step(pair: Pair, ranges: Ranges, num_requests: int) -> Tensor:
    """Plan and compute a step for the graph of `num_requests`; the rows of its requests."""
    metadata = pair.graph_metadata(ranges, num_requests, max_blocks=12)
    pair.backend.plan_graph(metadata, num_requests)
    num_padding = len(metadata.slot_mapping) - metadata.num_tokens
    sequences = pair.ours
    q, k, v = (
        sequences.gather(x, ranges, num_padding) for x in (sequences.q, sequences.k, sequences.v)
    )
    out = torch.full_like(q, 77.0)
    pair.backend.forward(q, k, v, sequences.cache, out)
    return out[: metadata.num_tokens]


@pytest.mark.parametrize("spec", [SPEC, FLOAT16, FLOAT8], ids=lambda spec: spec.dtype)
@pytest.mark.parametrize("block_size", [4, 16])
def test_uniform_steps_for_graphs_equal_the_reference_and_padding_writes_nothing(spec, block_size):
    pair = Pair([40, 28, 16], spec, block_size)
    computed = [25, 14, 3]
    pair.start(computed)
    for query_len in (5, 1):
        pair.backend.reserve_graph(4, query_len, max_blocks=12)
    for query_len in (1, 5, 1):  # decode, verify four drafts, decode
        ranges = [(i, n, n + query_len) for i, n in enumerate(computed)]
        wanted = pair.reference.step(ranges)
        pair.assert_equal(graph_step(pair, ranges, 4), wanted)
        computed = [n + query_len for n in computed]
        ranges = [(i, n, n + 1) for i, n in enumerate(computed)][:1]  # a step in between, eagerly
        pair.step(ranges)
        computed[0] += 1
    assert pair.num_written() == pair.num_expected(computed)


def test_a_replayed_graph_reads_what_was_planned_last():
    """Capture is the launches of one forward; replay is the same launches on the same tensors."""
    pair = Pair([40, 30, 20])
    pair.start([30, 20, 10])
    backend, runtime = pair.backend, pair.runtime
    backend.reserve_graph(3, 2, max_blocks=12)
    launches: list[Callable[[], object]] = []

    def recorded(function: Callable[..., object]) -> Callable[..., object]:
        def record(*args: object, **options: object) -> object:
            launches.append(lambda: function(*args, **options))
            return launches[-1]()

        return record

    append = runtime.flashinfer.append_paged_kv_cache
    runtime.flashinfer.append_paged_kv_cache = recorded(append)
    wrapper = runtime.wrappers[-1]
    wrapper.run = recorded(wrapper.run)  # type: ignore[method-assign]

    q = torch.zeros(6, NUM_HEADS, 64, dtype=pair.dtype)
    k, v = (torch.zeros(6, 2, 64, dtype=pair.dtype) for _ in range(2))
    out = torch.zeros_like(q)
    nobody = dataclasses.replace(
        pair.graph_metadata([], 3, 12), max_query_len=2, slot_mapping=torch.full((6,), PAD_SLOT)
    )
    backend.plan_graph(nobody, 3)
    backend.forward(q, k, v, pair.ours.cache, out)  # captured: padding alone
    assert len(launches) == 2
    assert pair.num_written() == pair.num_expected([30, 20, 10])

    for ranges in (
        [(1, 20, 22), (0, 30, 32), (2, 10, 12)],
        [(2, 12, 14), (0, 32, 34)],  # one has left
    ):
        backend.plan(nobody_eager(pair))  # whatever else is planned in between
        backend.plan_graph(pair.graph_metadata(ranges, 3, 12), 3)
        for static, x in ((q, pair.ours.q), (k, pair.ours.k), (v, pair.ours.v)):
            static[: 2 * len(ranges)] = pair.ours.gather(x, ranges)
        for launch in launches:
            launch()
        pair.assert_equal(out[: 2 * len(ranges)], pair.reference.step(ranges))
    assert pair.num_written() == pair.num_expected([34, 22, 14])


def nobody_eager(pair: Pair) -> AttentionMetadata:
    """A step of one token that is computed again."""
    return pair.graph_metadata([(0, 0, 1)], 1, 12)


def test_float8_rounds_to_three_bits_saturates_and_keeps_nan():
    pair = Pair([3], FLOAT8)
    k = torch.zeros(3, 2, 64, dtype=torch.bfloat16)
    k[0, 0, :5] = torch.tensor([1.0625, 1.1, -1000.0, float("inf"), float("nan")])
    pair.ours.plan([(0, 0, 3)])
    q = torch.zeros(3, NUM_HEADS, 64, dtype=torch.bfloat16)
    pair.backend.forward(q, k, k, pair.ours.cache, torch.empty_like(q))
    page = pair.ours.cache[1 + pair.ours.blocks[0][0]].float()  # [2, KVH, P, D]
    wanted = torch.tensor([1.0, 1.125, -448.0, 448.0, float("nan")])
    torch.testing.assert_close(page[0, 0, 0, :5], wanted, equal_nan=True)


@pytest.mark.parametrize(
    ("spec", "capability", "layout", "shape"),
    [
        (SPEC, AMPERE, "NHD", (8, 2, 16, 2, 64)),
        (SPEC, HOPPER, "NHD", (8, 2, 16, 2, 64)),
        (SPEC, BLACKWELL, "HND", (8, 2, 2, 16, 64)),
        (FLOAT8, HOPPER, "HND", (8, 2, 2, 16, 64)),
    ],
)
def test_the_layout_follows_gpu_and_dtype_and_costs_one_block_more(spec, capability, layout, shape):
    backend = Pair([1], spec, capability=capability).backend
    assert backend.kv_layout == layout
    assert backend.kv_cache_shape(spec, 7) == shape
    cache = torch.empty(shape, dtype=getattr(torch, spec.dtype))
    assert cache.nbytes == 8 * spec.bytes_per_block(16)


@pytest.mark.parametrize(
    ("kv_split", "told"),
    [("scheduler", (None, False)), ("none", (None, True)), ("fixed", (64, False))],
)
def test_how_kv_is_split_is_told_to_every_wrapper(kv_split, told):
    pair = Pair([4], kv_split=kv_split)
    pair.start([4])
    wrappers = pair.runtime.wrappers
    assert pair.backend.numerics_name == f"flashinfer, kv split {kv_split}"
    if kv_split == "fixed":  # a graph has a fixed number of thread blocks
        assert pair.backend.graph_support == GraphSupport.PIECEWISE
    else:
        assert pair.backend.graph_support == GraphSupport.FULL_DECODE
        pair.backend.reserve_graph(1, 1, max_blocks=1)
        graph_step(pair, [(0, 3, 4)], 1)
        assert len(wrappers) == 2
    assert all(wrapper.planned is not None for wrapper in wrappers)
    assert {wrapper.planned["split"] for wrapper in wrappers if wrapper.planned} == {told}


def test_graphs_share_workspaces_and_the_memory_of_page_tables():
    pair = Pair([1])
    for size in (8, 4, 4, 2):
        pair.backend.reserve_graph(size, 1, max_blocks=12)
    prefill, *decoding = pair.runtime.wrappers
    assert len(decoding) == 3  # one size was there already
    assert {w.float_workspace.data_ptr() for w in decoding} == {prefill.float_workspace.data_ptr()}
    assert len({w.int_workspace.data_ptr() for w in decoding}) == 1
    assert decoding[0].int_workspace.nbytes == 2**20
    assert len({w.buffers[1].data_ptr() for w in decoding}) == 1
    assert len({w.buffers[0].data_ptr() for w in decoding}) == 3
    pair.backend.reserve_graph(16, 1, max_blocks=12)  # larger than any before: its own
    assert pair.runtime.wrappers[-1].buffers[1].numel() == 16 * 12


def test_a_graph_is_planned_for_uniform_steps_only():
    pair = Pair([20, 20])
    pair.backend.reserve_graph(2, 5, max_blocks=12)
    mixed = pair.graph_metadata([(0, 0, 5), (1, 0, 5)], 2, 12)
    mixed.num_tokens = 9
    with pytest.raises(AssertionError, match="query lengths differ"):
        pair.backend.plan_graph(mixed, 2)


@pytest.mark.parametrize(
    ("spec", "dtype", "reason"),
    [
        (SPEC, torch.float32, "computes in bfloat16 or float16, not in torch.float32"),
        (FLOAT16, torch.bfloat16, "no kernel for torch.bfloat16 over a torch.float16 cache"),
    ],
)
def test_models_of_other_dtypes_are_refused(spec, dtype, reason):
    with pytest.raises(ConfigError, match=reason):
        FlashInferBackend(AttentionSetup(16, spec, 6, dtype, CPU), ModelRuntime())


@pytest.fixture
def machine(monkeypatch):
    """A machine as the test likes it."""

    def make(capability: tuple[int, int] | None = HOPPER, installed: str | None = "0.7.4") -> None:
        monkeypatch.setattr(flashinfer_backend, "_capability", lambda device: capability)
        monkeypatch.setattr(flashinfer_backend, "_installed_version", lambda: installed)

    return make


@pytest.mark.parametrize(
    ("capability", "installed", "changes", "device", "reason"),
    [
        (HOPPER, "0.7.4", {}, CUDA, None),
        (AMPERE, "0.7.0.post1", {"dtype": "float8_e4m3fn", "head_dim": 256}, CUDA, None),
        (HOPPER, "0.7.4", {}, CPU, "it runs on cuda only, not on cpu"),
        (None, "0.7.4", {}, CUDA, "torch finds no CUDA device"),
        (
            (7, 5),
            "0.7.4",
            {},
            CUDA,
            "it needs compute capability 8.0 or higher, and this GPU has 7.5",
        ),
        (HOPPER, None, {}, CUDA, "flashinfer-python 0.7 is not installed (see nano-engine[cuda])"),
        (HOPPER, "0.6.18", {}, CUDA, "it needs flashinfer-python 0.7, and 0.6.18 is installed"),
        (HOPPER, "0.70.1", {}, CUDA, "it needs flashinfer-python 0.7, and 0.70.1 is installed"),
        (HOPPER, "0.7.4", {"head_dim": 80}, CUDA, "it needs a head_dim of 64, 128 or 256, not 80"),
        (
            HOPPER,
            "0.7.4",
            {"dtype": "float32"},
            CUDA,
            "it caches bfloat16, float16 or float8_e4m3fn only, not float32",
        ),
    ],
)
def test_what_it_cannot_serve_is_refused_in_words(
    machine, capability, installed, changes, device, reason
):
    machine(capability, installed)
    spec = dataclasses.replace(SPEC, **changes)
    assert FlashInferBackend.unsupported_reason(spec, device) == reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_by_itself():
    assert FlashInferBackend.unsupported_reason(SPEC, CUDA) == "torch finds no CUDA device"


def test_on_cuda_the_first_that_serves_is_chosen_and_refusals_are_logged(
    machine, monkeypatch, caplog
):
    from nano.attention.triton_backend import TritonBackend

    caplog.set_level(logging.INFO)
    machine()
    assert select_backend("auto", [SPEC], CUDA) is FlashInferBackend
    assert "attention backend: flashinfer (first choice on cuda)" in caplog.text

    machine(installed=None)
    monkeypatch.setattr(TritonBackend, "unsupported_reason", lambda spec, device: None)
    assert select_backend("auto", [SPEC], CUDA) is TritonBackend
    assert "attention backend: triton (flashinfer: flashinfer-python 0.7 is not" in caplog.text

    monkeypatch.setattr(TritonBackend, "unsupported_reason", lambda spec, device: "no luck")
    assert select_backend("auto", [SPEC], CUDA) is TorchBackend
    assert "; triton: no luck)" in caplog.text
    with pytest.raises(ConfigError, match=r"flashinfer: flashinfer-python 0\.7 is not installed"):
        select_backend("flashinfer", [SPEC], CUDA)


@pytest.mark.parametrize("name", ["flashinfer", "triton"])
def test_a_gpu_backend_can_be_asked_for_and_is_refused_on_a_cpu(name):
    config = EngineConfig.from_args({"attention_backend": name})
    with pytest.raises(ConfigError, match=f"{name}: it runs on cuda only, not on cpu"):
        select_backend(config.attention.backend, [SPEC], CPU)


def test_a_backend_is_made_for_a_model(monkeypatch):
    monkeypatch.setattr(flashinfer_backend, "CudaRuntime", lambda device: ModelRuntime())
    setup = AttentionSetup(16, SPEC, 6, torch.bfloat16, CPU)
    backend = FlashInferBackend.for_model(setup)
    assert (backend.scale, backend.numerics_name) == (64**-0.5, "flashinfer, kv split scheduler")
    reference = ReferenceBackend.for_model(setup)
    assert (reference.block_size, reference.scale) == (16, 64**-0.5)
    assert reference.numerics_name == "reference"
    split = dataclasses.replace(setup, kv_split="none")
    assert FlashInferBackend.for_model(split).numerics_name == "flashinfer, kv split none"
    with pytest.raises(ConfigError, match="attention_kv_split=none is for flashinfer; reference"):
        ReferenceBackend.for_model(split)


class Calls:
    """Correct calls of FlashInfer's model, one request of 20 tokens in two pages; to be spoilt."""

    def __init__(self) -> None:
        self.runtime = ModelRuntime()
        self.library = self.runtime.flashinfer
        self.workspace = torch.empty(64, dtype=torch.uint8)
        self.cache = torch.zeros(3, 2, 16, 2, 64, dtype=torch.bfloat16)
        self.kinds = {
            "num_qo_heads": 6,
            "num_kv_heads": 2,
            "page_size": 16,
            "q_data_type": torch.bfloat16,
        }
        self.prefill = self.library.BatchPrefillWithPagedKVCacheWrapper(self.workspace)
        self.decode = self.make_decode()

    def make_decode(self, num_indices: int = 4, **options: object) -> DecodeWrapper:
        buffers = {
            "paged_kv_indptr_buffer": self.device(0, 0),
            "paged_kv_indices_buffer": torch.zeros(num_indices, dtype=torch.int32),
            "paged_kv_last_page_len_buffer": self.device(0),
        }
        options = {"use_cuda_graph": True, "use_tensor_cores": True, **buffers, **options}
        wrapper = self.library.BatchDecodeWithPagedKVCacheWrapper(self.workspace, **options)
        assert isinstance(wrapper, DecodeWrapper)
        return wrapper

    def host(self, *values: int, dtype: type = np.int32) -> Tensor:
        return self.runtime.pinned(np.array(values, dtype))

    def device(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    def rows(self, num_rows: int, num_heads: int = 6) -> Tensor:
        return torch.zeros(num_rows, num_heads, 64, dtype=torch.bfloat16)

    def plan_prefill(self, *, indices: Tensor | None = None, **spoilt: object) -> None:
        given: dict[str, object] = {
            "qo_indptr": self.host(0, 5),
            "paged_kv_indptr": self.host(0, 2),
            "paged_kv_indices": self.device(2, 1) if indices is None else indices,
            "paged_kv_last_page_len": self.host(4),
            "head_dim_qk": 64,
            "causal": True,
        }
        self.prefill.plan(**(given | self.kinds | spoilt))

    def plan_decode(self, wrapper: DecodeWrapper | None = None, **spoilt: object) -> None:
        self.runtime.is_copying = False
        given: dict[str, object] = {
            "indptr": self.host(0, 2),
            "indices": self.device(2, 1),
            "last_page_len": self.host(4),
            "head_dim": 64,
            "q_len_per_req": 5,
        }
        (wrapper or self.decode).plan(**(given | self.kinds | spoilt))

    def append(self, **spoilt: object) -> None:
        given: dict[str, object] = {
            "append_key": self.rows(2, 2),
            "append_value": self.rows(2, 2),
            "batch_indices": self.device(0, 0),
            "positions": self.device(18, 19),
            "paged_kv_cache": self.cache,
            "kv_indices": self.device(2, 1),
            "kv_indptr": self.device(0, 2),
            "kv_last_page_len": self.device(4),
        }
        self.library.append_paged_kv_cache(**(given | spoilt))

    def run_prefill(self, **spoilt: object) -> None:
        self.plan_prefill()
        self.prefill.run(**({"q": self.rows(5), "paged_kv_cache": self.cache} | spoilt))


def test_the_model_takes_correct_calls():
    calls = Calls()
    calls.append()
    calls.run_prefill()
    calls.plan_decode()
    calls.decode.run(calls.rows(5), calls.cache)


MISUSES: dict[str, Callable[[Calls], object]] = {
    "qo_indptr must be int32": lambda c: c.plan_prefill(qo_indptr=c.host(0, 5, dtype=np.int64)),
    "qo_indptr must be .R": lambda c: c.plan_prefill(qo_indptr=c.host(0, 2, 5)),
    "qo_indptr must rise": lambda c: c.plan_prefill(qo_indptr=c.host(1, 5)),
    "kv_indptr must rise": lambda c: c.plan_prefill(paged_kv_indptr=c.host(2, 0)),
    "copy qo_indptr to the host": lambda c: c.plan_prefill(qo_indptr=c.device(0, 5)),
    "copy last_page_len to": lambda c: c.plan_prefill(paged_kv_last_page_len=c.device(4)),
    "must be on the device": lambda c: c.plan_prefill(indices=c.host(2, 1)),
    "kv_indices must be int32": lambda c: c.plan_prefill(indices=torch.tensor([2, 1])),
    "kv_indices must be .indptr": lambda c: c.plan_prefill(indices=c.device(2, 1, 0)),
    "last_page_len must be in 1..16": lambda c: c.plan_prefill(paged_kv_last_page_len=c.host(0)),
    "in 1..16: .*17": lambda c: c.plan_prefill(paged_kv_last_page_len=c.host(17)),
    "KV must include": lambda c: c.plan_prefill(qo_indptr=c.host(0, 21)),
    "max_token_per_sequence": lambda c: c.plan_prefill(max_token_per_sequence=4),
    "only fa2": lambda c: c.plan_prefill(fixed_split_size=4),
    "H must be a multiple": lambda c: c.plan_prefill(num_qo_heads=5),
    "no kernel for head_dim": lambda c: c.plan_prefill(head_dim_qk=80),
    "no kernel for q of": lambda c: c.plan_prefill(q_data_type=torch.float32),
    "over torch.float16": lambda c: c.plan_prefill(kv_data_type=torch.float16),
    "still being copied": lambda c: (c.plan_prefill(), c.plan_prefill()),
    "run before plan": lambda c: c.prefill.run(c.rows(5), c.cache),
    "q is torch.bfloat16, planned was torch.float16": lambda c: (
        c.kinds.pop("q_data_type"),  # and the default is float16
        c.run_prefill(),
    ),
    "q as planned": lambda c: c.run_prefill(q=c.rows(6)),
    "cache as planned": lambda c: c.run_prefill(paged_kv_cache=c.cache.transpose(2, 3)),
    "the cache is torch.float16": lambda c: c.run_prefill(paged_kv_cache=c.cache.half()),
    "of 2 pages|pages tensor": lambda c: c.run_prefill(paged_kv_cache=c.cache[:2]),
    "out must be as q": lambda c: c.run_prefill(out=c.rows(5).float()),
    "graph mode needs three": lambda c: c.make_decode(paged_kv_indices_buffer=None),
    "indptr buffer must be": lambda c: c.make_decode(paged_kv_indptr_buffer=c.device(0)),
    "buffers must be int32": lambda c: c.make_decode(paged_kv_indices_buffer=torch.zeros(4)),
    "do not fit their buffer": lambda c: c.plan_decode(c.make_decode(num_indices=1)),
    "batch size of a graph is fixed": lambda c: c.plan_decode(last_page_len=c.host(4, 4)),
    "a graph holds another plan": lambda c: (c.plan_decode(), c.plan_decode(q_len_per_req=1)),
    "needs tensor cores": lambda c: c.plan_decode(c.make_decode(use_tensor_cores=False)),
    "which has no q_len_per_req": lambda c: c.plan_decode(kv_data_type=torch.float8_e4m3fn),
    "other thread blocks": lambda c: c.plan_decode(fixed_split_size=4),
    "would see no KV": lambda c: c.plan_decode(q_len_per_req=21),
    "belong to no request": lambda c: c.append(batch_indices=c.device(0, -1)),
    "without a page": lambda c: c.append(positions=c.device(19, 20)),
    "an entry for each row": lambda c: c.append(positions=c.device(19)),
    "positions must be int32": lambda c: c.append(positions=torch.tensor([18, 19])),
    "the dtype must be the cache's": lambda c: c.append(append_key=c.rows(2, 2).half()),
    "must be those of the cache": lambda c: c.append(append_key=c.rows(2, 3)),
}


@pytest.mark.parametrize("complaint", MISUSES)
def test_the_model_catches(complaint):
    with pytest.raises(Misuse, match=complaint):
        MISUSES[complaint](Calls())
