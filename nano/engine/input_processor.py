"""InputProcessor: a caller's prompt and parameters to engine requests. Torch-free.

The front end's side of validation: what needs the model to be checked (vocabulary, context
length, the engine's limits) is checked here, before the core hears of the request. Everything
the core gets is resolved: token ids, a seed, a token limit, n = 1.
"""

import dataclasses
import hashlib
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nano.checkpoint.hf_config import DecoderConfig
from nano.config import EngineConfig, load_class
from nano.engine.messages import EngineRequest
from nano.engine.tokenizer import Tokenizer
from nano.errors import ConfigError, InvalidRequest
from nano.outputs import SpeculationReport
from nano.sampling_params import MAX_INT32, SamplingParams, check_text
from nano.speculation import ProposerInfo, RequestSpeculation

_SEED_LIMIT = 2**63
_DRAWN_SEED_LIMIT = 2**53  # callers whose JSON knows only doubles can send it back


@dataclass(slots=True)
class PreparedRequest:
    """One prompt, checked, and the `n` engine requests that continue it.

    `sampling_params` is what was asked, with `max_tokens` and `seed` filled in. Child i answers
    completion i; its id is `request_id` if it is alone, else `"{i}_{request_id}"`. `speculative` is
    what each completion's report begins with, None if there is to be none.
    """

    request_id: str
    prompt: str | None  # None if the caller sent token ids
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    children: list[EngineRequest]
    speculative: SpeculationReport | None = None
    shows_trace: bool = False  # of speculation
    stream_interval: int = 1  # new tokens of a completion per output, after the first


class InputProcessor:
    """Validates, tokenises and fans out requests. Safe to call from several threads.

    A missing seed is drawn from the engine's seed and a request counter, so that a library
    program repeats itself, or at random for a server (`draws_random_seeds`), whose callers must
    not see each other's sequence.
    """

    def __init__(
        self,
        config: EngineConfig,
        decoder: DecoderConfig,
        tokenizer: Tokenizer,
        *,
        num_kv_slots: int,
        proposers: Sequence[ProposerInfo] = (),
        draws_random_seeds: bool = False,
    ):
        """`config` is resolved: its `max_model_len` is the one that holds. Raises `ConfigError`.

        `num_kv_slots` is how many tokens the core's whole KV cache holds, `proposers` those that
        it has loaded.
        """
        assert config.model.max_model_len is not None
        self.max_model_len = config.model.max_model_len
        self.num_kv_slots = num_kv_slots
        self.proposers = {proposer.name: proposer for proposer in proposers}
        self.vocab_size = decoder.vocab_size
        self.tokenizer = tokenizer
        has_own_defaults = config.model.generation_config == "auto"
        self._default_sampling = dict(decoder.default_sampling) if has_own_defaults else {}
        try:
            self.default_sampling_params()
        except InvalidRequest as error:
            raise ConfigError(
                f"the model's generation_config.json: {error}; pass generation_config='vllm' to "
                "ignore it"
            ) from error
        self.policy = config.scheduler.policy
        self.max_logprobs = config.model.max_logprobs
        self._logits_processors = [load_class(named) for named in config.model.logits_processors]
        self._engine_seed = config.model.seed
        self._draws_random_seeds = draws_random_seeds
        self._counter = itertools.count()
        eos = [*decoder.eos_token_ids]
        if tokenizer.eos_token_id is not None:
            eos.append(tokenizer.eos_token_id)
        self.eos_token_ids = tuple(i for i in dict.fromkeys(eos) if i < self.vocab_size)

    @property
    def _num_slots(self) -> int:
        """Tokens that prompt and answer may have together."""
        return min(self.max_model_len, self.num_kv_slots)

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """The model's own sampling defaults (generation_config.json) under what is `given`."""
        params: dict[str, Any] = {**self._default_sampling, **given}
        return SamplingParams(**params)

    def process(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        arrival_time: float,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Literal["left", "right"] | None = None,
        speculative: object = None,
        prediction: str | Sequence[int] | None = None,
        speculative_trace: bool = False,
        stream_interval: int = 1,
    ) -> PreparedRequest:
        """Check everything and build the engine requests. Raises `InvalidRequest`.

        `arrival_time` is time.monotonic(). `add_special_tokens` is False for a text that a chat
        template rendered. `truncate_prompt_tokens` is the most that are kept of the prompt, -1 as
        many as fit; `truncation_side` is where the others go, "left" by default. `speculative` is
        what `RequestSpeculation.parse` takes. `prediction` is what the caller thinks will come, a
        text or token ids; "" or [] is none, and whatever is beyond `max_model_len` tokens is
        dropped, since it cannot come.
        """
        params = self.default_sampling_params() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(
                f"sampling_params must be a SamplingParams, got {type(params).__name__}",
                "sampling_params",
            )
        self._check_priority(priority)
        _check_envelope(request_id, cache_salt, speculative_trace)
        if stream_interval < 1:
            raise InvalidRequest(
                f"stream_interval must be at least 1, got {stream_interval}", "stream_interval"
            )
        limit = self._most_prompt_tokens(truncate_prompt_tokens, truncation_side, params)
        text, token_ids = self._tokenize(
            prompt, add_special_tokens, limit, truncation_side or "left"
        )
        self._check_prompt(token_ids)
        self._check_params(params)
        params = self._resolve(params, len(token_ids))
        bad_words_token_ids = self._bad_words_token_ids(params.bad_words)
        speculation = RequestSpeculation.parse({} if speculative is None else speculative)
        prediction_token_ids = self._prediction_token_ids(prediction)
        in_force = self._in_force(speculation, bool(prediction_token_ids))
        is_asked = speculative_trace or speculative is not None or prediction is not None
        # Stop strings are found by the front end, and the core's own counts go on behind them.
        traces_drafts = speculative_trace or bool(params.stop and in_force.num_tokens)
        children = [
            EngineRequest(
                request_id=request_id if params.n == 1 else f"{index}_{request_id}",
                prompt_token_ids=token_ids,
                sampling_params=_child_params(params, index),
                arrival_time=arrival_time,
                eos_token_ids=self.eos_token_ids,
                bad_words_token_ids=bad_words_token_ids,
                priority=priority,
                cache_salt=cache_salt,
                speculation=speculation,
                prediction_token_ids=prediction_token_ids,
                traces_drafts=traces_drafts,
            )
            for index in range(params.n)
        ]
        return PreparedRequest(
            request_id,
            text,
            token_ids,
            params,
            arrival_time,
            children,
            speculative=in_force if self.proposers or is_asked else None,
            shows_trace=speculative_trace,
            stream_interval=stream_interval,
        )

    def _check_priority(self, priority: int) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_INT32:
            raise InvalidRequest(
                f"priority must be an integer in [-{MAX_INT32}, {MAX_INT32}], got {priority!r}",
                "priority",
            )
        if priority and self.policy != "priority":
            raise InvalidRequest(
                f"priority is {priority}, but the engine's scheduling_policy is {self.policy!r}, "
                "which serves all alike; only 0 is allowed",
                "priority",
            )

    def _most_prompt_tokens(
        self, limit: int | None, side: str | None, params: SamplingParams
    ) -> int | None:
        """How many of the prompt's tokens are kept; None: all, or the request is refused."""
        if limit is None:
            if side is not None:
                raise InvalidRequest(
                    "truncation_side needs truncate_prompt_tokens", "truncation_side"
                )
            return None
        if limit < -1 or limit == 0:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be -1 or at least 1, got {limit}",
                "truncate_prompt_tokens",
            )
        if limit > 0:
            return limit
        num_slots, num_reserved = self._num_slots, params.max_tokens or 1
        if num_reserved >= num_slots:
            raise InvalidRequest(
                f"truncate_prompt_tokens is -1, but max_tokens ({num_reserved}) leaves no room for "
                f"a prompt in {num_slots} tokens",
                "truncate_prompt_tokens",
            )
        return num_slots - num_reserved

    def _tokenize(
        self,
        prompt: str | Sequence[int],
        add_special_tokens: bool,
        limit: int | None,
        side: Literal["left", "right"],
    ) -> tuple[str | None, list[int]]:
        """(the text if there was one, the token ids), both without what is beyond `limit`."""
        if not isinstance(prompt, str):
            token_ids = _integers("prompt", prompt)
            if limit is not None:
                token_ids = token_ids[-limit:] if side == "left" else token_ids[:limit]
            return None, token_ids
        if limit is None:
            return prompt, self.tokenizer.encode(prompt, add_special_tokens)
        token_ids, is_cut = self.tokenizer.encode_truncated(prompt, limit, side, add_special_tokens)
        return self.tokenizer.decode(token_ids) if is_cut else prompt, token_ids

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise InvalidRequest("prompt must hold at least one token, got 0", "prompt")
        if len(token_ids) >= self.max_model_len:
            raise InvalidRequest(
                f"prompt is {len(token_ids)} tokens long; at most {self.max_model_len - 1} fit, "
                f"which leaves one token to generate (max_model_len {self.max_model_len})",
                "prompt",
                "context_length_exceeded",
            )
        if len(token_ids) >= self.num_kv_slots:
            raise InvalidRequest(
                f"prompt is {len(token_ids)} tokens long; at most {self.num_kv_slots - 1} fit into "
                f"the KV cache, which leaves one token to generate",
                "prompt",
                "context_length_exceeded",
            )
        self.check_token_ids("prompt", token_ids)

    def check_token_ids(self, name: str, token_ids: Iterable[int]) -> None:
        """Raises `InvalidRequest` for one that is outside the vocabulary."""
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"{name} holds token id {token_id}, outside [0, {self.vocab_size})", name
                )

    def _check_params(self, params: SamplingParams) -> None:
        self.check_token_ids("logit_bias", params.logit_bias or ())
        self.check_token_ids("allowed_token_ids", params.allowed_token_ids or ())
        self.check_token_ids("stop_token_ids", params.stop_token_ids)
        for name, count in (
            ("logprobs", params.logprobs),
            ("prompt_logprobs", params.prompt_logprobs),
        ):
            self._check_num_logprobs(name, count)
        self._check_extra_args(params)

    def _check_extra_args(self, params: SamplingParams) -> None:
        if params.extra_args and not self._logits_processors:
            raise InvalidRequest(
                f"extra_args holds {next(iter(params.extra_args))!r}, but this engine has no "
                "logits_processors to read it",
                "extra_args",
            )
        for processor in self._logits_processors:
            try:
                processor.validate_params(params)
            except InvalidRequest:
                raise
            except ValueError as error:
                raise InvalidRequest(str(error), "extra_args") from error

    def _check_num_logprobs(self, name: str, count: int | None) -> None:
        if count is None:
            return
        if count == -1:
            if self.max_logprobs != -1:
                raise InvalidRequest(
                    f"{name} -1 (the whole vocabulary) exceeds the engine's max_logprobs "
                    f"({self.max_logprobs})",
                    name,
                )
        elif self.max_logprobs != -1 and count > self.max_logprobs:
            raise InvalidRequest(
                f"{name} must be at most the engine's max_logprobs ({self.max_logprobs}), "
                f"got {count}",
                name,
            )
        elif count > self.vocab_size:
            raise InvalidRequest(
                f"{name} must be at most the vocabulary's size ({self.vocab_size}), got {count}",
                name,
            )

    def _resolve(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Fill in `max_tokens` and `seed`."""
        room = self._num_slots - num_prompt_tokens
        if params.min_tokens > room:
            raise InvalidRequest(
                f"min_tokens is {params.min_tokens}; a prompt of {num_prompt_tokens} tokens leaves "
                f"room for {room} (max_model_len {self.max_model_len}, KV cache of "
                f"{self.num_kv_slots} tokens)",
                "min_tokens",
            )
        max_tokens = room if params.max_tokens is None else params.max_tokens
        seed = self._draw_seed() if params.seed is None else params.seed
        return dataclasses.replace(params, max_tokens=max_tokens, seed=seed)

    def _draw_seed(self) -> int:
        if self._draws_random_seeds:
            return random.SystemRandom().randrange(_DRAWN_SEED_LIMIT)
        key = f"{self._engine_seed} {next(self._counter)}".encode()
        digest = hashlib.blake2b(key, digest_size=8).digest()
        return int.from_bytes(digest, "little") % _SEED_LIMIT

    def _bad_words_token_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it begins a text and as it follows a space, in token ids."""
        sequences: dict[tuple[int, ...], None] = {}  # an ordered set
        for word in words:
            bare = word.lstrip(" ")
            for form in (word, bare, " " + bare):
                token_ids = tuple(self.tokenizer.encode_fragment(form))
                if form == word and not token_ids:
                    raise InvalidRequest(f"bad_words: {word!r} encodes to no token", "bad_words")
                if token_ids:
                    sequences[token_ids] = None
        for token_ids in sequences:
            self.check_token_ids("bad_words", token_ids)
        return tuple(sequences)

    def _prediction_token_ids(self, prediction: str | Sequence[int] | None) -> tuple[int, ...]:
        if prediction is None:
            return ()
        if isinstance(prediction, str):
            check_text("prediction", prediction)
            token_ids = self.tokenizer.encode_fragment(prediction)
        else:
            token_ids = _integers("prediction", prediction)
        token_ids = token_ids[: self.max_model_len]
        self.check_token_ids("prediction", token_ids)
        return tuple(token_ids)

    def _in_force(self, wishes: RequestSpeculation, has_prediction: bool) -> SpeculationReport:
        """What the engine will do about `wishes`. Refuses those that are beyond it."""
        names = tuple(self.proposers) if wishes.methods is None else wishes.methods
        for name in names:
            if name not in self.proposers:
                raise InvalidRequest(
                    f"speculative: this engine has no method {name!r}; "
                    f"it has {', '.join(self.proposers) or 'none'}",
                    "speculative",
                )
        named = [self.proposers[name] for name in names]
        limit = max((proposer.num_tokens for proposer in named), default=0)
        cap = limit if wishes.num_tokens is None else wishes.num_tokens
        if cap > limit:
            raise InvalidRequest(
                f"speculative: num_tokens must be at most {limit}, which is the most that "
                f"{' or '.join(names) or 'no method'} may draft here, got {cap}",
                "speculative",
            )
        in_force = [
            proposer
            for proposer in named
            if wishes.enabled and (has_prediction or not proposer.needs_prediction)
        ]
        return SpeculationReport(
            enabled=wishes.enabled,
            num_tokens={proposer.name: min(proposer.num_tokens, cap) for proposer in in_force},
            prediction_methods=tuple(p.name for p in in_force if p.needs_prediction),
        )


def _integers(name: str, given: object) -> list[int]:
    if isinstance(given, bytes) or not isinstance(given, Sequence):
        raise InvalidRequest(
            f"{name} must be a string or a list of token ids, got {type(given).__name__}", name
        )
    for token_id in given:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidRequest(f"{name} must hold token ids, got {token_id!r}", name)
    return list(given)


def _check_envelope(request_id: str, cache_salt: str | None, speculative_trace: bool) -> None:
    if not isinstance(request_id, str) or not request_id:
        raise InvalidRequest(
            f"request_id must be a non-empty string, got {request_id!r}", "request_id"
        )
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        raise InvalidRequest(
            f"cache_salt must be a non-empty string, got {cache_salt!r}", "cache_salt"
        )
    if cache_salt is not None:
        check_text("cache_salt", cache_salt)
    if not isinstance(speculative_trace, bool):
        raise InvalidRequest(
            f"speculative_trace must be true or false, got {speculative_trace!r}",
            "speculative_trace",
        )


def _child_params(params: SamplingParams, index: int) -> SamplingParams:
    """Completion `index` alone: its own seed; the prompt's log probabilities only once."""
    assert params.seed is not None
    if params.n == 1:
        return params
    return dataclasses.replace(
        params,
        n=1,
        seed=(params.seed + index) % _SEED_LIMIT,
        prompt_logprobs=params.prompt_logprobs if index == 0 else None,
    )
