"""SubprocessClient: the client that owns its core's process."""

from collections.abc import Sequence

from nano.config import EngineConfig
from nano.engine.core_process import CORE_COMMAND, CoreProcess
from nano.engine.socket_client import SocketClient


class SubprocessClient(SocketClient):
    """Starts a core, owns its process, and speaks to it. Thread-safe.

    `config` is resolved (`nano.resolve`). The constructor returns when the model is loaded,
    or raises what went wrong there: `ConfigError`, `CheckpointError` or `EngineDead`. `close`, the
    end of the program, and its death by any signal all end the core.
    """

    def __init__(
        self,
        config: EngineConfig,
        command: Sequence[str] = CORE_COMMAND,
        log_level: str | None = None,
    ):
        self._own = CoreProcess(config, command, log_level)
        super().__init__(self._own.folder, self._own)

    @property
    def pid(self) -> int:
        """The core's process id, for tests and logs."""
        return self._own.pid

    def kill(self) -> None:
        """End the core at once, whatever it computes. `close` is still to be called."""
        self._own.kill()
