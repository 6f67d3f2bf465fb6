"""Models: checkpoints in the shapes of real ones, with random weights, made on the spot.

The numbers are random and the sizes are not, so a step takes the time that it takes with a trained
model. Logits are made to differ clearly: the first `_NUM_LOUD` tokens have embeddings larger than
all others, and among these the text goes on. Else every other token would be a near-tie.
"""

import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from nano.checkpoint.hf_config import load_decoder_config
from nano.checkpoint.safetensors_writer import TensorEntry, write_safetensors
from nano.errors import CheckpointError
from nano.models.decoder import Decoder
from nano.models.registry import MODEL_CLASSES
from nano.models.weights import weight_shapes

_NUM_LOUD = 64
_QUIET = 0.25  # of a loud token's size
_LOGITS_STD = 2.0  # among the loud
# Of what all layers add to a token's own embedding. With less of it the text would be one token
# over and over, as the output layer is the embedding once more.
_RESIDUAL_GAIN = 6.0
_DRAFT_SHARE = 8  # a target has so many times the layers of its draft
_MAX_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides about the time of a step."""

    name: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    is_tied: bool

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def draft(self) -> "Shape":
        """A smaller model of the same vocabulary."""
        num_layers = max(1, self.num_layers // _DRAFT_SHARE)
        return replace(self, name=f"{self.name}-draft", num_layers=num_layers)

    def config(self) -> dict[str, object]:
        """config.json, as Hugging Face has it."""
        return {
            "architectures": [self.architecture],
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.is_tied,
            "max_position_embeddings": _MAX_CONTEXT,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
        }


# SmolLM2-135M, Qwen2.5-1.5B, Llama-3.1-8B, and one for the tests of this program.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", "LlamaForCausalLM", 64, 128, 2, 4, 2, 512, True),
        Shape("135M", "LlamaForCausalLM", 576, 1536, 30, 9, 3, 49152, True),
        Shape("1.5B", "Qwen2ForCausalLM", 1536, 8960, 28, 12, 2, 151936, True),
        Shape("8B", "LlamaForCausalLM", 4096, 14336, 32, 32, 8, 128256, False),
    )
}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Of the model in a folder, as far as the time of a step depends on it."""

    num_weights: int  # in matrices that every token passes: the output layer is one of them
    num_output_weights: int  # of these, what only tokens with logits pass
    kv_values_per_token: int  # keys and values of all layers
    vocab_size: int


class Models:
    """Folders of checkpoints, each written when it is first asked for."""

    def __init__(self, folder: Path, device: torch.device, given: Path | None = None):
        """given: a real model, which takes the place of every shape and has no draft."""
        self._folder = folder
        self._device = device
        self._given = given
        self.writing: dict[str, tuple[int, float]] = {}  # name -> bytes, seconds

    def target(self, name: str) -> Path:
        """Raises `CheckpointError` without room on the disk."""
        return self._given or self._written(SHAPES[name])

    def draft(self, name: str) -> Path:
        """What guesses for `target(name)`; a given model guesses for itself."""
        return self._given or self._written(SHAPES[name].draft)

    def _written(self, shape: Shape) -> Path:
        folder = self._folder / shape.name
        if shape.name not in self.writing:
            began = time.perf_counter()
            num_bytes = write_checkpoint(folder, shape, self._device)
            self.writing[shape.name] = num_bytes, time.perf_counter() - began
        return folder


def write_checkpoint(folder: Path, shape: Shape, device: torch.device) -> int:
    """Random bfloat16 weights, drawn on `device`, and a tokenizer of bytes. Returns their bytes.

    Raises `CheckpointError` without room on the disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config()), encoding="utf-8")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    shapes = weight_shapes(_empty_model(folder))
    entries = {name: TensorEntry("BF16", size) for name, size in shapes.items()}
    num_bytes = sum(entry.num_bytes for entry in entries.values())
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise CheckpointError(
            f"{shape.name}: {num_bytes / 1e9:.1f} GB of weights do not fit the "
            f"{free / 1e9:.1f} GB that are free in {folder} (--work-folder)"
        )
    write_safetensors(folder / "model.safetensors", entries, _weights(shapes, device))
    return num_bytes


def size_of(folder: Path) -> ModelSize:
    model = _empty_model(folder)
    config = model.config
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    if not config.tie_word_embeddings:
        num_weights -= config.vocab_size * config.hidden_size  # a step looks up a few rows of it
    return ModelSize(
        num_weights=num_weights,
        num_output_weights=config.vocab_size * config.hidden_size,
        kv_values_per_token=2 * config.num_layers * config.num_kv_heads * config.head_dim,
        vocab_size=config.vocab_size,
    )


def _empty_model(folder: Path) -> Decoder:
    config = load_decoder_config(folder)
    with torch.device("meta"):
        return MODEL_CLASSES[config.architecture](
            config, dtype=torch.bfloat16, max_model_len=config.max_model_len
        )


def _weights(shapes: dict[str, tuple[int, ...]], device: torch.device) -> Iterator[np.ndarray]:
    """One after the other, as the integers that bfloat16 spells: numpy has none."""
    generator = torch.Generator(device).manual_seed(0)
    num_layers = sum(name.endswith("o_proj.weight") for name in shapes)
    gain = _RESIDUAL_GAIN / math.sqrt(num_layers)
    for name, shape in shapes.items():
        weight = torch.randn(shape, generator=generator, device=device)
        if name.endswith("norm.weight"):
            weight = 1.0 + 0.1 * weight
        elif len(shape) == 1:  # a bias
            weight *= 0.05
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            weight *= _LOGITS_STD / math.sqrt(shape[1])
            weight[_NUM_LOUD:] *= _QUIET
        else:
            weight /= math.sqrt(shape[1])
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight *= gain
        yield weight.to(torch.bfloat16).view(torch.int16).cpu().numpy().view("<u2")
