"""Speculation over HTTP, with a core that drafts by script (tests/serve/drafting.py)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from openai.types import CompletionUsage

from nano.checkpoint.hf_config import load_decoder_config
from nano.config import EngineConfig
from nano.engine.input_processor import InputProcessor
from nano.engine.tokenizer import Tokenizer
from nano.serve.app import create_app
from nano.serve.async_engine import AsyncEngine
from nano.serve.options import ServerOptions
from tests.serve.drafting import ANSWER, DraftingClient

TEXT = ANSWER[:20].decode()
PREDICTION = {"type": "content", "content": TEXT}
COMPLETION = {"prompt": "p", "max_tokens": 20, "seed": 0}
CHAT = {"messages": [{"role": "user", "content": "p"}], "max_tokens": 20, "seed": 0}
ROUTES = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
OFF = {"enabled": False, "methods": [], "num_tokens": {}, "proposers": {}}


@pytest.fixture(scope="module")
def core() -> DraftingClient:
    return DraftingClient()


@pytest.fixture(scope="module")
def http(checkpoint: Path, core: DraftingClient) -> Iterator[TestClient]:
    input_processor = InputProcessor(
        EngineConfig.from_args({"max_model_len": core.ready.max_model_len}),
        load_decoder_config(checkpoint),
        Tokenizer.from_folder(checkpoint),
        num_kv_slots=core.ready.num_kv_slots,
        proposers=core.ready.proposers,
    )
    with TestClient(
        create_app(AsyncEngine(core, input_processor), ServerOptions(served_model_name=("tiny",)))
    ) as http:
        yield http


def post(http: TestClient, route: str, body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    reply = http.post(route, json={**body, **fields})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def chunks(http: TestClient, route: str, body: dict[str, Any], **fields: Any) -> list[Any]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    reply = http.post(route, json={**body, **options, **fields})
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def text(choice: dict[str, Any]) -> str:
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


@pytest.mark.parametrize(("route", "body"), ROUTES)
class TestAnswers:
    def test_a_call_that_does_not_ask_is_answered_as_ever(
        self, http: TestClient, route: str, body: dict[str, Any]
    ) -> None:
        reply = post(http, route, body)
        (choice,) = reply["choices"]
        assert text(choice) == TEXT
        assert not {"speculative", "speculative_trace"} & set(choice)
        assert "completion_tokens_details" not in reply["usage"]
        assert "speculative" not in json.dumps(chunks(http, route, body))

    def test_what_was_in_force_and_what_came_of_it_is_told(
        self, http: TestClient, route: str, body: dict[str, Any]
    ) -> None:
        (choice,) = post(http, route, body, speculative={"num_tokens": 3})["choices"]
        assert text(choice) == TEXT
        assert choice["speculative"] == {
            "enabled": True,
            "methods": ["fast"],
            "num_tokens": {"fast": 3},
            "num_steps": 8,
            "mean_acceptance_length": 20 / 8,
            "proposers": {
                "fast": {  # the last step's tokens are cut behind the first
                    "num_drafts": 7,
                    "num_draft_tokens": 19,
                    "num_accepted_tokens": 13,
                    "acceptance_rate": 13 / 19,
                    "num_offered_per_pos": [7, 6, 6],
                    "num_accepted_per_pos": [7, 6, 0],
                }
            },
        }
        (choice,) = post(http, route, body, speculative={"enabled": False})["choices"]
        assert text(choice) == TEXT
        assert choice["speculative"] == OFF | {"num_steps": 20, "mean_acceptance_length": 1.0}

    @pytest.mark.parametrize(
        "content",
        [TEXT, [{"type": "text", "text": TEXT[:7]}, {"type": "text", "text": TEXT[7:]}]],
    )
    def test_usage_counts_a_prediction_by_its_fate(
        self, http: TestClient, route: str, body: dict[str, Any], content: Any
    ) -> None:
        prediction = {"type": "content", "content": content}
        # The second choice is one character on, so that nothing of the prediction fits.
        reply = post(http, route, body, prediction=prediction, n=2)
        reports = [choice["speculative"] for choice in reply["choices"]]
        assert [report["methods"] for report in reports] == [["echo", "fast"]] * 2
        first, second = (report["proposers"]["echo"] for report in reports)
        assert first["num_accepted_tokens"] == first["num_draft_tokens"] == 17
        assert second["num_accepted_tokens"] == 0
        usage = CompletionUsage.model_validate(reply["usage"])
        details = usage.completion_tokens_details
        assert usage.completion_tokens == 40
        assert details is not None
        assert details.accepted_prediction_tokens == 17
        assert details.rejected_prediction_tokens == second["num_draft_tokens"] > 17
        *_, last = chunks(http, route, body, prediction=prediction, n=2)
        assert last["usage"] == reply["usage"]

    def test_an_empty_prediction_is_none(
        self, http: TestClient, route: str, body: dict[str, Any]
    ) -> None:
        reply = post(http, route, body, prediction={"type": "content", "content": ""})
        assert reply["choices"][0]["speculative"]["methods"] == ["fast"]
        assert set(reply["usage"]["completion_tokens_details"].values()) == {0}

    def test_a_trace_names_sources_steps_and_rejected_drafts(
        self, http: TestClient, route: str, body: dict[str, Any]
    ) -> None:
        (choice,) = post(http, route, body, speculative_trace=True, max_tokens=5)["choices"]
        trace = choice["speculative_trace"]
        assert trace["sources"] == ["target", "fast", "fast", "target", "fast"]
        first, *steps = trace["steps"]
        assert steps == [first + 1] * 3 + [first + 2]
        assert trace["rejected"] == [
            {
                "step": first + 1,
                "position": 3,
                "draft_token_id": ord("#"),
                "sampled_token_id": ANSWER[3],
                "source": "fast",
                "num_unjudged": 2,
            }
        ]

    def test_a_stream_tells_the_same_in_pieces_and_the_report_at_the_end(
        self, http: TestClient, route: str, body: dict[str, Any]
    ) -> None:
        wishes = {"speculative_trace": True, "prediction": PREDICTION, "n": 2, "stop": "fox"}
        whole = post(http, route, body, **wishes)
        *parts, last = chunks(http, route, body, **wishes)
        assert last["usage"] == whole["usage"]
        for choice in whole["choices"]:
            mine = [part["choices"][0] for part in parts]
            mine = [part for part in mine if part["index"] == choice["index"]]
            traces = [part["speculative_trace"] for part in mine if "speculative_trace" in part]
            sources = [source for trace in traces for source in trace["sources"]]
            assert sources == choice["speculative_trace"]["sources"]
            rejected = [draft["position"] for trace in traces for draft in trace["rejected"]]
            assert rejected == [d["position"] for d in choice["speculative_trace"]["rejected"]]
            assert (
                len(sources)
                == choice["speculative"]["mean_acceptance_length"]
                * (choice["speculative"]["num_steps"])
            )
            assert traces  # how many depends on how fast they are read
            reports = {
                part["finish_reason"]: part["speculative"] for part in mine if "speculative" in part
            }
            assert reports == {"stop": choice["speculative"]}

    def test_a_stop_string_in_an_accepted_run_gives_what_no_speculation_gives(
        self, http: TestClient, route: str, body: dict[str, Any]
    ) -> None:  # B004
        for stop in ("brown", "ick", "T"):
            fields = {"stop": stop, "return_token_ids": True, "logprobs": None}
            off = post(http, route, body, speculative={"enabled": False}, **fields)
            on = post(http, route, body, prediction=PREDICTION, **fields)
            assert text(on["choices"][0]) == text(off["choices"][0]) == TEXT.split(stop)[0]
            details = on["usage"].pop("completion_tokens_details")
            assert details["accepted_prediction_tokens"] < on["usage"]["completion_tokens"]
            assert details["rejected_prediction_tokens"] == 0
            assert on["usage"] == off["usage"]
            for name in ("token_ids", "finish_reason", "stop_reason"):
                assert on["choices"][0][name] == off["choices"][0][name]

    @pytest.mark.parametrize(
        ("name", "value", "reason"),
        [
            ("speculative", "fast", ""),
            ("speculative", [], ""),
            ("speculative", {"mode": 1}, "speculative.mode"),
            ("speculative", {"method": 1}, "speculative.method"),
            ("speculative", {"methods": "fast"}, "speculative.methods"),
            ("speculative", {"methods": []}, "methods must not be empty"),
            ("speculative", {"methods": ["fast"], "method": "fast"}, "not both"),
            ("speculative", {"method": "slow"}, "no method 'slow'; it has echo, fast"),
            ("speculative", {"num_tokens": 1.5}, "speculative.num_tokens"),
            ("speculative", {"num_tokens": True}, "speculative.num_tokens"),
            ("speculative", {"num_tokens": -1}, "at least 0, got -1"),
            ("speculative", {"num_tokens": 9}, "at most 8"),
            ("speculative", {"method": "fast", "num_tokens": 6}, "at most 5"),
            ("speculative", {"enabled": "no"}, "speculative.enabled"),
            ("speculative_trace", "yes", ""),
            ("prediction", TEXT, ""),
            ("prediction", {"content": TEXT}, "prediction.type"),
            ("prediction", {"type": "text", "content": TEXT}, "prediction.type"),
            ("prediction", {"type": "content"}, "prediction.content"),
            ("prediction", {"type": "content", "content": None}, "prediction.content"),
            ("prediction", {"type": "content", "content": [1]}, "prediction.content"),
            ("prediction", {"type": "content", "content": [{"type": "image_url"}]}, "type"),
            ("prediction", {"type": "content", "content": "x", "more": 1}, "prediction.more"),
        ],
    )
    def test_a_bad_wish_is_refused_by_name(
        self,
        http: TestClient,
        route: str,
        body: dict[str, Any],
        name: str,
        value: Any,
        reason: str,
    ) -> None:
        reply = http.post(route, json={**body, name: value})
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", name)
        assert name in error["message"]
        assert reason in error["message"]


def test_a_lone_surrogate_in_a_prediction_is_refused(http: TestClient) -> None:
    body = {**COMPLETION, "prediction": {"type": "content", "content": "\ud800"}}
    headers = {"content-type": "application/json"}
    reply = http.post("/v1/completions", content=json.dumps(body), headers=headers)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "prediction"


def test_one_prediction_serves_every_prompt(http: TestClient, core: DraftingClient) -> None:
    core.requests.clear()
    body = {**COMPLETION, "prompt": ["a", "b"], "prediction": PREDICTION}
    reply = post(http, "/v1/completions", body)
    assert reply["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 34
    assert {bytes(child.prediction_token_ids).decode() for child in core.requests} == {TEXT}


def test_scoring_a_prompt_tells_of_no_tokens(http: TestClient) -> None:
    fields = {"echo": True, "max_tokens": 0, "prediction": PREDICTION, "speculative_trace": True}
    reply = post(http, "/v1/completions", COMPLETION, **fields)
    (choice,) = reply["choices"]
    assert choice["speculative_trace"]["sources"] == []
    assert choice["speculative"]["num_steps"] == 0
    assert reply["usage"]["completion_tokens"] == 0
