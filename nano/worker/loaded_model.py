"""LoadedModel: one model on one device with all it computes with. A target, or a draft model."""

from collections.abc import Iterable
from functools import partial
from logging import INFO, WARNING
from pathlib import Path

import torch
from torch import Tensor

from nano.attention.backend import AttentionBackend, AttentionSetup
from nano.attention.op import ForwardContext, attend
from nano.attention.select import select_backend
from nano.checkpoint.hf_config import load_decoder_config
from nano.compile.artifact import ForwardFn
from nano.compile.compile_model import CompiledModel, CompileTarget, Progress
from nano.compile.cuda_graphs import CudaGraphs
from nano.compile.graph_keys import GraphKeys, settle_mode
from nano.compile.request import CompileRequest
from nano.compile.skeleton import describe, dump_skeleton
from nano.compile.store import ArtifactStore
from nano.config import EngineConfig
from nano.device import Device
from nano.errors import ConfigError
from nano.layers.kernels import TorchKernels
from nano.layers.native_kernels import NativeKernels
from nano.layers.select import select_kernels
from nano.log import get_logger
from nano.model_input.input_batch import InputBatchBuilder
from nano.model_input.own_drafts import OwnDrafts
from nano.model_input.request_states import MakeEdits, RequestStates, no_edits
from nano.models.decoder import Decoder
from nano.models.weights import load_model, storage_formats
from nano.sampling.sampler import Sampler
from nano.spec.proposers import Proposers
from nano.worker.model_runner import ModelRunner
from nano.worker.step_probe import StepProbe

logger = get_logger(__name__)


class LoadedModel:
    """Weights, kernels, attention backend, compiled forward. Owns no state of any request.

    `config` is resolved. Raises `CheckpointError` or `ConfigError`.
    """

    def __init__(self, config: EngineConfig, device: Device, *, show_progress: bool = True):
        self.config = config
        self.device = device
        assert config.model.max_model_len is not None
        self.max_model_len = config.model.max_model_len
        folder = Path(config.model.path)
        self.kernels = select_kernels(
            config.model.dtype, config.model.numerics, device.torch_device.type
        )
        self.dtype = self.kernels.between_layers(getattr(torch, config.model.dtype))
        self.model = load_model(
            folder,
            load_decoder_config(folder),
            dtype=self.dtype,
            device=device.torch_device,
            max_model_len=self.max_model_len,
            load_format=config.model.load_format,
            quantization=config.model.quantization,
            kernels=self.kernels,
            show_progress=show_progress,
        )
        if type(self.kernels) is not TorchKernels:
            self.model.pack(self.kernels)
        self.kv_layers = self.model.kv_specs(kv_dtype(config))
        self._backend_class = select_backend(
            config.attention.backend, self.kv_layers, device.torch_device, config.model.numerics
        )
        self.backend = self.new_backend()
        self.probe = StepProbe(
            partial(self.make_runner, Proposers()),
            device,
            block_size=config.kv_cache.block_size,
            max_model_len=self.max_model_len,
            vocab_size=self.model.config.vocab_size,
        )
        self.forward = CompiledModel(self._compile_target(), ArtifactStore.default())
        self.forward.prepare(config.compile.mode, config.compile.startup)
        self.graphs: list[CudaGraphs] = []  # one for each context that steps run in

    @property
    def is_exact(self) -> bool:
        """Whether no bit of a row depends on its batch: on our kernels, or their slow twin."""
        return type(self.kernels) is not TorchKernels

    @property
    def kernels_name(self) -> str:
        """As the numerics id knows them: with the mode, unless eager and compiled agree on bits,
        and with the GPU."""
        if self._agrees_compiled:
            return self.kernels.name
        return ", ".join([self.kernels.name, self.forward.mode, *self.device.traits.values()])

    @property
    def _agrees_compiled(self) -> bool:
        return isinstance(self.kernels, NativeKernels)

    def new_backend(self) -> AttentionBackend:
        """One for each context that plans steps of its own."""
        return self._backend_class.for_model(
            AttentionSetup(
                self.config.kv_cache.block_size,
                self.kv_layers[0],
                self.model.config.num_heads,
                self.dtype,
                self.device.torch_device,
                self.config.attention.kv_split,
                getattr(torch, self.config.model.dtype),
            )
        )

    def allocate_kv(self, num_blocks: int) -> list[Tensor]:
        """A cache per layer, uninitialised."""
        return [
            self.device.empty(
                self.backend.kv_cache_shape(layer, num_blocks), getattr(torch, layer.dtype)
            )
            for layer in self.kv_layers
        ]

    def make_runner(
        self,
        proposers: Proposers,
        num_blocks: int,
        max_num_requests: int,
        token_budget: int,
        sampler: Sampler | None = None,
        make_edits: MakeEdits = no_edits,
    ) -> ModelRunner:
        """A runner with KV and request states of its own. Raises `ConfigError` without memory."""
        block_size = self.config.kv_cache.block_size
        try:
            states = RequestStates(max_num_requests, self.max_model_len, block_size, make_edits)
            batch_builder = InputBatchBuilder(states, self.device, block_size, token_budget)
            kv_caches = self.allocate_kv(num_blocks)
        except (MemoryError, RuntimeError) as error:  # as numpy and as torch say it
            raise ConfigError(
                f"no memory for {num_blocks} KV blocks of {block_size} tokens, {max_num_requests} "
                f"requests (max_num_seqs) of {self.max_model_len} tokens (max_model_len) "
                f"and {token_budget} tokens a step (max_num_batched_tokens): {error}"
            ) from error
        return ModelRunner(
            model=self.model,
            model_forward=self.forward,
            context=ForwardContext(self.backend, kv_caches),
            states=states,
            batch_builder=batch_builder,
            sampler=sampler or Sampler(self.config.model.logprobs_mode, transfers=self.device),
            proposers=proposers,
            own_drafts=OwnDrafts(shows_all=not self.config.scheduler.async_scheduling),
        )

    def add_graphs(
        self,
        context: ForwardContext,
        max_num_tokens: int,
        max_num_requests: int,
        query_lens: Iterable[int] = (1,),
    ) -> tuple[ForwardFn, ForwardContext]:
        """What to run the steps of `context` with: graphs, if the device and the options want them.

        Nothing is captured yet: see `graphs`. `query_lens`: tokens of each request in the uniform
        steps that are worth a graph.
        """
        if not self.device.supports_graphs:
            return self.forward, context
        wanted = self.config.compile.cudagraph_mode
        mode, why = settle_mode(
            "FULL_AND_PIECEWISE" if wanted == "auto" else wanted,
            context.backend.graph_support,
            context.backend.numerics_name,
        )
        logger.log(
            INFO if wanted in ("auto", mode) else WARNING,
            "cudagraph mode: %s (%s)",
            mode,
            why or ("auto" if wanted == "auto" else "as told"),
        )
        if mode == "NONE":
            return self.forward, context
        sizes = self.config.compile.cudagraph_capture_sizes
        if sizes and max(sizes) > max_num_tokens:
            logger.warning(
                "cudagraph_capture_sizes: steps have %d tokens at most; larger sizes are left out",
                max_num_tokens,
            )
        graphs = CudaGraphs(
            self.forward,
            context,
            GraphKeys.of_mode(mode, max_num_tokens, max_num_requests, query_lens, sizes),
            self.device.graph_pool(),
            device=self.device.torch_device,
            max_model_len=self.max_model_len,
        )
        self.graphs.append(graphs)
        return graphs, graphs.context

    def poll(self) -> Progress | None:
        """`CompiledModel.poll`. Graphs hold what was computed with at their capture: where that
        has changed, they are to be captured anew."""
        mode = self.forward.mode
        progress = self.forward.poll()
        if self.forward.mode != mode:
            for graphs in self.graphs:
                graphs.forget(self.device.graph_pool())
        return progress

    def fit_graphs(self) -> None:
        """Exchange the graphs for such as the steps so far ask for, where that is worth it and
        nobody has told their sizes. While nothing is computed: they are to be captured anew."""
        if self.config.compile.cudagraph_capture_sizes:
            return
        for graphs in self.graphs:
            keys = graphs.better_keys()
            if keys is not None:
                graphs.forget(self.device.graph_pool(), keys)

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
                inputs=Decoder.INPUTS,
                split_ops=("nano::attention",),
                skeleton=dump_skeleton(self.model),
                device=str(self.device.torch_device),
                device_traits=self.device.traits,
            ),
            split_ops={"nano::attention": attend},
            probe=self.probe.hidden,
            is_exact=self._agrees_compiled,
        )


def kv_dtype(config: EngineConfig) -> str:
    """What keys and values are stored as: what the model computes in, unless told."""
    computed, told = config.model.dtype, config.kv_cache.dtype
    if told == "auto":
        return computed
    if computed == "float64":
        # A kernel that serves such a cache may not compute in float64.
        raise ConfigError(f"kv_cache_dtype={told} needs dtype float32, not {computed}")
    return "float8_e4m3fn" if told in ("fp8", "fp8_e4m3") else told
