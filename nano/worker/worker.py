"""Worker: one device's share of the engine. Loads, measures, allocates, then runs steps."""

import hashlib
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from nano.attention.backend import AttentionBackend
from nano.checkpoint.fingerprint import weights_fingerprint
from nano.compile.compile_model import Progress
from nano.config import CompileOptions, EngineConfig
from nano.device import Device, make_device
from nano.device.memory import MemoryMeter
from nano.errors import ConfigError
from nano.kv_spec import KVCacheConfig, LayerKVSpec
from nano.log import get_logger
from nano.models.weights import storage_formats
from nano.sampling.logits_processor import LogitsProcessors
from nano.speculation import ProposerInfo
from nano.step import StepOutput, StepPlan
from nano.worker.loaded_model import LoadedModel, kv_dtype
from nano.worker.speculation import Speculation
from nano.worker.step_cost import measure_step, measure_verification
from nano.worker.step_memory import measure_step_memory

logger = get_logger(__name__)

# Of a step's time, slept while a child compiles: an engine that never rests would starve it.
_DONATED_SHARE = 0.05
_CPU_MEMORY_FRACTION = 0.4  # main memory is shared with everything else on the machine
_GPU_MEMORY_FRACTION = 0.9  # of what is left when all else has been measured


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What loading settled: the sizes the control plane schedules against."""

    kv_cache: KVCacheConfig
    token_budget: int
    max_num_requests: int
    # Context at which attending costs a token as much as all else; None: the budget was told.
    costly_context: int | None
    num_lookahead_tokens: int  # KV slots that proposers write past the target's last token
    proposers: tuple[ProposerInfo, ...]  # in the order of preference
    step_seconds: float  # predicted for a full step
    # (tokens of a few requests, drafts among them; seconds of a step with so many)
    verification_seconds: tuple[tuple[int, float], ...]
    numerics_id: str
    is_exact: bool  # no bit of a request's results depends on what it is computed with


class Worker:
    """Owns the models of one device, their KV cache and the model runner."""

    def __init__(self, config: EngineConfig, device: Device | None = None) -> None:
        """`config` is resolved. device: None is the one it names. Nothing heavy happens here.

        Raises `ConfigError`.
        """
        self.config = config
        self.device = device or make_device(config.device.kind, config.device.num_threads)
        if not self.device.supports_graphs:
            _refuse_graphs(config.compile)
        self._last_step_seconds = 0.0
        self._loaded: list[LoadedModel] = []  # the target first

    def load(self, *, show_progress: bool = True) -> WorkerInfo:
        """Load weights, measure a step and the memory, allocate the KV cache.

        Raises `CheckpointError` or `ConfigError`.
        """
        config = self.config
        assert config.model.max_model_len is not None
        processors = LogitsProcessors(config, self.device.torch_device)  # refusals come early
        meter = None if self.device.memory is None else MemoryMeter(self.device.memory)
        with nullcontext() if meter is None else meter.growth("weights"):
            self.target = LoadedModel(config, self.device, show_progress=show_progress)
            self._loaded.append(self.target)
            self.speculation = Speculation(self.target, show_progress=show_progress)
            self._loaded += self.speculation.loaded
        probe = self.target.probe
        cost = measure_step(probe, config.model.max_model_len, config.scheduler.token_budget)
        token_budget = cost.token_budget
        max_num_requests = min(config.scheduler.max_num_requests, token_budget)
        if max_num_requests < config.scheduler.max_num_requests:
            logger.info(
                "max_num_seqs: %d, so that every running request gets a token in each step of %d",
                max_num_requests,
                token_budget,
            )
        if config.kv_cache.dtype in ("fp8", "fp8_e4m3"):
            logger.info(
                "kv_cache_dtype: %s is float8_e4m3fn with a scale of 1: keys and values keep 3 "
                "bits of mantissa, and nothing larger than 448 fits",
                config.kv_cache.dtype,
            )
        layers = [*self.target.kv_layers, *self.speculation.proposers.kv_layers()]
        query_lens = self.speculation.query_lens
        self.speculation.measure_passes(token_budget)
        if meter is not None:
            measure_step_memory(meter, self.target, token_budget, max_num_requests, query_lens)
            self.speculation.measure_memory(meter, max_num_requests)
        num_blocks = self._num_blocks(layers, max_num_requests, meter)
        self.runner = self.target.make_runner(
            self.speculation.proposers,
            num_blocks,
            max_num_requests,
            token_budget,
            self.speculation.sampler,
            processors.start,
        )
        self.speculation.bind(self.runner, num_blocks)
        verification_seconds = cost.verification_seconds
        if self.speculation.is_configured:
            verification_seconds = measure_verification(probe, config.model.max_model_len)
        self.runner.model_forward, self.runner.context = self.target.add_graphs(
            self.runner.context, token_budget, max_num_requests, query_lens
        )
        if config.compile.startup != "eager-first":
            while self._capture_next():
                pass
        self._poll()  # compiling may begin: nothing is measured any more
        return WorkerInfo(
            kv_cache=KVCacheConfig(config.kv_cache.block_size, num_blocks, tuple(layers)),
            token_budget=token_budget,
            max_num_requests=max_num_requests,
            costly_context=cost.costly_context,
            num_lookahead_tokens=self.speculation.proposers.num_lookahead_tokens,
            proposers=self.speculation.infos,
            step_seconds=cost.seconds,
            verification_seconds=verification_seconds,
            is_exact=self.target.is_exact,
            numerics_id=numerics_id(
                config,
                self.target.backend,
                self.target.kernels_name,
                storage_formats(self.target.model),
                self.device.traits,
            ),
        )

    def execute(self, plan: StepPlan) -> StepOutput:
        progress = self._poll()
        if progress == "waiting":
            time.sleep(self._last_step_seconds * _DONATED_SHARE)
        elif progress is None:
            self._capture_next()
        started = time.perf_counter()
        output = self.runner.execute(plan)
        self._last_step_seconds = time.perf_counter() - started
        return output

    def idle(self) -> None:
        """Use a moment in which there is nothing to execute."""
        if self._poll() is None and not self._capture_next():
            for loaded in self._loaded:
                loaded.fit_graphs()

    def close(self) -> None:
        """End what runs on the side. Safe to call twice."""
        for loaded in self._loaded:
            loaded.forward.close()

    def _poll(self) -> Progress | None:
        """Let one model after the other come by its compiled pieces."""
        for loaded in self._loaded:
            progress = loaded.poll()
            if progress is not None:
                return progress
        return None

    def _capture_next(self) -> bool:
        """Capture one graph; whether there may be more to capture. Between two steps.

        Models take turns: a step has more passes of a draft model than of the target.
        """
        unfinished = [g for loaded in self._loaded for g in loaded.graphs if g.num_waiting]
        if unfinished:
            min(unfinished, key=lambda graphs: len(graphs.captured)).capture_next()
        return bool(unfinished)

    def _num_blocks(
        self, layers: list[LayerKVSpec], max_num_requests: int, meter: MemoryMeter | None
    ) -> int:
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
        elif meter is not None:
            budget = meter.budget(options.memory_fraction or _GPU_MEMORY_FRACTION)
            logger.info("memory of %s:\n%s", self.device.torch_device, budget.table())
            budget.require(bytes_per_block, "one block")
            num_blocks = budget.kv_cache // bytes_per_block
            why = f"gpu_memory_utilization {budget.fraction}"
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


def _refuse_graphs(options: CompileOptions) -> None:
    """Raises `ConfigError` where graphs are asked for, of a device that has none."""
    for name, value in (
        ("cudagraph_mode", options.cudagraph_mode),
        ("cudagraph_capture_sizes", options.cudagraph_capture_sizes),
    ):
        if value and value not in ("auto", "NONE"):
            raise ConfigError(f"{name}={value} needs device=cuda: a CPU has no graphs")


def numerics_id(
    config: EngineConfig,
    backend: AttentionBackend,
    kernels: str,
    weights_storage: str,
    device_traits: Mapping[str, str],
) -> str:
    """Names how numbers come about: weights, kernels, machine. Same id, same bits.

    `weights_storage`: how many matrices are kept in which format, as `storage_formats` says it.
    `device_traits`: as the device says them; libraries choose kernels by the GPU.
    It roots the block-hash chain and is the OpenAI `system_fingerprint`.
    """
    factors = (
        f"weights={weights_fingerprint(Path(config.model.path))}",
        f"load_format={config.model.load_format}",
        f"dtype={config.model.dtype}",
        f"max_model_len={config.model.max_model_len}",  # the base of dynamic RoPE
        f"attention={backend.numerics_name}",
        f"kv_cache={kv_dtype(config)}",
        f"layers={kernels}",
        f"weights storage={weights_storage}",
        f"torch={torch.__version__}",
        f"cpu={torch.backends.cpu.get_cpu_capability()}",
        *(f"{name}={value}" for name, value in device_traits.items()),
    )
    return "nano-" + hashlib.sha256("|".join(factors).encode()).hexdigest()[:16]
