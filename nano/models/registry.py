"""Which class runs which architecture."""

from nano.models.decoder import Decoder

# Keys are the names that `nano.checkpoint.hf_config` lets through.
MODEL_CLASSES: dict[str, type[Decoder]] = {
    "LlamaForCausalLM": Decoder,
    "MistralForCausalLM": Decoder,
    "Qwen2ForCausalLM": Decoder,
    "Qwen3ForCausalLM": Decoder,
}
