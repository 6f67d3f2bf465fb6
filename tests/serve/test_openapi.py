"""The OpenAPI page is true: schemathesis makes calls from it and compares the answers with it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serve.server import Server

# No 5xx; every status, content type and body is one that the page knows: errors in their API's
# shape, too; what the page rules out is refused; every method that it does not name is a 405.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
NUM_EXAMPLES = 10  # for each route, besides the edges of each field


@pytest.fixture(scope="module")
def page(short_server: Server) -> dict[str, Any]:
    page = short_server.http.get("/openapi.json").json()
    assert isinstance(page, dict)
    return page


def test_every_route_tells_its_body_its_answer_and_its_errors(page: dict[str, Any]) -> None:
    for path, methods in page["paths"].items():
        for method, route in methods.items():
            assert method == "get" or "requestBody" in route
            responses = route["responses"]
            assert set(responses) >= {"200", "400", "401", "404", "413", "429", "4XX", "503"}
            assert "422" not in responses  # FastAPI's own; ours are 400
            for status, response in responses.items():
                for content in response["content"].values():
                    assert content["schema"] or path == "/v1/capabilities", (path, method, status)


def test_the_page_can_be_read_by_people(short_server: Server) -> None:
    assert "swagger" in short_server.http.get("/docs").text


@pytest.mark.slow
def test_generated_calls_are_answered_as_the_page_says(
    short_server: Server, tmp_path: Path
) -> None:
    command = [str(Path(sys.executable).with_name("schemathesis")), "run"]
    command += [f"{short_server.url}/openapi.json", "--checks", ",".join(CHECKS)]
    command += ["--phases", "coverage,fuzzing", "--max-examples", str(NUM_EXAMPLES), "--seed", "1"]
    command += ["--suppress-health-check", "all"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert short_server.http.get("/health").status_code == 200
