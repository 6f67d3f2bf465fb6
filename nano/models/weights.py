"""load_model: a checkpoint folder -> a Decoder whose every parameter is filled, or an error.

The model is built on the meta device, given memory once, and each tensor of the mapped files is
copied straight to its place: the peak is the model and one tensor.
"""

import re
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nano.checkpoint.hf_config import DecoderConfig
from nano.errors import CheckpointError
from nano.layers.linear import FusedLinear
from nano.log import get_logger
from nano.models.decoder import Decoder
from nano.models.registry import MODEL_CLASSES
from nano.models.weight_files import WeightFiles, read_tensors

logger = get_logger(__name__)

_FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Written by old exporters; computed from the config here.
_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_DUMMY_STD = 0.02


def load_model(
    folder: Path,
    decoder_config: DecoderConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    load_format: str = "auto",
    show_progress: bool = True,
) -> Decoder:
    """Build the model and fill it from `folder`; `load_format="dummy"` reads no file.

    Weights are converted to `dtype` as they are copied. Raises `CheckpointError` naming file and
    tensor for anything missing, unexpected, damaged or of another shape.
    """
    start = time.perf_counter()
    with torch.device("meta"):
        model_class = MODEL_CLASSES[decoder_config.architecture]
        model = model_class(decoder_config, dtype=dtype, max_model_len=max_model_len)
    _allocate(model, dtype, device)
    if load_format == "dummy":
        _fill_randomly(model)
    else:
        _fill_from_files(model, folder, show_progress)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    logger.info(
        "%s weights: %.2f GB of %s in %.1f s",
        "random" if load_format == "dummy" else "loaded",
        num_bytes / 1e9,
        str(dtype).removeprefix("torch."),
        time.perf_counter() - start,
    )
    return model.eval()


def weight_slots(model: Decoder) -> dict[str, Tensor]:
    """Checkpoint tensor name -> where it goes: a parameter, or a fused parameter's rows."""
    slots: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        prefix = "" if path == "lm_head" else "model."
        if isinstance(module, FusedLinear):
            parent = path.rpartition(".")[0]
            for name, parameter in module.named_parameters():
                for shard, rows in module.shards.items():
                    slots[f"{prefix}{parent}.{shard}.{name}"] = parameter[rows]
        else:
            for name, parameter in module.named_parameters(recurse=False):
                slots[f"{prefix}{path}.{name}"] = parameter
    return slots


def _allocate(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Replace meta parameters by uninitialised memory. Buffers were never meta."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            memory = torch.empty_like(parameter, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(memory, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _fill_from_files(model: Decoder, folder: Path, show_progress: bool) -> None:
    files = WeightFiles.find(folder)
    slots = weight_slots(model)
    ignored = {name for name in files.names if _is_ignored(name, model.config)}
    _check_names(files, slots, ignored, folder)
    # None: a bar on a terminal, silence in a log file.
    with tqdm(
        total=len(slots), desc="weights", disable=None if show_progress else True
    ) as progress:
        for file, names in files.names_by_file.items():
            wanted = [name for name in names if name not in ignored]
            for name, tensor in read_tensors(file, wanted):
                _copy(tensor, slots[name], file, name)
                progress.update()


def _is_ignored(name: str, config: DecoderConfig) -> bool:
    """A tied model's output is its embedding whatever lm_head.weight a file may hold."""
    if name == "lm_head.weight":
        return config.tie_word_embeddings
    return _IGNORED.fullmatch(name) is not None


def _check_names(
    files: WeightFiles, slots: dict[str, Tensor], ignored: set[str], folder: Path
) -> None:
    found = files.names
    missing = [name for name in slots if name not in found]
    if missing:
        raise CheckpointError(f"{folder} lacks {_list(missing)}, which its config.json implies")
    unexpected = [name for name in found if name not in slots and name not in ignored]
    if unexpected:
        raise CheckpointError(
            f"{found[unexpected[0]]} holds {_list(unexpected)}, for which a model of its "
            "config.json has no place"
        )


def _copy(tensor: Tensor, slot: Tensor, file: Path, name: str) -> None:
    if tensor.dtype not in _FLOAT_DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOAT_DTYPES)
        raise CheckpointError(f"{file}: {name} is {tensor.dtype}; nano loads {known}")
    if tensor.shape != slot.shape:
        raise CheckpointError(
            f"{file}: {name} has shape {tuple(tensor.shape)}, expected {tuple(slot.shape)}"
        )
    slot.copy_(tensor)


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _fill_randomly(model: Decoder) -> None:
    """Small weights from a fixed seed, the same on every device and in every dtype."""
    generator = torch.Generator().manual_seed(0)
    for name, slot in weight_slots(model).items():
        if name.endswith("norm.weight"):
            slot.fill_(1.0)
        else:
            slot.copy_(torch.randn(slot.shape, generator=generator) * _DUMMY_STD)
