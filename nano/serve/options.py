"""ServerOptions: how the server listens, whom it lets in, what it takes on and when it lets go."""

import argparse
import math
import os
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from nano.errors import ConfigError

API_KEY_VARIABLE = "NANO_API_KEY"  # command lines are for everyone to see
_MAX_PORT = 2**16 - 1
_MEBIBYTE = 1 << 20


_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")  # as browsers send it
_KEY = re.compile(r"[!-~]+")  # what a header can carry


def _option(default: Any, help: str, is_shown: bool = True) -> Any:
    return field(default=default, metadata={"help": help}, repr=is_shown)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """One field is one option, `--` and dashes for underscores. Names are vLLM's where it has them.

    Raises `ConfigError`, naming the option, its value and its limit.
    """

    host: str = _option("127.0.0.1", "address to listen on")
    port: int = _option(8000, "0 takes a free one")
    uds: str | None = _option(None, "path of a Unix socket to listen on, instead of host and port")
    root_path: str = _option("", "prefix under which a proxy shows this server")
    served_model_name: tuple[str, ...] = _option(
        (), "names that requests may use (default: --model)"
    )
    chat_template: str | None = _option(None, "a Jinja template, or a file with one")
    trust_request_chat_template: bool = _option(
        False, "take templates from requests; nothing ends a template that loops for ever"
    )

    api_key: tuple[str, ...] = _option(
        (), f"callers must send one of these as a Bearer token (or ${API_KEY_VARIABLE})", False
    )
    allowed_origins: tuple[str, ...] = _option((), "CORS: origins of web pages")
    allowed_methods: tuple[str, ...] = _option(("*",), "CORS: methods")
    allowed_headers: tuple[str, ...] = _option(("*",), "CORS: headers")
    allow_credentials: bool = _option(False, "CORS: cookies and the like")
    ssl_keyfile: str | None = _option(None, "TLS: the private key")
    ssl_certfile: str | None = _option(None, "TLS: the certificate")
    ssl_ca_certs: str | None = _option(None, "TLS: who signs the certificates of callers")
    max_body_bytes: int = _option(16 * _MEBIBYTE, "of a request; longer ones are refused")

    max_waiting_requests: int | None = _option(
        None, "waiting for the engine; more are refused with 429 (default: 16 times --max-num-seqs)"
    )
    max_waiting_tokens: int | None = _option(
        None, "prompt tokens waiting for the engine; more are refused with 429 (default: no limit)"
    )
    max_queue_ms: float | None = _option(
        None, "a request that has not begun by then is refused with 429; requests may ask for less"
    )
    max_lag_ms: float | None = _option(
        50.0, "while every turn of the event loop takes longer, requests are refused with 429"
    )
    timeout_ms: float | None = _option(
        None, "a request that has not ended by then is ended; requests may ask for less"
    )
    sse_keep_alive_interval: float = _option(15.0, "seconds between comments in a silent stream")

    api_server_count: int = _option(1, "processes that answer on the port, with one engine core")
    shutdown_timeout: float = _option(
        30.0, "seconds that requests in flight have to end after SIGTERM; 0 aborts them"
    )
    restart_engine: int = _option(0, "times that a core which died is replaced by a fresh one")

    log_level: Literal["debug", "info", "warning", "error"] = _option("info", "least severity")
    access_log: Literal["none", "json"] = _option("none", "a line per request on stderr")
    disable_log_stats: bool = _option(False, "no line every 10 s about what the engine does")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= _MAX_PORT:
            raise ConfigError(f"--port must be in [0, {_MAX_PORT}], got {self.port}")
        for name in ("max_body_bytes", "api_server_count"):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        for name in ("shutdown_timeout", "restart_engine"):
            self._check(name, 0 <= getattr(self, name) < math.inf, "at least 0")
        limits = ("max_waiting_requests", "max_waiting_tokens", "max_queue_ms", "timeout_ms")
        for name in (*limits, "max_lag_ms"):
            limit = getattr(self, name)
            self._check(name, limit is None or 0 < limit < math.inf, "above 0")
        interval = self.sse_keep_alive_interval
        self._check("sse_keep_alive_interval", 0 < interval < math.inf, "above 0")
        is_prefix = self.root_path.startswith("/") and not self.root_path.endswith("/")
        is_prefix = is_prefix and _KEY.fullmatch(self.root_path) is not None
        self._check("root_path", is_prefix or not self.root_path, "like /prefix")
        self._check_access()

    def _check_access(self) -> None:
        if not all(_KEY.fullmatch(key) for key in self.api_key):
            raise ConfigError("--api-key must be visible ASCII characters, at least one")
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                limit = "* or like https://example.org"
                raise ConfigError(f"--allowed-origins must be {limit}, got {origin}")
        if self.allow_credentials and not self.allowed_origins:
            raise ConfigError("--allow-credentials needs --allowed-origins")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("--ssl-keyfile and --ssl-certfile go together")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ConfigError("--ssl-ca-certs needs --ssl-certfile")

    def _check(self, name: str, is_right: bool, limit: str) -> None:
        if not is_right:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} must be {limit}, got {getattr(self, name)}")

    def template_text(self) -> str | None:
        """The chat template, read if it is a file. Raises `ConfigError`."""
        given = self.chat_template
        if given is None or "{" in given:
            return given
        try:
            return Path(given).read_text()
        except OSError as error:
            raise ConfigError(f"--chat-template {given}: {error.strerror}") from error


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Every field of `ServerOptions` as a flag."""
    group = parser.add_argument_group("server")
    hints = get_type_hints(ServerOptions)
    for one in fields(ServerOptions):
        flag = f"--{one.name.replace('_', '-')}"
        hint = hints[one.name]
        more: dict[str, Any] = {"help": one.metadata["help"], "default": one.default}
        if get_origin(hint) is Literal:
            more["choices"] = get_args(hint)
        elif get_origin(hint) is tuple:
            more["nargs"] = "+"
        elif hint is bool:
            more["action"] = argparse.BooleanOptionalAction
        else:
            more["type"] = (get_args(hint) or (hint,))[0]  # the first of `str | None`
        group.add_argument(flag, **more)


def options_from_arguments(args: argparse.Namespace) -> ServerOptions:
    """Raises `ConfigError`."""
    given = {one.name: getattr(args, one.name) for one in fields(ServerOptions)}
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = tuple(value)
    if not given["api_key"] and API_KEY_VARIABLE in os.environ:
        given["api_key"] = (os.environ[API_KEY_VARIABLE],)
    return ServerOptions(**given)
