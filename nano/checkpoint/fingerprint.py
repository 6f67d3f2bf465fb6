"""weights_fingerprint: tells one checkpoint from another without reading gigabytes. Torch-free."""

import hashlib
from pathlib import Path

_SAMPLE_BYTES = 1 << 20  # from the start (the tensor table), the middle and the end of each file


def weights_fingerprint(folder: Path) -> str:
    """Hex digest over config.json and the size and samples of every weight file in `folder`.

    It depends on contents and names only, so a copied folder keeps its fingerprint.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"|{path.name}|{size}|".encode())
        with path.open("rb") as file:
            for offset in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
