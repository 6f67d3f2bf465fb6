"""CompiledModel: a model's forward: op by op until compiled pieces are there, then in these.

Why the change is invisible: all sums and transcendental functions of a model on our native
kernels are opaque ops, the same in both modes. What the compiler gets is elementwise arithmetic,
gathers and copies, which it may not contract. So the pieces give the *bits* of the eager model,
and this is not assumed but checked, on made-up steps with the real weights, before they are used.
Hence

- the swap may happen between any two steps, in the middle of any request;
- KV blocks computed before stay valid after it, and the numerics id does not name the mode;
- restarts agree, whichever mode each of their steps ran in.

A model on other kernels (on a GPU, in float64, or without ours) has no such promise: there the
pieces are checked by tolerance, and the id names the mode. A request ends in the numerics it began
in, so they are used from the first step on or not at all: the start waits for them, or
(`eager-first`) they are compiled on the side for the next one. Swapping them in when nobody
computes would take a new id, an empty prefix cache, and a server that rests.

Where pieces come from: the artifact store; if it has none, a child process that compiles a
skeleton of the model without weights (`CompilerProcess`). This process imports neither Dynamo nor
Inductor, except to load a GPU's pieces (`request.Form`); it traces nothing.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from nano.compile.artifact import BadArtifact, ForwardFn, load
from nano.compile.compiler_process import CompilerProcess
from nano.compile.request import CompileRequest
from nano.compile.store import ArtifactStore
from nano.log import get_logger
from nano.native.build import compiler

logger = get_logger(__name__)

# A made-up step of so many tokens under some forward; its result.
Probe = Callable[[ForwardFn, int], Tensor]
# Few tokens: between two steps of a busy engine there is time for one such step more.
_PROBE_SIZES = (1, 2, 5)
# Of the largest number, where bits are not promised: what no rounding of many layers explains.
_TOLERANCE = 1e-3
_TOLERATED_STEPS = 8  # of the dtype, if they are more
_WAIT_SECONDS = 0.02
_SHORT = 20  # characters of a factor's value that a log line shows; a digest is longer

Progress = Literal["working", "waiting"]


@dataclass(frozen=True, slots=True)
class CompileTarget:
    """A model and what compiling it needs to know."""

    model: nn.Module
    request: CompileRequest
    split_ops: Mapping[str, Callable[..., None]]  # "namespace::op" -> what runs in its place
    probe: Probe
    is_exact: bool  # whether eager and compiled are to agree bit by bit


class CompiledModel:
    """Called like `model.forward`. Owns the compiling child, if there is one.

    `prepare` before the first step, `poll` between any two, `close` at the end.
    """

    def __init__(self, target: CompileTarget, store: ArtifactStore | None):
        self.mode: Literal["eager", "compiled"] = "eager"  # now
        self.key = target.request.key  # of its artifact
        self._target = target
        self._store = store
        self._forward: ForwardFn = target.model.forward
        self._may_swap = True
        self._child: CompilerProcess | None = None
        self._work: Iterator[Progress] | None = None

    def __call__(self, input_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        return self._forward(input_ids, positions, rows)

    def prepare(self, mode: str, startup: str) -> None:
        """Settle the mode, and swap in what is stored. Waits for a compilation if it must.

        `mode` and `startup` are those of `CompileOptions`.
        """
        if not self._is_wanted(mode):
            return
        assert self._store is not None
        waits = startup == "compiled-first" or (startup == "auto" and not self._target.is_exact)
        self._work = self._swap_in(self._store, is_background=not waits)
        if waits:
            while self._work is not None:
                if self.poll() == "waiting":
                    time.sleep(_WAIT_SECONDS)
        elif self._store.find(self.key) is not None:
            while self.poll() == "working":
                pass
        self._may_swap = self._target.is_exact

    def poll(self) -> Progress | None:
        """Do a small part of the work towards compiled pieces; None when there is nothing to do.

        Never takes longer than one small step of the model, and never raises: whatever goes wrong
        here, the engine serves on.
        """
        if self._work is None:
            return None
        try:
            progress = next(self._work, None)
        except Exception as error:
            logger.error("compile mode: eager (%s: %s)", type(error).__name__, error)
            progress = None
        if progress is None:
            self._work = None
        return progress

    def close(self) -> None:
        """End the compiling child. Safe to call twice."""
        self._work = None
        if self._child is not None:
            if self._child.poll() is None:
                logger.info("stopped compiling; `python -m nano.compile` does it ahead of time")
            self._child.close()
            self._child = None

    def _is_wanted(self, mode: str) -> bool:
        """Whether to go for compiled pieces; logs why not."""
        if mode == "eager":
            return False
        request = self._target.request
        if mode == "auto" and not self._target.is_exact and request.form == "source":
            logger.info("compile mode: eager (compiled pieces are for models on native kernels)")
            return False
        if self._store is None:
            logger.warning("compile mode: eager (no home folder to keep compiled pieces in)")
            return False
        if self._store.find(self.key) is not None:
            return True
        reason = self._store.unwritable_reason()
        if compiler() is None:
            reason = "no C++ compiler was found, and no compiled pieces are stored"
        elif request.form == "bundle" and find_spec("triton") is None:
            reason = "Triton is not installed"
        if reason is not None:
            logger.warning("compile mode: eager (%s)", reason)
            return False
        logger.info("compiled pieces: %s", _why_missing(self._store.nearest(request.factors)))
        return True

    def _swap_in(self, store: ArtifactStore, *, is_background: bool) -> Iterator[Progress]:
        """Get pieces, check them, use them; a bad artifact is compiled once more."""
        for _ in range(2):
            folder = store.find(self.key)
            if folder is None:
                yield from self._compile(store, is_background)
                folder = store.find(self.key)
                if folder is None:
                    return  # why has been said
            if not self._may_swap:
                logger.info("compiled pieces are there for the next start: this one is eager")
                return
            try:
                yield from self._load(folder)
            except BadArtifact as error:
                logger.warning("compiled pieces %s are not used: %s", folder, error)
                try:
                    store.quarantine(self.key)
                except OSError as denied:
                    logger.error("compile mode: eager (%s cannot be put aside: %s)", folder, denied)
                    return
            else:
                return
        logger.error("compile mode: eager (pieces compiled anew were no better)")

    def _compile(self, store: ArtifactStore, is_background: bool) -> Iterator[Progress]:
        """Run the child to its end."""
        started = time.perf_counter()
        logger.info("compiling %s", "on the side" if is_background else "first")
        try:
            child = self._child = CompilerProcess(self._target.request, is_background=is_background)
        except OSError as error:
            logger.error("compile mode: eager (no process to compile in: %s)", error)
            return
        while child.poll() is None:
            yield "waiting"
        if child.poll() != 0:
            logger.error("compile mode: eager (compiling failed: %s)", child.last_words())
        elif store.find(self.key) is None:
            logger.error("compile mode: eager (nano's own sources have changed since the start)")
        else:
            logger.info("compiled in %.1f s", time.perf_counter() - started)
        child.close()
        self._child = None

    def _load(self, folder: Path) -> Iterator[Progress]:
        """Swap in the artifact of `folder`, or `BadArtifact` if it is not the model."""
        target = self._target
        compiled: ForwardFn | None = None
        for loaded in load(folder, target.model, target.split_ops):
            compiled = loaded
            yield "working"
        assert compiled is not None
        for num_tokens in _PROBE_SIZES:
            expected = target.probe(target.model.forward, num_tokens)
            yield "working"
            try:
                result = target.probe(compiled, num_tokens)
            except Exception as error:  # generated code may raise anything
                raise BadArtifact(f"{type(error).__name__}: {error}") from error
            if not _agree(result, expected, is_exact=target.is_exact):
                raise BadArtifact(f"another result than the eager model's at {num_tokens} tokens")
            yield "working"
        self._forward = compiled
        self.mode = "compiled"
        logger.info("compiled pieces in use (%s)", folder)


def _agree(result: Tensor, expected: Tensor, *, is_exact: bool) -> bool:
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    if is_exact:  # bits: zeros have a sign, and a NaN equals itself
        return torch.equal(
            result.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
        )
    tolerance = max(_TOLERANCE, _TOLERATED_STEPS * torch.finfo(expected.dtype).eps)
    largest = expected.abs().max().item()
    return (result - expected).abs().max().item() <= tolerance * largest


def _why_missing(nearest: dict[str, tuple[str, str]] | None) -> str:
    if nearest is None:
        return "none are stored yet"
    differences = [
        f"{name} ({theirs}, now {ours})" if max(len(theirs), len(ours)) <= _SHORT else name
        for name, (theirs, ours) in nearest.items()
    ]
    return f"none are stored for this; the nearest differ in {', '.join(differences)}"
