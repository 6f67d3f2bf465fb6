"""What lies around every route: keys, origins, limits, ids, the log; how the server is reached."""

import json
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nano import __version__
from tests.serve.server import Server

KEYS = ("first-key", "second-key")
KEY = {"Authorization": f"Bearer {KEYS[0]}"}
PAGE = "https://page.example"
MAX_BODY_BYTES = 100_000
OPEN = {"/health", "/ready", "/ping"}
PROMPT = {"prompt": "Once", "max_tokens": 3, "temperature": 0}
LONG = {"prompt": "Once", "max_tokens": 30_000, "ignore_eos": True, "stream": True}


class GuardedServer(Server):
    """A server with everything around its routes, whose log can be read."""

    def __init__(self, checkpoint: Path, log: Path):
        with log.open("wb") as stderr:
            super().__init__(
                checkpoint,
                *("--api-key", *KEYS, "--allowed-origins", PAGE, "--access-log", "json"),
                *("--root-path", "/nano", "--max-body-bytes", str(MAX_BODY_BYTES)),
                stderr=stderr,
            )
        self.log = log

    def record(self, request_id: str) -> dict[str, Any]:
        """The one line of the log about this request, once it is written."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            lines = [json.loads(line) for line in self.log.read_text().splitlines() if line]
            found = [line for line in lines if line["request_id"] == request_id]
            if found:
                assert len(found) == 1
                return found[0]
            time.sleep(0.02)
        raise AssertionError(f"the log says nothing of {request_id}")

    def raw(self, request: bytes) -> bytes:
        """What comes back for these bytes until the server ends the connection."""
        host, port = self.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(request)
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
        return answer


@pytest.fixture(scope="module")
def guarded(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedServer]:
    server = GuardedServer(checkpoint, tmp_path_factory.mktemp("guarded") / "log")
    yield server
    server.stop()


def assert_is_error(reply: httpx.Response, status: int) -> dict[str, Any]:
    """In OpenAI's shape, and the answer says which request it is to."""
    assert reply.status_code == status, reply.text
    assert reply.headers["X-Request-Id"]
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


class TestKeys:
    def test_every_route_but_the_probes_asks_for_one(self, guarded: GuardedServer) -> None:
        paths = guarded.http.get("/openapi.json", headers=KEY).json()["paths"]
        assert set(paths) > OPEN
        calls = [(path, method) for path, methods in paths.items() for method in methods]
        calls += [("/docs", "get"), ("/openapi.json", "get"), ("/metrics", "get"), ("/x", "put")]
        for path, method in calls:
            reply = guarded.http.request(method, path.replace("{name}", "tiny"))
            if path in OPEN:
                assert reply.status_code == 200
            else:
                assert reply.status_code == 401
                assert reply.headers["WWW-Authenticate"] == "Bearer"

    def test_without_one_a_caller_gets_openais_error(self, guarded: GuardedServer) -> None:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": f"Bearer {KEYS[0]}x"},
            {"Authorization": f"Bearer {KEYS[0][:-1]}"},
            {"Authorization": f"Basic {KEYS[0]}"},
            {"Authorization": "Bearer"},
            {"Authorization": b"Bearer \xff"},
            {"x-api-key": "wrong"},
        ):
            error = assert_is_error(guarded.http.get("/v1/models", headers=headers), 401)
            assert error["code"] == "invalid_api_key"

    def test_each_key_opens_in_either_clients_header(self, guarded: GuardedServer) -> None:
        for key in KEYS:
            for headers in (
                {"Authorization": f"Bearer {key}"},
                {"Authorization": f"bearer  {key}"},
                {"x-api-key": key},
                {"Authorization": "Bearer wrong", "x-api-key": key},
            ):
                assert guarded.http.get("/v1/models", headers=headers).status_code == 200

    def test_no_key_is_ever_logged(self, guarded: GuardedServer) -> None:
        headers = {**KEY, "x-api-key": KEYS[1], "X-Request-Id": "keys"}
        guarded.http.get(f"/v1/models?key={KEYS[0]}", headers=headers)
        assert guarded.record("keys")["path"] == "/v1/models"
        assert not any(key in guarded.log.read_text() for key in KEYS)


class TestOrigins:
    def test_a_page_of_an_allowed_origin_reads_answers_and_errors(
        self, guarded: GuardedServer
    ) -> None:
        page = {"Origin": PAGE}
        for reply, status in (
            (guarded.http.get("/v1/models", headers={**page, **KEY}), 200),
            (guarded.http.get("/v1/models", headers=page), 401),
            (guarded.http.get("/nothing", headers={**page, **KEY}), 404),
            (guarded.http.post("/v1/completions", json={}, headers={**page, **KEY}), 400),
        ):
            assert reply.status_code == status
            assert reply.headers["Access-Control-Allow-Origin"] == PAGE
            assert "X-Request-Id" in reply.headers["Access-Control-Expose-Headers"]

    def test_a_browser_may_ask_beforehand_without_a_key(self, guarded: GuardedServer) -> None:
        ask = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        ask["Access-Control-Request-Headers"] = "authorization,content-type"
        reply = guarded.http.options("/v1/completions", headers=ask)
        assert reply.status_code == 200
        assert reply.headers["Access-Control-Allow-Origin"] == PAGE
        assert "authorization" in reply.headers["Access-Control-Allow-Headers"]

    def test_other_origins_are_not_let_in(self, guarded: GuardedServer, server: Server) -> None:
        for reply in (
            guarded.http.get("/health", headers={"Origin": "https://other.example"}),
            server.http.get("/health", headers={"Origin": PAGE}),  # none are allowed there
        ):
            assert "Access-Control-Allow-Origin" not in reply.headers


def test_a_proxy_may_leave_its_prefix_or_not(guarded: GuardedServer) -> None:
    for path in ("/v1/models", "/nano/v1/models"):
        assert guarded.http.get(path, headers=KEY).status_code == 200
        assert guarded.http.get(path).status_code == 401
    for path in ("/health", "/nano/health"):
        assert guarded.http.get(path).status_code == 200
    for path in ("/nanohealth", "/nano/nano/health", "/health/", "//health", "/health%2f"):
        assert guarded.http.get(path).status_code == 401
    assert guarded.http.get("/nano/openapi.json", headers=KEY).json()["servers"] == [
        {"url": "/nano"}
    ]


class TestBodyLimit:
    def test_a_body_of_the_limit_is_read_and_one_byte_more_is_not(
        self, guarded: GuardedServer
    ) -> None:
        body = json.dumps({"prompt": "", "user": ""}).encode()
        for num_bytes, status in ((MAX_BODY_BYTES, 400), (MAX_BODY_BYTES + 1, 413)):
            content = body.replace(b'"user": "', b'"user": "' + b"x" * (num_bytes - len(body)))
            assert len(content) == num_bytes
            headers = {**KEY, "Content-Type": "application/json"}
            for sent in (content, iter([content[:50_000], content[50_000:]])):  # whole and chunked
                reply = guarded.http.post("/v1/completions", content=sent, headers=headers)
                assert_is_error(reply, status)

    def test_what_is_declared_too_long_is_refused_unread(self, guarded: GuardedServer) -> None:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[0]}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n\r\n"
        )
        answer = guarded.raw(head.encode() + b"{")  # the rest never comes
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in answer.lower()
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert str(MAX_BODY_BYTES) in error["message"]
        assert error["code"] == "request_too_large"

    def test_a_body_without_end_is_cut_off(self, guarded: GuardedServer) -> None:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[0]}\r\n"
            "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
        answer = guarded.raw(head.encode() + chunk * (MAX_BODY_BYTES // 0x4000 + 1))
        assert answer.startswith(b"HTTP/1.1 413 ")


class TestRequestIds:
    def test_every_answer_has_the_callers_or_one_of_its_own(self, guarded: GuardedServer) -> None:
        long = {"content": b"x" * (MAX_BODY_BYTES + 1)}
        for method, path, headers, more, status in (
            ("GET", "/health", {}, {}, 200),
            ("GET", "/v1/models", KEY, {}, 200),
            ("GET", "/v1/models", {}, {}, 401),
            ("GET", "/nothing", KEY, {}, 404),
            ("PUT", "/v1/models", KEY, {}, 405),
            ("POST", "/v1/completions", KEY, {"json": {}}, 400),
            ("POST", "/v1/completions", KEY, long, 413),
        ):
            mine = {**headers, "X-Request-Id": "mine:1/2~"}
            reply = guarded.http.request(method, path, headers=mine, **more)
            assert (reply.status_code, reply.headers["X-Request-Id"]) == (status, "mine:1/2~")
            ids = {
                guarded.http.request(method, path, headers=headers, **more).headers["X-Request-Id"]
                for _ in range(2)
            }
            assert len(ids) == 2

    def test_an_answer_is_named_after_it(self, server: Server) -> None:
        reply = server.http.post("/v1/completions", json=PROMPT, headers={"X-Request-Id": "named"})
        assert reply.json()["id"] == "cmpl-named"

    @pytest.mark.parametrize("own", ["", "two words", b"\xc3\xa9", "x" * 513, "tab\tbed"])
    def test_one_that_is_not_valid_is_refused(self, guarded: GuardedServer, own: Any) -> None:
        reply = guarded.http.get("/health", headers={"X-Request-Id": own})
        assert "X-Request-Id" in assert_is_error(reply, 400)["message"]
        assert guarded.record(reply.headers["X-Request-Id"])["status"] == 400

    def test_two_of_them_are_refused(self, guarded: GuardedServer) -> None:
        headers = [("X-Request-Id", "one"), ("X-Request-Id", "two")]
        assert_is_error(guarded.http.get("/health", headers=headers), 400)


class TestLog:
    def test_a_request_is_one_line_that_says_what_came_of_it(self, guarded: GuardedServer) -> None:
        for streams in (False, True):
            request_id = f"logged-{streams}"
            reply = guarded.http.post(
                "/v1/completions",
                json={**PROMPT, "n": 2, "stream": streams},
                headers={**KEY, "X-Request-Id": request_id},
            )
            assert reply.status_code == 200
            record = guarded.record(request_id)
            assert record["method"] == "POST"
            assert record["path"] == "/v1/completions"
            assert record["client"].startswith("127.0.0.1:")
            assert record["status"] == 200
            assert record["seconds"] > 0
            assert record["time"].endswith("+00:00")
            assert record["prompt_tokens"] == 4
            assert record["completion_tokens"] == 6
            assert record["finish_reasons"] == ["length", "length"]
            assert record["has_client_left"] is False

    def test_where_nothing_was_generated_it_says_nothing_of_tokens(
        self, guarded: GuardedServer
    ) -> None:
        guarded.http.post("/v1/completions", json={}, headers={**KEY, "X-Request-Id": "refused"})
        record = guarded.record("refused")
        assert record["status"] == 400
        assert record["prompt_tokens"] is record["completion_tokens"] is None
        assert record["finish_reasons"] is None

    @pytest.mark.parametrize("streams", [False, True])
    def test_a_client_that_leaves_is_told_apart(
        self, guarded: GuardedServer, streams: bool
    ) -> None:
        request_id = f"left-{streams}"
        headers = {**KEY, "X-Request-Id": request_id, "Content-Type": "application/json"}
        body = json.dumps({**LONG, "stream": streams}).encode()
        lines = [f"{name}: {value}" for name, value in headers.items()]
        lines += ["Host: x", f"Content-Length: {len(body)}", "", ""]
        head = "\r\n".join(["POST /v1/completions HTTP/1.1", *lines]).encode()
        host, port = guarded.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(head + body)
            if streams:
                assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        record = guarded.record(request_id)
        assert record["has_client_left"] is True
        assert record["status"] == (200 if streams else 499)

    def test_no_caller_can_forge_a_line(self, guarded: GuardedServer) -> None:
        forged = '%0A{"status":200}%0D%0A%1B[31m%00%E2%80%A8%FF"\\'
        headers = {**KEY, "X-Request-Id": "forged", "X-Forwarded-For": '1.2.3.4"}, {'}
        guarded.http.get(f"/nothing/{forged}", headers=headers)
        assert guarded.record("forged")["path"].startswith('/nothing/\n{"status":200}')
        for line in guarded.log.read_text().splitlines():
            assert {"time", "request_id", "status"} < set(json.loads(line))


class TestHealth:
    def test_a_server_that_serves_is_healthy_and_ready(self, server: Server) -> None:
        for path in OPEN:
            assert server.http.get(path).status_code == 200
        assert server.http.get("/version").json() == {"version": __version__}

    def test_heads_and_options_are_answered_in_kind(self, server: Server) -> None:
        for method in ("HEAD", "OPTIONS"):
            reply = server.http.request(method, "/v1/completions")
            assert reply.status_code == 405
            assert reply.headers["Allow"] == "POST"
            assert reply.headers["X-Request-Id"]


class TestListening:
    def test_a_unix_socket_serves_though_the_log_has_no_room(
        self, checkpoint: Path, tmp_path: Path
    ) -> None:
        path = tmp_path / "nano.sock"
        with open("/dev/full", "wb") as full:
            server = Server(checkpoint, "--access-log", "json", uds=path, stderr=full)
        try:
            for _ in range(3):
                reply = server.http.post("/v1/completions", json=PROMPT)
                assert reply.json()["usage"]["completion_tokens"] == 3
                assert_is_error(server.http.post("/v1/completions", json={}), 400)
        finally:
            assert server.stop() == 0
        assert not path.exists()

    def test_callers_and_server_know_each_other_by_certificates(
        self, checkpoint: Path, tmp_path: Path
    ) -> None:
        key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-nodes"]
        command += ["-pkeyopt", "ec_paramgen_curve:P-256", "-subj", "/CN=nano"]
        command += ["-addext", "subjectAltName=IP:127.0.0.1"]
        command += ["-keyout", str(key), "-out", str(certificate)]
        subprocess.run(command, check=True, capture_output=True)
        options = ("--ssl-keyfile", str(key), "--ssl-certfile", str(certificate))
        server = Server(
            checkpoint, *options, "--ssl-ca-certs", str(certificate), tls=(certificate, key)
        )
        try:
            assert server.http.post("/v1/completions", json=PROMPT).status_code == 200
            with pytest.raises(httpx.TransportError):  # without a certificate of its own
                httpx.get(
                    f"{server.url}/health", verify=ssl.create_default_context(cafile=certificate)
                )
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{server.url.replace('https', 'http')}/health")
        finally:
            assert server.stop() == 0
