"""Worker: one device's share of the engine. Loads, measures, allocates, then runs steps."""

import hashlib
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from nano.attention.backend import AttentionBackend
from nano.attention.op import attend
from nano.attention.select import select_backend
from nano.batch.input_batch import InputBatchBuilder
from nano.batch.request_states import RequestStates
from nano.checkpoint.fingerprint import weights_fingerprint
from nano.checkpoint.hf_config import load_decoder_config
from nano.compile.compile_model import CompiledModel, CompileTarget
from nano.compile.request import CompileRequest
from nano.compile.skeleton import describe, dump_skeleton
from nano.compile.store import ArtifactStore
from nano.config import EngineConfig
from nano.device import make_device
from nano.errors import ConfigError
from nano.kv_spec import KVCacheConfig, LayerKVSpec
from nano.layers.kernels import TorchKernels
from nano.layers.native_kernels import NativeKernels
from nano.layers.select import select_kernels
from nano.log import get_logger
from nano.models.weights import load_model, storage_formats
from nano.sampling.sampler import Sampler
from nano.spec.proposer import make_proposer
from nano.step import StepOutput, StepPlan
from nano.worker.model_runner import ModelRunner
from nano.worker.step_cost import measure_step
from nano.worker.step_probe import StepProbe

logger = get_logger(__name__)

# Of a step's time, slept while a child compiles: an engine that never rests would starve it.
_DONATED_SHARE = 0.05
_CPU_MEMORY_FRACTION = 0.4  # main memory is shared with everything else on the machine


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What loading settled: the sizes the control plane schedules against."""

    kv_cache: KVCacheConfig
    token_budget: int
    max_num_requests: int
    # Context at which attending costs a token as much as all else; None: the budget was told.
    costly_context: int | None
    num_lookahead_tokens: int  # KV slots that proposers write past the target's last token
    step_seconds: float  # predicted for a full step
    numerics_id: str


class Worker:
    """Owns the model, its KV cache and the model runner of one device."""

    def __init__(self, config: EngineConfig) -> None:
        """`config` is resolved. Nothing heavy happens before `load`."""
        self.config = config
        self.device = make_device(config.device.kind, config.device.num_threads)
        self._last_step_seconds = 0.0

    def load(self, *, show_progress: bool = True) -> WorkerInfo:
        """Load weights, measure a step and the memory, allocate the KV cache.

        Raises `CheckpointError` or `ConfigError`.
        """
        config = self.config
        assert config.model.max_model_len is not None
        folder = Path(config.model.path)
        self.kernels = select_kernels(config.model.dtype, config.model.numerics)
        self.model = load_model(
            folder,
            load_decoder_config(folder),
            dtype=getattr(torch, config.model.dtype),
            device=self.device.torch_device,
            max_model_len=config.model.max_model_len,
            load_format=config.model.load_format,
            quantization=config.model.quantization,
            kernels=self.kernels,
            show_progress=show_progress,
        )
        if type(self.kernels) is not TorchKernels:
            self.model.pack(self.kernels)
        self.proposer = make_proposer()
        layers = [*self.model.kv_specs(kv_dtype(config)), *self.proposer.kv_layers()]
        backend_class = select_backend(
            config.attention.backend, layers, self.device.torch_device, config.model.numerics
        )
        self.backend = backend_class(config.kv_cache.block_size, layers[0].head_dim ** -0.5)

        self.probe = StepProbe(
            partial(self._make_runner, layers),
            self.device,
            block_size=config.kv_cache.block_size,
            max_model_len=config.model.max_model_len,
            vocab_size=self.model.config.vocab_size,
        )
        self.model_forward = CompiledModel(self._compile_target(), ArtifactStore.default())
        self.model_forward.prepare(config.compile.mode, config.compile.startup)
        cost = measure_step(self.probe, config.model.max_model_len, config.scheduler.token_budget)
        token_budget = cost.token_budget
        max_num_requests = min(config.scheduler.max_num_requests, token_budget)
        if max_num_requests < config.scheduler.max_num_requests:
            logger.info(
                "max_num_seqs: %d, so that every running request gets a token in each step of %d",
                max_num_requests,
                token_budget,
            )
        num_blocks = self._num_blocks(layers, max_num_requests)
        kv_cache = KVCacheConfig(config.kv_cache.block_size, num_blocks, tuple(layers))
        self.runner = self._make_runner(layers, num_blocks, max_num_requests, token_budget)
        self.model_forward.poll()  # compiling may begin: nothing is measured any more
        return WorkerInfo(
            kv_cache=kv_cache,
            token_budget=token_budget,
            max_num_requests=max_num_requests,
            costly_context=cost.costly_context,
            num_lookahead_tokens=self.proposer.num_lookahead_tokens,
            step_seconds=cost.seconds,
            numerics_id=numerics_id(
                config, self.backend, self._kernels_name(), storage_formats(self.model)
            ),
        )

    def execute(self, plan: StepPlan) -> StepOutput:
        if self.model_forward.poll() == "waiting":
            time.sleep(self._last_step_seconds * _DONATED_SHARE)
        started = time.perf_counter()
        output = self.runner.execute(plan)
        self._last_step_seconds = time.perf_counter() - started
        return output

    def idle(self) -> None:
        """Use a moment in which there is nothing to execute."""
        self.model_forward.poll()

    def close(self) -> None:
        """End what runs on the side. Safe to call twice."""
        self.model_forward.close()

    def _kernels_name(self) -> str:
        """As the numerics id knows them: with the mode, unless eager and compiled agree on bits."""
        name = self.kernels.name
        return name if self._is_exact else f"{name}, {self.model_forward.mode}"

    @property
    def _is_exact(self) -> bool:
        return self.kernels.name == NativeKernels.name

    def _compile_target(self) -> CompileTarget:
        config = self.model.config
        return CompileTarget(
            model=self.model,
            request=CompileRequest(
                description={
                    # Of these everything follows, but in words that a log can show.
                    "architecture": config.architecture,
                    "dtype": self.config.model.dtype,
                    "weights": storage_formats(self.model),
                    "hidden_size": config.hidden_size,
                    "num_layers": config.num_layers,
                    "num_heads": [config.num_heads, config.num_kv_heads, config.head_dim],
                    "vocab_size": config.vocab_size,
                    **describe(self.model),
                },
                inputs={"input_ids": "int32", "positions": "int64"},  # as in InputBatch
                split_ops=("nano::attention",),
                skeleton=dump_skeleton(self.model),
            ),
            split_ops={"nano::attention": attend},
            probe=self.probe.hidden,
            is_exact=self._is_exact,
        )

    def _make_runner(
        self, layers: list[LayerKVSpec], num_blocks: int, max_num_requests: int, token_budget: int
    ) -> ModelRunner:
        config = self.config
        assert config.model.max_model_len is not None
        block_size = config.kv_cache.block_size
        try:
            states = RequestStates(max_num_requests, config.model.max_model_len, block_size)
            batch_builder = InputBatchBuilder(states, self.device, block_size, token_budget)
            kv_caches = [self._allocate(layer, num_blocks) for layer in layers]
        except (MemoryError, RuntimeError) as error:  # as numpy and as torch say it
            raise ConfigError(
                f"no memory for {num_blocks} KV blocks of {block_size} tokens, {max_num_requests} "
                f"requests (max_num_seqs) of {config.model.max_model_len} tokens (max_model_len) "
                f"and {token_budget} tokens a step (max_num_batched_tokens): {error}"
            ) from error
        return ModelRunner(
            model=self.model,
            model_forward=self.model_forward,
            backend=self.backend,
            kv_caches=kv_caches,
            states=states,
            batch_builder=batch_builder,
            sampler=Sampler(config.model.logprobs_mode),
            proposer=self.proposer,
        )

    def _allocate(self, layer: LayerKVSpec, num_blocks: int) -> Tensor:
        return torch.empty(
            self.backend.kv_cache_shape(layer, num_blocks),
            dtype=getattr(torch, layer.dtype),
            device=self.device.torch_device,
        )

    def _num_blocks(self, layers: list[LayerKVSpec], max_num_requests: int) -> int:
        """Blocks of the KV pool: as told, or what fits the share of free memory."""
        options = self.config.kv_cache
        max_model_len = self.config.model.max_model_len
        assert max_model_len is not None
        block_size = options.block_size
        bytes_per_block = sum(layer.bytes_per_block(block_size) for layer in layers)
        if options.num_blocks is not None:
            num_blocks, why = options.num_blocks, "num_gpu_blocks_override"
        elif options.memory_bytes is not None:
            num_blocks = options.memory_bytes // bytes_per_block
            why = f"kv_cache_memory_bytes {options.memory_bytes}"
        else:
            free = self.device.free_memory()
            fraction = options.memory_fraction or _CPU_MEMORY_FRACTION
            useful = -(-max_model_len // block_size) * max_num_requests
            num_blocks = min(int(free * fraction) // bytes_per_block, useful)
            why = f"{fraction:.0%} of {free / 2**30:.1f} GiB free, at most what can be used"
        if num_blocks < 1:
            raise ConfigError(
                f"the KV cache has no room for one block of {bytes_per_block} bytes ({why})"
            )
        logger.info(
            "KV cache: %d blocks of %d tokens, %.2f GiB (%s)",
            num_blocks,
            block_size,
            num_blocks * bytes_per_block / 2**30,
            why,
        )
        if num_blocks * block_size < max_model_len:
            logger.warning(
                "the KV cache holds %d tokens, fewer than max_model_len %d: longer requests are "
                "refused, or end there",
                num_blocks * block_size,
                max_model_len,
            )
        return num_blocks


def kv_dtype(config: EngineConfig) -> str:
    """What keys and values are stored as: what the model computes in, unless told."""
    computed, told = config.model.dtype, config.kv_cache.dtype
    if told == "auto":
        return computed
    if computed == "float64":
        # A kernel that serves such a cache may not compute in float64.
        raise ConfigError(f"kv_cache_dtype={told} needs dtype float32, not {computed}")
    return told


def numerics_id(
    config: EngineConfig, backend: AttentionBackend, kernels: str, weights_storage: str
) -> str:
    """Names how numbers come about: weights, kernels, machine. Same id, same bits.

    `weights_storage`: how many matrices are kept in which format, as `storage_formats` says it.
    It roots the block-hash chain and is the OpenAI `system_fingerprint`.
    """
    factors = (
        f"weights={weights_fingerprint(Path(config.model.path))}",
        f"load_format={config.model.load_format}",
        f"dtype={config.model.dtype}",
        f"max_model_len={config.model.max_model_len}",  # the base of dynamic RoPE
        f"attention={backend.name}",
        f"kv_cache={kv_dtype(config)}",
        f"layers={kernels}",
        f"weights storage={weights_storage}",
        f"torch={torch.__version__}",
        f"cpu={torch.backends.cpu.get_cpu_capability()}",
    )
    return "nano-" + hashlib.sha256("|".join(factors).encode()).hexdigest()[:16]
