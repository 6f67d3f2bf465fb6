"""Every error nano raises on purpose. A message names the field, the value and the limit."""


class NanoError(Exception):
    """Root of nano's own errors."""


class InvalidRequest(NanoError, ValueError):
    """One request cannot be served as asked. Only that request fails.

    `param` is the name of the offending field and `code` OpenAI's word for what is wrong, for its
    error body.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


class ConfigError(NanoError, ValueError):
    """The engine cannot be built from these options."""


class CheckpointError(NanoError, ValueError):
    """A model's files are missing, damaged, or of a kind nano does not run."""


class RequestFailed(NanoError, RuntimeError):
    """An accepted request ended with an error of the engine (NaN logits, a dead core)."""


class EngineUnavailable(NanoError, RuntimeError):
    """There is no answer now. `code` is a word for why, for an error body."""

    def __init__(self, message: str, code: str = "engine_unavailable"):
        super().__init__(message)
        self.code = code


class EngineDead(EngineUnavailable):
    """The engine core has stopped; nothing more will be answered by it."""

    def __init__(self, message: str):
        super().__init__(message, "engine_dead")
