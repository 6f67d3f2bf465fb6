"""Worker: one device's share of the engine. Loads, measures, allocates, then runs steps."""

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nano.attention.backend import AttentionBackend
from nano.attention.select import select_backend
from nano.batch.input_batch import InputBatchBuilder
from nano.batch.request_states import RequestStates
from nano.checkpoint.fingerprint import weights_fingerprint
from nano.checkpoint.hf_config import load_decoder_config
from nano.compile.compile_model import compile_model
from nano.config import EngineConfig
from nano.device import make_device
from nano.errors import ConfigError
from nano.kv_spec import KVCacheConfig, LayerKVSpec
from nano.layers.cpu_linear import PackedWeight
from nano.log import get_logger
from nano.models.weights import load_model
from nano.sampling.sampler import Sampler
from nano.sampling_params import SamplingParams
from nano.spec.proposer import make_proposer
from nano.step import NewRequest, StepOutput, StepPlan
from nano.worker.model_runner import ModelRunner

logger = get_logger(__name__)

_STEP_SECONDS = 0.35  # aimed at, so that a full step stays under half a second despite noise
_PROBE_TOKENS = 256
_FAR_PROBE_TOKENS = 64  # few, for a quick start: it is compared with as many at no context
_FAR_PROBE_CONTEXT = 2048
_MAX_AUTO_BUDGET = 8192
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

    def load(self, *, show_progress: bool = True) -> WorkerInfo:
        """Load weights, measure a step and the memory, allocate the KV cache.

        Raises `CheckpointError` or `ConfigError`.
        """
        config = self.config
        assert config.model.max_model_len is not None
        folder = Path(config.model.path)
        self.model = load_model(
            folder,
            load_decoder_config(folder),
            dtype=getattr(torch, config.model.dtype),
            device=self.device.torch_device,
            max_model_len=config.model.max_model_len,
            load_format=config.model.load_format,
            show_progress=show_progress,
        )
        self._packs = self._pack_weights()
        self.model_forward = compile_model(
            self.model, config.compile.mode, split_ops=("nano::attention",)
        )
        self.proposer = make_proposer()
        layers = [*self.model.kv_specs(config.model.dtype), *self.proposer.kv_layers()]
        backend_class = select_backend(config.attention.backend, layers, self.device.torch_device)
        self.backend = backend_class(config.kv_cache.block_size, layers[0].head_dim ** -0.5)

        step_seconds, token_budget, costly_context = self._measure_step(layers)
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
        return WorkerInfo(
            kv_cache=kv_cache,
            token_budget=token_budget,
            max_num_requests=max_num_requests,
            costly_context=costly_context,
            num_lookahead_tokens=self.proposer.num_lookahead_tokens,
            step_seconds=step_seconds,
            numerics_id=numerics_id(config, self.backend, self._packs),
        )

    def _pack_weights(self) -> bool:
        """Hand the weights to our CPU kernel if it is there; whether it was."""
        if self.config.model.dtype != "float32" or not PackedWeight.is_available():
            logger.info("linear layers: torch's kernels; their last bits depend on the batch")
            return False
        started = time.perf_counter()
        self.model.pack()
        num_bytes = sum(buffer.nbytes for buffer in self.model.buffers())
        logger.info(
            "linear layers: native kernels, %.2f GB packed in %.1f s",
            num_bytes / 1e9,
            time.perf_counter() - started,
        )
        return True

    def execute(self, plan: StepPlan) -> StepOutput:
        return self.runner.execute(plan)

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

    def _measure_step(self, layers: list[LayerKVSpec]) -> tuple[float, int, int | None]:
        """(predicted seconds of a full step, token budget, costly context).

        A token is taken to cost a + b * context seconds, from real steps at two contexts.
        """
        max_model_len = self.config.model.max_model_len
        assert max_model_len is not None
        num_tokens = min(_PROBE_TOKENS, max_model_len)
        per_token = self._time_chunk(layers, 0, num_tokens, num_runs=3) / num_tokens
        budget = self.config.scheduler.token_budget
        if budget is not None:
            return budget * per_token, budget, None
        costly_context = None
        far = min(_FAR_PROBE_CONTEXT, max_model_len - _FAR_PROBE_TOKENS)
        if far >= num_tokens:
            extra = self._time_chunk(layers, far, _FAR_PROBE_TOKENS, num_runs=2)
            extra -= self._time_chunk(layers, 0, _FAR_PROBE_TOKENS, num_runs=2)
            slope = extra / _FAR_PROBE_TOKENS / far
            if slope > 0:
                per_token = max(per_token - slope * num_tokens / 2, per_token / 2)
                costly_context = max(1, int(per_token / slope))
        budget = max(16, min(int(_STEP_SECONDS / per_token), _MAX_AUTO_BUDGET) // 16 * 16)
        logger.info(
            "max_num_batched_tokens: %d (measured %.3f ms per token, twice that at a context of "
            "%s; a full step takes %.2f s)",
            budget,
            per_token * 1e3,
            costly_context,
            budget * per_token,
        )
        return budget * per_token, budget, costly_context

    def _time_chunk(
        self, layers: list[LayerKVSpec], num_computed: int, num_tokens: int, num_runs: int
    ) -> float:
        """Seconds of a real step over a made-up plan: a chunk behind `num_computed` tokens.

        The least of `num_runs`, of which the first warms up.
        """
        num_known = num_computed + num_tokens
        num_blocks = -(-num_known // self.config.kv_cache.block_size)
        runner = self._make_runner(layers, num_blocks, 1, num_tokens)
        for cache in runner.context.kv_caches:
            cache.zero_()  # what was never computed is read here
        seconds = []
        for step in range(num_runs):
            request_id = f"probe-{step}"
            plan = StepPlan(
                step=step,
                num_scheduled_tokens={request_id: num_tokens},
                num_computed_tokens={request_id: num_computed},
                new_requests=[
                    NewRequest(
                        request_id=request_id,
                        token_ids=[0] * num_known,
                        num_prompt_tokens=num_known,
                        num_computed_tokens=num_computed,
                        block_ids=list(range(num_blocks)),
                        sampling_params=SamplingParams(temperature=0.0, seed=0),
                    )
                ],
                finished_request_ids=[f"probe-{step - 1}"] if step else [],
            )
            started = time.perf_counter()
            runner.execute(plan)
            self.device.synchronize()
            seconds.append(time.perf_counter() - started)
        return min(seconds[1:])

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


def numerics_id(config: EngineConfig, backend: AttentionBackend, packs: bool) -> str:
    """Names how numbers come about: weights, kernels, machine, mode. Same id, same bits.

    It roots the block-hash chain and is the OpenAI `system_fingerprint`.
    """
    factors = (
        f"weights={weights_fingerprint(Path(config.model.path))}",
        f"load_format={config.model.load_format}",
        f"dtype={config.model.dtype}",
        f"max_model_len={config.model.max_model_len}",  # the base of dynamic RoPE
        f"attention={backend.name}",
        f"linear={'native' if packs else 'torch'}",
        f"mode={config.compile.mode}",
        f"torch={torch.__version__}",
        f"cpu={torch.backends.cpu.get_cpu_capability()}",
    )
    return "nano-" + hashlib.sha256("|".join(factors).encode()).hexdigest()[:16]
