"""nano: a compact LLM inference engine. `from nano import LLM, SamplingParams`."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "LogitsProcessor", "RequestOutput", "SamplingParams"]

_HOME = {
    "LLM": "nano.llm",
    "SamplingParams": "nano.sampling_params",
    "EngineConfig": "nano.config",
    "RequestOutput": "nano.outputs",
    "LogitsProcessor": "nano.sampling.logits_processor",
}

if TYPE_CHECKING:  # for editors and type checkers; at run time names are imported when used
    from nano.config import EngineConfig
    from nano.llm import LLM
    from nano.outputs import RequestOutput
    from nano.sampling.logits_processor import LogitsProcessor
    from nano.sampling_params import SamplingParams


def __getattr__(name: str) -> Any:
    # Lazy, so that the torch-free parts can be imported without torch coming along.
    if name not in _HOME:
        raise AttributeError(f"module 'nano' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
