"""load_model: a checkpoint folder -> a Decoder whose every parameter is filled, or an error.

The model is built on the meta device; then each layer is given its weights, read from the mapped
files and put into the form that it runs on: the peak is the model and one matrix.
"""

import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nano.checkpoint.hf_config import DecoderConfig
from nano.errors import CheckpointError, NanoError
from nano.layers.embedding import Embedding
from nano.layers.kernels import Kernels, TorchKernels
from nano.layers.linear import FusedLinear, Linear
from nano.layers.packed_weight import PackedWeight
from nano.log import get_logger
from nano.models.decoder import Decoder
from nano.models.registry import MODEL_CLASSES
from nano.models.weight_sources import CheckpointWeights, RandomWeights, WeightSource
from nano.models.weight_storage import WeightStorage
from nano.quant.records import Record

logger = get_logger(__name__)


def load_model(
    folder: Path,
    decoder_config: DecoderConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    load_format: str = "auto",
    quantization: str | None = None,
    kernels: Kernels | None = None,
    show_progress: bool = True,
) -> Decoder:
    """Build the model and fill it from `folder`; `load_format="dummy"` reads no file.

    Floats are converted to `dtype`. With `kernels` linear layers are packed for them, one by one.
    `quantization` is resolved: what the checkpoint holds, or a scheme of `weight_storage`.

    Raises `CheckpointError` naming file and tensor for anything missing, unexpected, damaged or of
    another shape; `ConfigError` for a scheme that cannot run here.
    """
    start = time.perf_counter()
    storage = WeightStorage(
        quantization, dtype=dtype, device=device, kernels=kernels or TorchKernels()
    )
    with torch.device("meta"):
        model_class = MODEL_CLASSES[decoder_config.architecture]
        model = model_class(decoder_config, dtype=dtype, max_model_len=max_model_len)
    source: WeightSource
    if load_format == "dummy":
        source = RandomWeights()
    else:
        source = CheckpointWeights(folder, decoder_config.quantization)
    shapes = weight_shapes(model)
    source.check_names(shapes, is_tied=decoder_config.tie_word_embeddings)
    # None: a bar on a terminal, silence in a log file.
    with tqdm(
        total=len(shapes), desc="weights", disable=None if show_progress else True
    ) as progress:
        _fill(model, source, storage, shapes, progress)
    _move_buffers(model, device)
    logger.info(
        "weights: %s, %.2f GB %s, %.2f GB in memory (%s), %.1f s",
        quantization or "as they are",
        source.num_bytes / 1e9,
        "made up" if load_format == "dummy" else "read",
        _num_bytes(model) / 1e9,
        storage_formats(model),
        time.perf_counter() - start,
    )
    return model.eval()


def storage_formats(model: nn.Module) -> str:
    """In which formats the matrices of `model` are, and how many in each."""
    formats = Counter(
        module.format for module in model.modules() if isinstance(module, PackedWeight)
    )
    for parameter in model.parameters():
        if parameter.ndim == 2:
            formats[f"plain {parameter.dtype}".replace("torch.", "")] += 1
    return ", ".join(f"{count} {name}" for name, count in sorted(formats.items()))


def weight_shapes(model: Decoder) -> dict[str, tuple[int, ...]]:
    """Checkpoint name and shape of everything that `model` is made of, in its order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            for shard, size in _shards(path, module, parameter.shape[0]):
                shapes[f"{shard}.{name}"] = (size, *parameter.shape[1:])
    return shapes


def _shards(path: str, module: nn.Module, num_outputs: int) -> list[tuple[str, int]]:
    """Under which names a checkpoint has the module's outputs, and how many under each."""
    prefix = "" if path == "lm_head" else "model."
    if not isinstance(module, FusedLinear):
        return [(f"{prefix}{path}", num_outputs)]
    parent = path.rpartition(".")[0]
    return [
        (f"{prefix}{parent}.{shard}", rows.stop - rows.start)
        for shard, rows in module.shards.items()
    ]


def _fill(
    model: Decoder,
    source: WeightSource,
    storage: WeightStorage,
    shapes: dict[str, tuple[int, ...]],
    progress: tqdm,
) -> None:
    """Module by module, each from its weights and biases in the checkpoint's order."""
    is_tied = model.lm_head is None
    for path, module in list(model.named_modules()):
        names = [name for name, _ in _shards(path, module, 0)]
        read: dict[str, list[Tensor | Record]] = {}
        for kind, _ in module.named_parameters(recurse=False):
            read[kind] = [source.read(f"{name}.{kind}", shapes[f"{name}.{kind}"]) for name in names]
            progress.update(len(names))
        try:
            if isinstance(module, Linear):
                bias = torch.cat(_floats(read["bias"])) if "bias" in read else None
                storage.fill_linear(module, read["weight"], bias, is_output=path == "lm_head")
            elif isinstance(module, Embedding):
                storage.fill_embedding(module, read["weight"][0], is_tied=is_tied)
            else:
                for kind, weights in read.items():
                    setattr(module, kind, storage.parameter(_floats(weights)[0]))
        except NanoError:
            raise
        except ValueError as error:  # weights that a scheme or a format cannot hold
            raise CheckpointError(f"{', '.join(names)}: {error}") from error


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Those that a layer makes for itself are never on the meta device, but may be on another."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))


def _floats(weights: list[Tensor | Record]) -> list[Tensor]:
    """Of what is no matrix, and therefore never quantised."""
    floats = [weight for weight in weights if isinstance(weight, Tensor)]
    assert len(floats) == len(weights)
    return floats


def _num_bytes(model: nn.Module) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.nbytes for tensor in tensors)
