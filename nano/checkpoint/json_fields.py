"""Typed reads from a checkpoint's JSON. Every complaint names the file, the key and the value."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nano.errors import CheckpointError


class JsonFields:
    """One JSON object of a checkpoint. A key set to null counts as absent.

    `integer`, `number`, `boolean` and `text` return the value of `key`, else `default`; with no
    default the key is required. All raise `CheckpointError` on a value of another type.
    """

    def __init__(self, file: Path, values: Mapping[str, Any], section: str = ""):
        self.file = file
        self.values = values
        self._prefix = f"{section}." if section else ""

    @classmethod
    def read(cls, file: Path) -> "JsonFields":
        try:
            values = json.loads(file.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(f"{file} does not exist") from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{file} must hold a JSON object, found {_short(values)}")
        return cls(file, values)

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def error(self, key: str, wanted: str) -> CheckpointError:
        """The complaint about `key`: what is wanted instead of what it holds."""
        found = _short(self.values[key]) if key in self.values else "absent"
        return CheckpointError(f"{self.file}: {self._prefix}{key} is {found}; {wanted}")

    def refuse_unknown(self, known: Iterable[str]) -> None:
        known = sorted(known)
        for key, value in self.values.items():
            if key not in known and value is not None:
                raise self.error(key, f"nano does not know this key here, only {', '.join(known)}")

    def integer(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.error(key, f"it must be an integer of at least {low}")
        return value

    def number(self, key: str, default: float | None = None, *, low: float = -math.inf) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "it must be a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number < low:
            raise self.error(key, f"it must be finite and at least {low}")
        return number

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "it must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, "it must be a string")
        return value

    def section(self, key: str) -> "JsonFields":
        """The object under `key`; empty if absent."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self.error(key, "it must be an object")
        return JsonFields(self.file, value, f"{self._prefix}{key}")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """An id or a list of ids; empty if absent."""
        value = self._value(key, [])
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise self.error(key, "it must be a token id or a list of token ids")
        return tuple(ids)

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
