"""weights_fingerprint: tells one checkpoint from another without reading gigabytes. Torch-free."""

import hashlib
import json
import struct
from pathlib import Path

from nano.checkpoint.quantization_config import QUANTIZATION_FILES

_SAMPLE_BYTES = 4096  # from the start and the middle of each tensor


def weights_fingerprint(folder: Path) -> str:
    """Hex digest over what says how to read the weights, and for every weight file its tensor table
    and samples of each tensor: a fine-tune that touched any one of them has another fingerprint.

    It depends on contents and names only, so a copied folder keeps its fingerprint.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in (folder / name for name in QUANTIZATION_FILES):
        if path.exists():
            digest.update(path.name.encode() + path.read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (header_size,) = struct.unpack("<Q", file.read(8))
            header = file.read(header_size)
            digest.update(path.name.encode() + header)
            for name, tensor in sorted(json.loads(header).items()):
                if name == "__metadata__":
                    continue
                start, end = tensor["data_offsets"]
                for offset in (start, (start + end) // 2):
                    file.seek(8 + header_size + offset)
                    digest.update(file.read(min(_SAMPLE_BYTES, end - offset)))
    return digest.hexdigest()
