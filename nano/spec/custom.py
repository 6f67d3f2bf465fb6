"""CustomProposer: a class of the user's own, named by its import path, that looks at text.

Owner of the one instance of that class, and of the promise that its mistakes harm no request.
"""

import importlib
from typing import Any

import numpy as np

from nano.errors import ConfigError
from nano.log import get_logger
from nano.spec.options import ProposerOptions
from nano.spec.proposer import TextProposer
from nano.step import NewRequest

logger = get_logger(__name__)


class CustomProposer(TextProposer):
    """Calls the class at `import_path`, "module:Class" or "module.Class", in the worker's process.

    It takes the options it is listed with, and answers `propose` with a list of token ids; whatever
    it guesses, the output stays what it is without. Of more than `num_tokens` guesses the first
    are taken. If it raises, or returns anything but ids in [0, vocab_size), that counts as no
    guess, and is logged the first time. `forget` is optional, and called when a request ends or is
    preempted, whether or not `propose` was ever called for it. For example, `successors.py`:

        import numpy as np
        from nano.spec.options import ProposerOptions

        class Successors:
            '''Guesses that each token is followed by what followed it last.'''

            def __init__(self, options: ProposerOptions):
                self.seen: dict[str, tuple[int, dict[int, int]]] = {}

            def propose(
                self, request_id: str, token_ids: np.ndarray, num_tokens: int
            ) -> list[int]:
                # token_ids: int32 [n], prompt and output so far; read-only, valid in this call.
                num_seen, successors = self.seen.get(request_id, (0, {}))
                new = token_ids[max(0, num_seen - 1) :].tolist()
                successors.update(zip(new, new[1:]))
                self.seen[request_id] = len(token_ids), successors
                drafts, token_id = [], new[-1]
                while len(drafts) < num_tokens and token_id in successors:
                    token_id = successors[token_id]
                    drafts.append(token_id)
                return drafts

            def forget(self, request_id: str) -> None:
                self.seen.pop(request_id, None)

    is used by `--speculative-config '{"method": "custom_class",
    "model": "successors:Successors"}'`.

    Raises `ConfigError` if there is no such class, it has no `propose`, or cannot be made.
    """

    def __init__(self, import_path: str, options: ProposerOptions, vocab_size: int):
        self._import_path = import_path
        self._vocab_size = vocab_size
        self._has_failed = False
        kind = _load(import_path)
        try:
            self._proposer = kind(options)
        except Exception as error:
            raise _refusal(import_path, f"cannot be made: {error!r}") from error

    def start(self, request: NewRequest) -> None:
        pass

    def advance(self, request_id: str, token_ids: np.ndarray) -> None:
        pass

    def propose(self, request_id: str, token_ids: np.ndarray, num_tokens: int) -> list[int]:
        view = token_ids.view()
        view.flags.writeable = False
        try:
            drafts = self._proposer.propose(request_id, view, num_tokens)
        except Exception as error:
            self._report(f"propose raised {error!r}")
            return []
        if not isinstance(drafts, list):
            self._report(f"propose returned {type(drafts).__name__}, not a list")
            return []
        drafts = drafts[:num_tokens]
        for token_id in drafts:
            is_integer = isinstance(token_id, (int, np.integer)) and not isinstance(token_id, bool)
            if not is_integer or not 0 <= token_id < self._vocab_size:
                self._report(f"propose returned {token_id!r}, not in [0, {self._vocab_size})")
                return []
        return [int(token_id) for token_id in drafts]

    def forget(self, request_id: str, *, has_ended: bool) -> None:
        forget = getattr(self._proposer, "forget", None)
        if forget is None:
            return
        try:
            forget(request_id)
        except Exception as error:
            self._report(f"forget raised {error!r}")

    def _report(self, what: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.warning(
                "proposer %s: %s; such guesses are left out, and not reported again",
                self._import_path,
                what,
            )


def _load(import_path: str) -> Any:
    module_name, colon, class_name = import_path.partition(":")
    if not colon:
        module_name, _, class_name = import_path.rpartition(".")
    if not module_name or not class_name:
        raise _refusal(import_path, 'is not of the form "module:Class" or "module.Class"')
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything while it is imported
        raise _refusal(import_path, f"cannot be imported: {error!r}") from error
    kind = getattr(module, class_name, None)
    if not isinstance(kind, type):
        raise _refusal(import_path, f"names no class: {module_name} has no class {class_name!r}")
    if not callable(getattr(kind, "propose", None)):
        raise _refusal(import_path, "has no method propose")
    return kind


def _refusal(import_path: str, why: str) -> ConfigError:
    return ConfigError(f"speculative_config: proposer {import_path!r} {why}")
