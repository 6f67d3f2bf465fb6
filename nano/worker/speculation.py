"""Speculation: the proposers of an engine, and the models that they need beside the target."""

import dataclasses
from pathlib import Path

import torch

from nano.attention.op import ForwardContext
from nano.checkpoint.hf_config import load_decoder_config
from nano.checkpoint.locate import locate_model
from nano.config import EngineConfig, ModelOptions
from nano.device.memory import MemoryMeter
from nano.errors import ConfigError
from nano.kv_spec import LayerKVSpec
from nano.log import get_logger
from nano.model_input.input_batch import InputBatchBuilder
from nano.resolve import resolve
from nano.sampling.acceptance import make_rule
from nano.sampling.sampler import Sampler
from nano.spec.drafting_model import DraftingModel
from nano.spec.make_proposers import NeededModel, make_proposers, needed_model
from nano.spec.options import ProposerOptions
from nano.speculation import ProposerInfo
from nano.worker.loaded_model import LoadedModel
from nano.worker.model_runner import ModelRunner
from nano.worker.step_cost import measure_step
from nano.worker.step_memory import measure_step_memory

logger = get_logger(__name__)

_CONTEXT = 128  # tokens that a measured pass attends to
_MOST_LENGTHS = 8  # of drafts, that all have graphs of their own: more take memory, and are rare


class Speculation:
    """Loads what `config.speculative` asks for. Raises `CheckpointError` or `ConfigError`."""

    def __init__(self, target: LoadedModel, *, show_progress: bool = True):
        config = target.config
        options = config.speculative
        self.is_configured = bool(options.proposers)
        self._target = target
        self._needed: dict[str, NeededModel] = {}
        self._models: dict[str, LoadedModel] = {}
        self.drafting: dict[str, DraftingModel] = {}  # what each was bound to
        self._max_num_tokens: dict[str, int] = {}  # of one pass of each
        proposers = options.with_prediction().proposers
        for proposer in proposers:
            needed = needed_model(proposer, config.model)
            if needed is not None:
                self._needed[proposer.name] = needed
                self._models[proposer.name] = self._load(proposer, needed, show_progress)
        self.proposers = make_proposers(
            proposers,
            {
                name: [_as_draft(layer, name) for layer in loaded.kv_layers]
                for name, loaded in self._models.items()
            },
            vocab_size=target.model.config.vocab_size,
            block_size=config.kv_cache.block_size,
        )
        rule = make_rule(
            options.rejection_sample_method,
            options.synthetic_acceptance_rates,
            options.synthetic_acceptance_length,
        )
        self.sampler = Sampler(config.model.logprobs_mode, rule=rule, transfers=target.device)
        self.infos = tuple(self._info(proposer) for proposer in proposers)

    @property
    def loaded(self) -> list[LoadedModel]:
        return list(self._models.values())

    @property
    def query_lens(self) -> set[int]:
        """Tokens of each request in the target's uniform steps: decode, and verification of as many
        drafts as a proposer makes at most, or of fewer if these are few lengths."""
        lens = {1}
        for info in self.infos:
            shortest = 1 if info.num_tokens <= _MOST_LENGTHS else info.num_tokens
            lens |= {num_drafts + 1 for num_drafts in range(shortest, info.num_tokens + 1)}
        return lens

    def measure_passes(self, token_budget: int) -> None:
        """Settle how many tokens a pass of each model may have; `token_budget` is the target's."""
        for name, loaded in self._models.items():
            # To catch up on a prompt, a small model may read more in a step than the target does.
            own = measure_step(loaded.probe, loaded.max_model_len, None).token_budget
            self._max_num_tokens[name] = max(token_budget, own)

    def measure_memory(self, meter: MemoryMeter, max_num_requests: int) -> None:
        """Add what passes of the models take, their graphs included, to `meter`."""
        most = {info.name: info.num_tokens for info in self.infos}
        for name, loaded in self._models.items():
            measure_step_memory(
                meter,
                loaded,
                self._max_num_tokens[name],
                max_num_requests,
                self.proposers.model(name).query_lens,
            )
            with meter.peak("activations"):
                self._hold_probs(loaded, max_num_requests, most[name])

    @torch.inference_mode()
    def _hold_probs(self, loaded: LoadedModel, num_requests: int, num_drafts: int) -> None:
        """Take what a loop of passes takes over the vocabulary: a pass has the logits of all
        requests at once, and a rule keeps what each draft is drawn from."""
        hidden = torch.zeros(
            num_requests,
            loaded.model.config.hidden_size,
            dtype=loaded.dtype,
            device=loaded.device.torch_device,
        )
        logits = loaded.model.compute_logits(hidden)
        if self.sampler.rule is not None and self.sampler.rule.needs_probs:
            probs = torch.softmax(logits, dim=-1)
            probs.new_empty(num_requests, num_drafts, probs.shape[1])

    def bind(self, runner: ModelRunner, num_blocks: int) -> None:
        """Give the models their KV: the target's own, or caches over the same blocks."""
        block_size = self._target.config.kv_cache.block_size
        for name, loaded in self._models.items():
            max_num_tokens = self._max_num_tokens[name]
            shares_kv = self._needed[name].shares_kv
            caches = runner.context.kv_caches if shares_kv else loaded.allocate_kv(num_blocks)
            forward, context = loaded.add_graphs(
                ForwardContext(loaded.new_backend(), caches),
                max_num_tokens,
                runner.states.max_num_requests,
                self.proposers.model(name).query_lens,
            )
            self.drafting[name] = DraftingModel(
                model=loaded.model,
                forward=forward,
                context=context,
                builder=InputBatchBuilder(
                    runner.states, self._target.device, block_size, max_num_tokens
                ),
                sampler=self.sampler,
                max_model_len=loaded.max_model_len,
                max_num_tokens=max_num_tokens,
            )
            self.proposers.model(name).bind(self.drafting[name], num_blocks)

    def _load(
        self, proposer: ProposerOptions, needed: NeededModel, show_progress: bool
    ) -> LoadedModel:
        config = self._target.config
        logger.info("proposer %s: loading %s", proposer.name, needed.options.path)
        if needed.shares_kv:
            resolved = dataclasses.replace(config, model=needed.options)
        else:
            resolved = _resolve(config, needed.options)
            self._check_vocabulary(proposer, resolved)
        return LoadedModel(resolved, self._target.device, show_progress=show_progress)

    def _check_vocabulary(self, proposer: ProposerOptions, draft: EngineConfig) -> None:
        ours = self._target.model.config.vocab_size
        theirs = load_decoder_config(Path(draft.model.path)).vocab_size
        if ours != theirs:
            raise ConfigError(
                f"speculative_config: {proposer.name} has a vocabulary of {theirs} tokens "
                f"({draft.model.path}), the target one of {ours}: their ids do not mean the same"
            )
        files = [
            Path(folder) / "tokenizer.json"
            for folder in (self._target.config.model.path, draft.model.path)
        ]
        if all(file.is_file() for file in files) and _differ(*files):
            logger.warning(
                "proposer %s: its tokenizer.json is not the target's; if ids mean other texts, "
                "hardly a draft will be accepted",
                proposer.name,
            )

    def _info(self, proposer: ProposerOptions) -> ProposerInfo:
        loaded = self._models.get(proposer.name)
        seconds = 0.0
        if loaded is not None:
            context = min(_CONTEXT, loaded.max_model_len - 1)
            seconds = loaded.probe.seconds(context, 1, num_runs=4)
            logger.info("proposer %s: %.2f ms per pass", proposer.name, seconds * 1e3)
        return ProposerInfo(
            name=proposer.name,
            num_tokens=proposer.num_speculative_tokens,
            is_free=loaded is None,
            needs_prediction=self.proposers.needs_prediction(proposer.name),
            pass_seconds=seconds,
            has_own_kv=loaded is not None and not self._needed[proposer.name].shares_kv,
        )


def _resolve(config: EngineConfig, options: ModelOptions) -> EngineConfig:
    """`config` with another model, whose context is no longer than the target's or its own."""
    limit = config.model.max_model_len
    assert limit is not None
    longest = load_decoder_config(locate_model(options.path)).max_model_len
    limit = min(limit, longest, options.max_model_len or limit)
    return resolve(
        dataclasses.replace(config, model=dataclasses.replace(options, max_model_len=limit))
    )


def _as_draft(layer: LayerKVSpec, proposer: str) -> LayerKVSpec:
    return dataclasses.replace(layer, name=f"{proposer}.{layer.name}", role="draft")


def _differ(left: Path, right: Path) -> bool:
    return left.read_bytes() != right.read_bytes()
