"""The attention half of a decoder layer. T tokens, D head dim."""

from torch import Tensor, nn

from nano.attention.op import attention
from nano.checkpoint.hf_config import DecoderConfig
from nano.layers.linear import FusedLinear, Linear
from nano.layers.norm import RMSNorm
from nano.layers.rotary import apply_rotary


class Attention(nn.Module):
    """Grouped-query causal attention over the requests of a step.

    It knows neither requests nor cache: `nano.attention.op` finds those of layer `layer_index` in
    the forward context.
    """

    def __init__(self, config: DecoderConfig, layer_index: int):
        super().__init__()
        self.layer_index = layer_index
        self.head_dim = config.head_dim
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        shard_sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = FusedLinear(config.hidden_size, shard_sizes, config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, config.o_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, rows: Tensor | None) -> Tensor:
        """hidden [T, hidden]; cos, sin [T, 1, D / 2]. Returns [T, hidden]; or only `rows` [L]."""
        projections = self.qkv_proj.split(self.qkv_proj(hidden))
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in projections)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        # q and k are fresh; v is still a view into the fused projection, whose rows lie apart.
        attended = attention(q, k, v, self.layer_index).flatten(1)
        out: Tensor = self.o_proj(attended if rows is None else attended.index_select(0, rows))
        return out
