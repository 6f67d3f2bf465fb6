"""A torch model of FlashInfer 0.7 for machines without a GPU, after its documentation.

It computes attention by the documented formula in float32, and insists on everything that the
documentation asks of a caller and that its kernels, which read raw memory, would not notice. Host
and device being one here, it tells them apart by who made a tensor: `ModelRuntime.pinned`.

R requests, Q rows of a request, S tokens of its KV, H query heads, KVH key/value heads, D head dim.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
FLOAT8 = torch.float8_e4m3fn


class Misuse(AssertionError):
    """What FlashInfer would refuse, or answer with garbage."""


def demand(condition: object, complaint: str) -> None:
    if not condition:
        raise Misuse(complaint)


class ModelRuntime:
    """What `CudaRuntime` is on a GPU. Keeps count of copies from pinned memory."""

    def __init__(self, capability: tuple[int, int] = (9, 0)):
        self.capability = capability
        self.is_copying = False  # a plan's copies were queued, and nobody has waited for them
        self.num_plans = 0
        self.wrappers: list[Wrapper] = []
        self._host: list[Tensor] = []
        self.flashinfer = SimpleNamespace(
            BatchPrefillWithPagedKVCacheWrapper=lambda *a, **k: PrefillWrapper(self, *a, **k),
            BatchDecodeWithPagedKVCacheWrapper=lambda *a, **k: DecodeWrapper(self, *a, **k),
            append_paged_kv_cache=self.append_paged_kv_cache,
        )

    def pinned(self, array: np.ndarray) -> Tensor:
        self._host.append(torch.from_numpy(array.copy()))
        return self._host[-1]

    def is_host(self, x: Tensor) -> bool:
        return any(
            x.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
            for held in self._host
        )

    def new_event(self) -> "ModelEvent":
        return ModelEvent(self)

    def append_paged_kv_cache(
        self,
        append_key: Tensor,
        append_value: Tensor,
        batch_indices: Tensor,
        positions: Tensor,
        paged_kv_cache: Tensor,
        kv_indices: Tensor,
        kv_indptr: Tensor,
        kv_last_page_len: Tensor,
        kv_layout: str = "NHD",
    ) -> None:
        """append_key, append_value: [T, KVH, D] in the dtype of the cache."""
        cache = as_nhd(paged_kv_cache, kv_layout)
        page_size = cache.shape[2]
        kv_lens = check_page_table(kv_indptr, kv_indices, kv_last_page_len, page_size)
        for name, x in (("batch_indices", batch_indices), ("positions", positions)):
            demand(x.dtype == torch.int32 and x.is_contiguous(), f"{name} must be int32")
            demand(x.shape == append_key.shape[:1], f"{name} must have an entry for each row")
        demand(cache.shape[-1] in (64, 128, 256, 512), "head_dim of append")
        for x in (append_key, append_value):
            demand(x.shape[1:] == cache.shape[3:], "heads and head_dim must be those of the cache")
            demand(x.dtype == cache.dtype, "append copies bytes: the dtype must be the cache's")
            demand(x.stride(-1) == 1, "rows must be contiguous")
        is_owned = (batch_indices >= 0) & (batch_indices < len(kv_lens))
        demand(is_owned.all(), f"rows that belong to no request: {batch_indices}")
        has_place = (positions >= 0) & (positions < torch.tensor(kv_lens)[batch_indices])
        demand(has_place.all(), f"positions without a page: {positions}")
        pages = kv_indices[kv_indptr[batch_indices] + positions // page_size]
        demand(((pages >= 0) & (pages < len(cache))).all(), f"of {len(cache)} pages: {pages}")
        held = cache.view(torch.uint8) if cache.dtype == FLOAT8 else cache
        for which, x in enumerate((append_key, append_value)):
            held[pages, which, positions % page_size] = x.view(held.dtype)


@dataclass
class ModelEvent:
    runtime: ModelRuntime
    num_plans: int = -1  # when it was recorded

    def record(self) -> None:
        self.num_plans = self.runtime.num_plans

    def synchronize(self) -> None:
        if self.num_plans == self.runtime.num_plans:
            self.runtime.is_copying = False


class Wrapper:
    """What both wrappers share. `planned` is None before the first plan."""

    def __init__(self, runtime: ModelRuntime, workspace: Tensor, kv_layout: str, backend: str):
        demand(workspace.dtype == torch.uint8, "the workspace is bytes")
        demand(workspace.data_ptr() % 16 == 0, "the workspace must be aligned to 16 bytes")
        demand(kv_layout in ("NHD", "HND"), kv_layout)
        self.runtime, self.kv_layout, self.backend = runtime, kv_layout, backend
        self.float_workspace, self.int_workspace = (
            workspace,
            torch.empty(8 << 20, dtype=torch.uint8),
        )
        self.planned: dict[str, object] | None = None
        runtime.wrappers.append(self)

    def reset_workspace_buffer(self, float_workspace: Tensor, int_workspace: Tensor) -> None:
        for x in (float_workspace, int_workspace):
            demand(x.dtype == torch.uint8 and x.data_ptr() % 16 == 0, "workspace")
        self.float_workspace, self.int_workspace = float_workspace, int_workspace

    def begin_plan(self, on_host: dict[str, Tensor], kv_indices: Tensor) -> None:
        demand(
            not self.runtime.is_copying,
            "plan writes the pinned workspace, from which the plan before is still being copied",
        )
        for name, x in on_host.items():
            demand(self.runtime.is_host(x), f"plan waits for the device to copy {name} to the host")
        demand(not self.runtime.is_host(kv_indices), "kv_indices must be on the device")
        self.runtime.is_copying = True
        self.runtime.num_plans += 1

    def check_kinds(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_data_type: str | torch.dtype,
        kv_data_type: torch.dtype | None,
        o_data_type: torch.dtype | None,
    ) -> None:
        q_dtype = DTYPES[q_data_type] if isinstance(q_data_type, str) else q_data_type
        kv_dtype = q_dtype if kv_data_type is None else kv_data_type
        demand(num_qo_heads % num_kv_heads == 0, "H must be a multiple of KVH")
        demand(head_dim in (64, 128, 256), f"no kernel for head_dim {head_dim}")
        demand(q_dtype in DTYPES.values(), f"no kernel for q of {q_dtype}")
        demand(kv_dtype in (q_dtype, FLOAT8), f"no kernel for {q_dtype} over {kv_dtype}")
        self.kinds = (num_qo_heads, num_kv_heads, head_dim, q_dtype, kv_dtype)
        self.o_dtype = q_dtype if o_data_type is None else o_data_type

    def run(self, q: Tensor, paged_kv_cache: Tensor, *, out: Tensor | None = None) -> Tensor:
        """q, out: [rows, H, D]."""
        demand(self.planned is not None, "run before plan")
        assert self.planned is not None
        num_heads, num_kv_heads, head_dim, q_dtype, kv_dtype = self.kinds
        qo_indptr, kv_indptr, kv_indices, last_page_len = self.table()
        cache = as_nhd(paged_kv_cache, self.kv_layout)
        page_size = self.planned["page_size"]
        demand(cache.shape[1:] == (2, page_size, num_kv_heads, head_dim), "cache as planned")
        demand(q.shape == (int(qo_indptr[-1]), num_heads, head_dim), "q as planned")
        demand(q.dtype == q_dtype, f"q is {q.dtype}, planned was {q_dtype}")
        demand(cache.dtype == kv_dtype, f"the cache is {cache.dtype}, planned was {kv_dtype}")
        demand(q.stride(-1) == 1, "rows of q must be contiguous")
        out = torch.empty_like(q, dtype=self.o_dtype) if out is None else out
        demand(out.shape == q.shape and out.dtype == self.o_dtype, "out must be as q")
        demand(out.is_contiguous(), "out must be contiguous")
        scale = self.planned["sm_scale"] or head_dim**-0.5
        kv_lens = check_page_table(kv_indptr, kv_indices, last_page_len, page_size)
        for request, kv_len in enumerate(kv_lens):
            pages = kv_indices[int(kv_indptr[request]) : int(kv_indptr[request + 1])].long()
            demand(((pages >= 0) & (pages < len(cache))).all(), f"pages {pages}")
            k, v = (  # [S, H, D]
                cache[pages, which]
                .flatten(0, 1)[:kv_len]
                .float()
                .repeat_interleave(num_heads // num_kv_heads, dim=1)
                for which in (0, 1)
            )
            rows = slice(int(qo_indptr[request]), int(qo_indptr[request + 1]))
            num_rows = rows.stop - rows.start
            scores = torch.einsum("qhd,shd->hqs", q[rows].float(), k) * scale
            if self.planned["causal"]:
                sees = torch.ones(num_rows, kv_len, dtype=torch.bool).tril(kv_len - num_rows)
                scores.masked_fill_(~sees, -torch.inf)
            out[rows] = torch.einsum("hqs,shd->qhd", scores.softmax(-1), v).to(out.dtype)
        return out

    def table(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """qo_indptr, kv_indptr, kv_indices, last_page_len, as the kernel reads them."""
        raise NotImplementedError


class PrefillWrapper(Wrapper):
    """Ragged queries. Only what it does without CUDA graphs."""

    def __init__(
        self,
        runtime: ModelRuntime,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        backend: str = "auto",
    ):
        super().__init__(runtime, float_workspace_buffer, kv_layout, backend)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
        max_token_per_sequence: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        self.begin_plan(
            {
                "qo_indptr": qo_indptr,
                "kv_indptr": paged_kv_indptr,
                "last_page_len": paged_kv_last_page_len,
            },
            paged_kv_indices,
        )
        self.check_kinds(
            num_qo_heads, num_kv_heads, head_dim_qk, q_data_type, kv_data_type, o_data_type
        )
        demand(
            self.backend == "fa2" or not (fixed_split_size or disable_split_kv),
            "only fa2 can be told how to split",
        )
        check_indptr("qo_indptr", qo_indptr, len(paged_kv_last_page_len))
        kv_lens = check_page_table(
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size
        )
        for request, num_rows in enumerate(qo_indptr.diff().tolist()):
            demand(num_rows <= kv_lens[request], "KV must include the step's own tokens")
        longest = int(qo_indptr.diff().max())
        demand(max_token_per_sequence in (None, longest), "max_token_per_sequence")
        self.planned = {
            "page_size": page_size,
            "causal": causal,
            "sm_scale": sm_scale,
            "split": (fixed_split_size, disable_split_kv),
        }
        given = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._table = tuple(x.clone() for x in given)

    def table(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self._table


class DecodeWrapper(Wrapper):
    """Equal query lengths, on tensor cores; in graph mode it reads the buffers it was given."""

    def __init__(
        self,
        runtime: ModelRuntime,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ):
        super().__init__(runtime, float_workspace_buffer, kv_layout, backend)
        demand(use_cuda_graph, "the model knows its graph mode only")
        buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        self.buffers = tuple(x for x in buffers if x is not None)
        demand(len(self.buffers) == 3, "graph mode needs three buffers")
        demand(all(x.dtype == torch.int32 for x in self.buffers), "buffers must be int32")
        indptr, _, last_page_len = self.buffers
        self.batch_size = len(last_page_len)
        demand(len(indptr) == self.batch_size + 1, "indptr buffer must be [R + 1]")
        self.use_tensor_cores = use_tensor_cores
        self.frozen: tuple[object, ...] | None = None

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        self.begin_plan({"indptr": indptr, "last_page_len": last_page_len}, indices)
        self.check_kinds(
            num_qo_heads, num_kv_heads, head_dim, q_data_type, kv_data_type, o_data_type
        )
        demand(len(last_page_len) == self.batch_size, "the batch size of a graph is fixed")
        demand(len(indices) <= len(self.buffers[1]), "indices do not fit their buffer")
        demand(fixed_split_size is None, "a fixed split may need other thread blocks than captured")
        demand(q_len_per_req >= 1, "q_len_per_req")
        if q_len_per_req > 1:
            demand(self.use_tensor_cores, "q_len_per_req > 1 needs tensor cores")
            demand(
                self.backend == "fa2" or self.kinds[4] != FLOAT8,
                "auto may choose fa3 for float8, which has no q_len_per_req",
            )
        kv_lens = check_page_table(indptr, indices, last_page_len, page_size)
        demand(min(kv_lens) >= q_len_per_req, "rows of a request would see no KV")
        frozen = (*self.kinds, page_size, sm_scale, disable_split_kv, q_len_per_req)
        demand(self.frozen in (None, frozen), "a graph holds another plan")
        self.frozen = frozen
        self.q_len = q_len_per_req
        for buffer, given in zip(self.buffers, (indptr, indices, last_page_len)):
            buffer[: len(given)].copy_(given)
        self.planned = {
            "page_size": page_size,
            "causal": q_len_per_req > 1,
            "sm_scale": sm_scale,
            "split": (fixed_split_size, disable_split_kv),
        }

    def table(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        qo_indptr = torch.arange(self.batch_size + 1, dtype=torch.int32) * self.q_len
        indptr, indices, last_page_len = self.buffers
        return qo_indptr, indptr, indices[: int(indptr[-1])], last_page_len


def as_nhd(cache: Tensor, kv_layout: str) -> Tensor:
    """A view [pages, 2, page_size, KVH, D]."""
    demand(cache.dim() == 5 and cache.shape[1] == 2, "the cache must be 5-D")
    demand(cache.stride(-1) == 1, "rows of the cache must be contiguous")
    return cache if kv_layout == "NHD" else cache.transpose(2, 3)


def check_indptr(name: str, indptr: Tensor, num_requests: int) -> None:
    demand(indptr.dtype == torch.int32, f"{name} must be int32")
    demand(indptr.shape == (num_requests + 1,), f"{name} must be [R + 1]")
    demand(indptr[0] == 0 and (indptr.diff() >= 0).all(), f"{name} must rise from 0")


def check_page_table(
    indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int
) -> list[int]:
    """The KV length of each request."""
    check_indptr("kv_indptr", indptr, len(last_page_len))
    demand(indices.dtype == torch.int32, "kv_indices must be int32")
    demand(len(indices) == int(indptr[-1]), "kv_indices must be [indptr[-1]]")
    demand(last_page_len.dtype == torch.int32, "last_page_len must be int32")
    fits = (last_page_len >= 1) & (last_page_len <= page_size)
    demand(fits.all(), f"last_page_len must be in 1..{page_size}: {last_page_len}")
    return ((indptr.diff() - 1).clamp(min=0) * page_size + last_page_len).tolist()
