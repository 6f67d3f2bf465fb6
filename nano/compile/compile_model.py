"""compile_model: a module in, a callable out. The only door to the compiler."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from nano.compile.piecewise import CompileReport, PiecewiseBackend, compile_with_inductor

ForwardFn = Callable[[Tensor, Tensor], Tensor]

_TRACE_TOKENS = 8  # the size that the compiler tunes for; any other is served as well


class CompiledModel:
    """`model.forward` in compiled pieces. The first call traces and compiles, for every size.

    Guards are dropped: whatever the trace read of the model is frozen, and no later call can
    cause a recompilation.
    """

    def __init__(self, model: nn.Module, split_ops: Sequence[str]) -> None:
        self._backend = PiecewiseBackend(split_ops, compile_with_inductor)
        self._forward: ForwardFn = torch.compile(
            model.forward,
            backend=self._backend,
            fullgraph=True,
            dynamic=False,
            options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},
        )

    @property
    def report(self) -> CompileReport | None:
        """What compiling did; None before the first call."""
        return self._backend.report

    def __call__(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        if self.report is None:
            # An unbacked size has no value to specialise on: one graph serves 1 to the budget.
            input_ids, positions = input_ids.clone(), positions.clone()
            for tensor in (input_ids, positions):
                torch._dynamo.decorators.mark_unbacked(
                    tensor, 0, hint_override=_TRACE_TOKENS, shape_id="T"
                )
        return self._forward(input_ids, positions)


def compile_model(model: nn.Module, mode: str, *, split_ops: Sequence[str] = ()) -> ForwardFn:
    """`model.forward` as `mode` says: "eager", op by op, or "compiled", in pieces between
    `split_ops`."""
    if mode == "compiled":
        return CompiledModel(model, split_ops)
    assert mode == "eager", mode
    forward: ForwardFn = model.forward
    return forward
