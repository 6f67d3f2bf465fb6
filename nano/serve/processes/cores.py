"""Cores: the engine cores of a server, one after the other."""

from collections.abc import Callable

from nano.config import EngineConfig
from nano.engine.client import EngineClient
from nano.engine.subprocess_client import SubprocessClient
from nano.errors import EngineDead
from nano.log import get_logger

logger = get_logger(__name__)

# Blocks until a core has loaded: the first (None), or the one after that which was lost for the
# reason given. Raises `EngineDead` if there is to be none, and what goes wrong in loading.
Connect = Callable[[str | None], EngineClient]


class Cores:
    """Starts a core, and up to `num_restarts` more in place of those that die.

    `config` is resolved. `connect` is for one thread, `close` and `kill` for any.
    """

    def __init__(self, config: EngineConfig, num_restarts: int, log_level: str | None = None):
        self._config = config
        self._num_restarts = num_restarts  # still to come
        self._log_level = log_level
        self._client: SubprocessClient | None = None
        self._is_closed = False

    def connect(self, lost: str | None = None) -> SubprocessClient:
        """The client of the first core, or of the one after that `lost`: see `Connect`."""
        while lost is not None:
            if self._num_restarts == 0 or self._is_closed:
                raise EngineDead(lost)
            self._num_restarts -= 1
            logger.warning("starting a fresh engine core; restarts left: %d", self._num_restarts)
            if self._client is not None:
                self._client.close()
            try:
                return self._start()
            except EngineDead as error:
                lost = str(error)
                logger.error("%s", lost)
        return self._start()

    def kill(self) -> None:
        """End the core at once, whatever it computes. `close` is still to be called."""
        if self._client is not None:
            self._client.kill()

    def close(self) -> None:
        """End the core; a step in progress has some seconds. None follows it.

        One that is loading ends with the program.
        """
        self._is_closed = True
        if self._client is not None:
            self._client.close()

    def _start(self) -> SubprocessClient:
        self._client = SubprocessClient(self._config, log_level=self._log_level)
        return self._client
