from typing import Any

from openai import OpenAI

from nano.serve.openai.chat_body import ChatBody
from nano.serve.openai.completion_body import CompletionBody
from nano.serve.openai.parameters import parameters_of
from tests.serve.server import Server


def capabilities(server: Server) -> dict[str, Any]:
    reply = server.http.get("/v1/capabilities")
    assert reply.status_code == 200
    answer: dict[str, Any] = reply.json()
    return answer


def test_every_parameter_of_every_route_has_a_state_and_words(chat_server: Server) -> None:
    routes = capabilities(chat_server)["routes"]
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"} <= routes.keys()
    for route in routes.values():
        assert route["other_parameters"] == "refused"
        for row in route["parameters"].values():
            assert row["state"] in ("applied", "neutral", "refused")
            assert row["accepts"]
            assert row["reason"] or row["state"] != "refused"
    chat = routes["/v1/chat/completions"]["parameters"]
    assert chat["top_p"] == {"state": "applied", "accepts": "(0, 1]", "reason": None}
    assert chat["structured_outputs"]["reason"] == "structured outputs are not supported yet"


def test_the_table_is_the_one_that_requests_are_held_to(chat_server: Server) -> None:
    routes = capabilities(chat_server)["routes"]
    for route, body in (("/v1/chat/completions", ChatBody), ("/v1/completions", CompletionBody)):
        rows = routes[route]["parameters"]
        assert rows.keys() == body.model_fields.keys()
        assert {name: row["state"] for name, row in rows.items()} == {
            name: row.state.value for name, row in parameters_of(body).items()
        }


def test_a_server_tells_what_it_has_loaded_and_its_limits(
    chat_server: Server, server: Server, client: OpenAI
) -> None:
    told = capabilities(chat_server)
    assert told["models"] == ["tiny", "other"]
    assert told["scheduling_policy"] == "priority"
    assert [proposer["name"] for proposer in told["proposers"]] == ["prediction", "ngram"]
    assert told["proposers"][1]["num_tokens"] == 4
    assert told["limits"]["max_model_len"] == 512
    plain = capabilities(server)
    assert "ngram" not in {proposer["name"] for proposer in plain["proposers"]}
    assert plain["chat_templates"] == ["default"]
    assert plain["limits"]["max_model_len"] == 32768
    assert plain["limits"]["max_logprobs"] == 20
    reply = client.completions.create(model="tiny", prompt="x", max_tokens=1)
    assert reply.system_fingerprint == plain["system_fingerprint"]


def test_the_api_page_shows_the_state_of_every_parameter(server: Server) -> None:
    schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    assert schemas["ChatBody"]["properties"]["store"]["state"] == "neutral"
    assert schemas["CompletionBody"]["properties"]["suffix"]["state"] == "refused"
