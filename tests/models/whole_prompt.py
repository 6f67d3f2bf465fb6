"""Run a Decoder over one whole prompt, with the plainest attention there is."""

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from nano.attention.backend import AttentionBackend, AttentionMetadata
from nano.attention.op import ForwardContext, forward_context
from nano.checkpoint.hf_config import load_decoder_config
from nano.kv_spec import LayerKVSpec
from nano.models.decoder import Decoder
from nano.models.weights import load_model


class WholePromptBackend(AttentionBackend):
    """Every token of the one prompt in one step; nothing is cached."""

    name: ClassVar[str] = "whole_prompt"

    @classmethod
    def unsupported_reason(cls, spec: LayerKVSpec, device: torch.device) -> str | None:
        return None

    def kv_cache_shape(self, spec: LayerKVSpec, num_blocks: int) -> tuple[int, ...]:
        return (0,)

    def plan(self, metadata: AttentionMetadata) -> None:
        pass

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, out: Tensor) -> None:
        group_size = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group_size, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
        out.copy_(torch.einsum("hqk,khd->qhd", weights, v))


def prompt(num_tokens: int, vocab_size: int = 260) -> Tensor:
    return torch.randint(vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(7))


def load(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    max_model_len: int | None = None,
    **how: Any,
) -> Decoder:
    """`how`: quantization and kernels, as for `load_model`."""
    config = load_decoder_config(folder)
    return load_model(
        folder,
        config,
        dtype=dtype,
        device=torch.device("cpu"),
        max_model_len=max_model_len or config.max_model_len,
        show_progress=False,
        **how,
    )


def decoder_logits(model: Decoder, input_ids: Tensor, rows: Tensor | None = None) -> Tensor:
    """[T, vocab] of a whole prompt, or its rows [L]."""
    backend = WholePromptBackend(block_size=1, scale=model.config.head_dim**-0.5)
    caches = [torch.empty(0)] * model.config.num_layers
    with torch.inference_mode(), forward_context(ForwardContext(backend, caches)):
        hidden = model(input_ids, torch.arange(len(input_ids)), rows)
        return model.compute_logits(hidden)


def hf_model(folder: Path) -> PreTrainedModel:
    """transformers' model of the same folder, in float32."""
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()


def hf_logits(model: PreTrainedModel | Path, input_ids: Tensor) -> Tensor:
    """[T, vocab] of a whole prompt, from transformers."""
    if isinstance(model, Path):
        model = hf_model(model)
    with torch.inference_mode():
        return model(input_ids[None]).logits[0]


def relative_error(logits: Tensor, reference: Tensor) -> float:
    assert logits.shape == reference.shape
    return float((logits - reference).abs().max() / reference.abs().max())
