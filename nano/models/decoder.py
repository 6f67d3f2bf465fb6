"""Decoder: the dense transformer of Llama, Mistral, Qwen2 and Qwen3.

One class with flags from `DecoderConfig`: where these families differ (biases, q/k norms, RoPE,
tied output) is data. Module names are those of Hugging Face checkpoints, less the "model." prefix.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from nano.checkpoint.hf_config import DecoderConfig
from nano.kv_spec import LayerKVSpec
from nano.layers.attention import Attention
from nano.layers.embedding import Embedding
from nano.layers.huge_pages import move_to_huge_pages
from nano.layers.kernels import Kernels
from nano.layers.linear import Linear
from nano.layers.mlp import SwiGLU
from nano.layers.norm import RMSNorm
from nano.layers.rotary import RotaryEmbedding


class DecoderLayer(nn.Module):
    """Attention, then feed-forward, each normalised before and added to the residual after."""

    def __init__(self, config: DecoderConfig, layer_index: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer_index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """rows [L] int64: who has a use for the result; None: all. The others end at attention."""
        attended = self.self_attn(self.input_layernorm(hidden), cos, sin, rows)
        hidden = attended + (hidden if rows is None else hidden.index_select(0, rows))
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Decoder(nn.Module):
    """A model as a function of tokens and positions, called inside a `forward_context`.

    `dtype` is what it computes in. `max_model_len` is the longest context it will be given; only
    dynamic RoPE depends on it. Parameters are uninitialised until `nano.models.weights` fills
    them.
    """

    # Of `forward` as the engine calls it: dtype, and the name of the one dimension's size.
    INPUTS: ClassVar[dict[str, tuple[str, str]]] = {
        "input_ids": ("int32", "num_tokens"),
        "positions": ("int64", "num_tokens"),
        "rows": ("int64", "num_rows"),
    }

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, max_model_len: int):
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = RotaryEmbedding(config.rope, config.head_dim, max_model_len, dtype)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = (
            None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)
        )

    def forward(self, input_ids: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """input_ids [T] int, positions [T] int64 -> final hidden states [L, hidden].

        Those of the tokens `rows` [L] int64, of [T]; None: of all. The last layer computes no
        others: of a prompt it is little more than keys and values that are wanted there.
        """
        hidden: Tensor = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(positions)
        *layers, last = self.layers
        for layer in layers:
            hidden = layer(hidden, cos, sin)
        hidden = last(hidden, cos, sin, rows)
        out: Tensor = self.norm(hidden)
        return out

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [L, hidden], any of `forward`'s result -> logits [L, vocab].

        In float32 at least, whatever the model computes in: that is what samplers take, and
        probabilities of 8 bits would tell little.
        """
        output = self.embed_tokens.logits if self.lm_head is None else self.lm_head
        logits: Tensor = output(hidden)
        return logits if logits.dtype.itemsize > 2 else logits.float()

    def pack(self, kernels: Kernels) -> None:
        """Compute with `kernels` from now on: filled weights are traded for what these read."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack(kernels)
            elif isinstance(module, Embedding):
                module.pack(kernels, for_logits=self.lm_head is None)
            elif isinstance(module, RMSNorm | SwiGLU):
                module.kernels = kernels
        move_to_huge_pages(self)

    def kv_specs(self, dtype: str) -> list[LayerKVSpec]:
        """What each layer caches when keys and values are stored as `dtype`, by layer_index."""
        config = self.config
        return [
            LayerKVSpec(f"layers.{i}", config.num_kv_heads, config.head_dim, dtype)
            for i in range(config.num_layers)
        ]
