"""compile_model: a module in, a callable out. The only door to the compiler."""

from collections.abc import Callable

from torch import Tensor, nn

ForwardFn = Callable[[Tensor, Tensor], Tensor]


def compile_model(model: nn.Module, mode: str) -> ForwardFn:
    """`model.forward`, executed as `mode` says. "eager" runs it operator by operator.

    "compiled" (pieces between attention ops through Inductor) is refused by the configuration
    until it is built.
    """
    assert mode == "eager", mode
    forward: ForwardFn = model.forward
    return forward
