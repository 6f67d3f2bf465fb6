"""Options of the server: read from the command line, applied exactly or refused."""

import argparse
import os
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from nano.errors import ConfigError
from nano.serve.http.server import check_certificates, listening
from nano.serve.options import (
    API_KEY_VARIABLE,
    ServerOptions,
    add_server_arguments,
    options_from_arguments,
)


def parse(*arguments: str) -> ServerOptions:
    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    return options_from_arguments(parser.parse_args(arguments))


def test_options_come_from_flags_of_their_names() -> None:
    options = parse("--api-key", "one", "two", "--max-queue-ms", "5", "--allowed-origins", "*")
    assert options.api_key == ("one", "two")
    assert options.max_queue_ms == 5
    assert options.allowed_origins == ("*",)
    assert options.port == ServerOptions().port


@pytest.mark.parametrize(
    "arguments",
    [
        "--port 70000",
        "--port -1",
        "--max-body-bytes 0",
        "--api-server-count 0",
        "--shutdown-timeout -1",
        "--shutdown-timeout nan",
        "--restart-engine -1",
        "--max-waiting-requests 0",
        "--max-queue-ms 0",
        "--timeout-ms inf",
        "--sse-keep-alive-interval nan",
        "--root-path api",
        "--root-path /api/",
        "--allowed-origins [*]",
        "--allowed-origins example.org",
        "--allow-credentials",
        "--ssl-keyfile key",
        "--ssl-certfile certificate",
        "--ssl-ca-certs authority",
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_flag(arguments: str) -> None:
    with pytest.raises(ConfigError, match=arguments.split()[0]):
        parse(*arguments.split())


def test_keys_come_from_the_environment_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "hidden")
    assert parse().api_key == ("hidden",)
    assert parse("--api-key", "given").api_key == ("given",)


@pytest.mark.parametrize("key", ["", "two words", "schlüssel", "a\n"])
def test_a_key_that_no_header_carries_is_refused_without_showing_it(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, key)
    with pytest.raises(ConfigError, match="--api-key") as refusal:
        parse()
    assert not key or key not in str(refusal.value)


def test_keys_are_not_part_of_what_options_look_like() -> None:
    assert "secret" not in repr(ServerOptions(api_key=("secret",)))


class TestUnixSocket:
    def test_its_file_comes_and_goes_and_heeds_the_umask(self, tmp_path: Path) -> None:
        path = tmp_path / "nano.sock"
        umask = os.umask(0o022)
        try:
            with listening(ServerOptions(uds=str(path))):
                mode = path.stat().st_mode
                assert stat.S_ISSOCK(mode)
                assert not mode & 0o022  # to write is to connect
        finally:
            os.umask(umask)
        assert not path.exists()

    def test_one_that_a_dead_server_left_is_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / "nano.sock"
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        assert path.exists()
        with listening(ServerOptions(uds=str(path))) as listener:
            listener.listen()
            with socket.socket(socket.AF_UNIX) as caller:
                caller.connect(str(path))

    def test_one_that_lives_and_other_files_are_left_alone(self, tmp_path: Path) -> None:
        live, file = tmp_path / "live.sock", tmp_path / "file"
        file.write_text("mine")
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(live))
            other.listen()
            for path, reason in ((live, "another server"), (file, "no socket")):
                with (
                    pytest.raises(ConfigError, match=reason),
                    listening(ServerOptions(uds=str(path))),
                ):
                    pass
        assert live.exists()
        assert file.read_text() == "mine"

    def test_the_file_of_a_successor_is_left_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "nano.sock"
        with listening(ServerOptions(uds=str(path))):
            path.rename(tmp_path / "old")  # so that the inode is not used again
            path.write_text("another's")
        assert path.read_text() == "another's"

    @pytest.mark.parametrize("name", ["x" * 200, "nowhere/nano.sock"])
    def test_a_path_that_cannot_be_is_told(self, tmp_path: Path, name: str) -> None:
        with (
            pytest.raises(ConfigError, match=f"--uds .*{name}"),
            listening(ServerOptions(uds=str(tmp_path / name))),
        ):
            pass


class TestCertificates:
    def test_files_that_are_missing_or_of_no_use_are_told(self, tmp_path: Path) -> None:
        missing = str(tmp_path / "missing")
        damaged = tmp_path / "damaged"
        damaged.write_text("no certificate")
        for file in (missing, str(damaged)):
            with pytest.raises(ConfigError, match="--ssl-certfile"):
                check_certificates(ServerOptions(ssl_keyfile=file, ssl_certfile=file))

    def test_a_key_under_a_password_is_refused_and_nobody_is_asked(self, tmp_path: Path) -> None:
        key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"]
        command += ["ec_paramgen_curve:P-256", "-passout", "pass:secret", "-subj", "/CN=localhost"]
        command += ["-keyout", str(key), "-out", str(certificate)]
        subprocess.run(command, check=True, capture_output=True)
        options = ServerOptions(ssl_keyfile=str(key), ssl_certfile=str(certificate))
        with pytest.raises(ConfigError, match="--ssl-keyfile"):
            check_certificates(options)
