"""compile_skeleton: what the compiling child does once it holds the lock."""

from pathlib import Path

import torch
from torch import nn

from nano.compile.build_artifact import build_artifact
from nano.compile.request import CompileRequest
from nano.compile.skeleton import load_skeleton
from nano.layers.native_kernels import NativeKernels
from nano.layers.packed_weight import PackedWeight


def compile_skeleton(request: CompileRequest, folder: Path) -> None:
    """Compile what `request` describes into the empty `folder`."""
    torch.set_num_threads(1)
    model = load_skeleton(request.skeleton, request.device)
    if request.device == "cpu":
        _load_ops(model)
    build_artifact(model, request.inputs, request.split_ops, request.factors, folder, request.form)


def _load_ops(model: nn.Module) -> None:
    """Load the native ops that a model will call. Its parts ask for theirs when they are made, but
    not when they are unpickled."""
    NativeKernels.is_available()
    for kind in {type(module) for module in model.modules()}:
        if issubclass(kind, PackedWeight) and hasattr(kind, "is_available"):
            kind.is_available()
