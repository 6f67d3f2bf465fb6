"""ArtifactStore: compiled pieces on disk, one folder per key. Torch-free.

    <key>/         see artifact.py
    <key>.lock     held by whoever builds <key>; the kernel lets go of it when the holder dies
    <key>.bad/     what was found damaged or wrong, kept to be looked at
    <key>.*.tmp/   being built; renamed to <key>/ when complete

Many processes may use one store. A folder is complete or not there, since it is renamed into
place; what a killed builder left is removed by the next one that holds its lock.
"""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

MANIFEST = "manifest.json"


class ArtifactStore:
    """Finds, builds and quarantines artifacts. Reading needs no permission to write."""

    def __init__(self, root: Path):
        self.root = root

    @classmethod
    def default(cls) -> "ArtifactStore | None":
        """In the user's cache folder; None if there is no home to have one in."""
        told = os.environ.get("XDG_CACHE_HOME")
        try:
            root = Path(told) if told else Path.home() / ".cache"
        except RuntimeError:
            return None
        return cls(root / "nano" / "compiled")

    def find(self, key: str) -> Path | None:
        """The folder of a complete artifact."""
        folder = self.root / key
        return folder if os.path.exists(folder / MANIFEST) else None  # False, too, if forbidden

    def unwritable_reason(self) -> str | None:
        """Why nothing can be built here, in words; None if it can."""
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=self.root):
                return None
        except OSError as error:
            return f"{self.root} cannot be written to: {error.strerror or error}"

    @contextmanager
    def building(self, key: str) -> Iterator[Path | None]:
        """Hold the lock of `key`, and yield an empty folder that becomes its artifact.

        Waits for another builder; None if that one has built it. After an error nothing is left.
        """
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._locked(key, waits=True):
            self._remove_abandoned(key)
            if self.find(key) is not None:
                yield None
                return
            unfinished = Path(tempfile.mkdtemp(prefix=f"{key}.", suffix=".tmp", dir=self.root))
            try:
                yield unfinished
                shutil.rmtree(self.root / key, ignore_errors=True)  # one without a manifest
                unfinished.rename(self.root / key)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)

    def quarantine(self, key: str) -> None:
        """Put an artifact aside, to be built anew. Raises `OSError` if that is forbidden."""
        folder, bad = self.root / key, self.root / f"{key}.bad"
        with suppress(FileNotFoundError):  # another process was faster
            folder.stat()
            shutil.rmtree(bad, ignore_errors=True)
            folder.rename(bad)

    def nearest(self, factors: dict[str, str]) -> dict[str, tuple[str, str]] | None:
        """How the most similar artifact differs: factor -> (its value, ours). None without any."""
        differences = []
        for manifest in self.root.glob(f"*/{MANIFEST}"):
            if "." in manifest.parent.name:
                continue  # put aside, or unfinished
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                theirs = json.loads(manifest.read_bytes())["factors"]
                differences.append(
                    {
                        name: (theirs.get(name, "none"), factors.get(name, "none"))
                        for name in factors | theirs
                        if theirs.get(name) != factors.get(name)
                    }
                )
        return min(differences, key=len, default=None)

    def _remove_abandoned(self, held: str) -> None:
        """Remove what killed builders left: unfinished folders of `held`, whose lock is ours, and
        of keys whose lock nobody holds."""
        for unfinished in self.root.glob("*.tmp"):
            key = unfinished.name.partition(".")[0]
            lock = nullcontext() if key == held else self._locked(key, waits=False)
            with suppress(BlockingIOError), lock:
                shutil.rmtree(unfinished, ignore_errors=True)

    @contextmanager
    def _locked(self, key: str, *, waits: bool) -> Iterator[None]:
        with (self.root / f"{key}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
