import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from nano.engine.tokenizer import Tokenizer
from nano.errors import CheckpointError, ConfigError, InvalidRequest
from tests import tiny
from tests.vocabularies import (
    byte_tokenizer,
    sentencepiece_metadata,
    sentencepiece_tokenizer,
    smollm2_tokenizer,
)

USER = [{"role": "user", "content": "hi"}]


def with_settings(folder: Path, **settings: Any) -> Tokenizer:
    """The tiny tokenizer with entries of tokenizer_config.json replaced."""
    tiny.write_tokenizer(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return Tokenizer.from_folder(folder)


@given(st.text(max_size=40))
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@given(st.lists(st.integers(0, 263), max_size=30), st.booleans())
def test_decoding_byte_level_ids_equals_the_library(ids: list[int], skip: bool) -> None:
    tokenizer = byte_tokenizer()
    expected = tokenizer._backend.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip) == expected


def test_decoding_random_smollm2_ids_equals_the_library() -> None:
    tokenizer = smollm2_tokenizer()
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(20)]
        assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)


@given(st.text(alphabet="the Pars,€😀\n", max_size=20))
def test_decoding_valid_byte_fallback_equals_the_library(text: str) -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids) == text


def test_invalid_byte_fallback_spares_the_valid_characters_beside_it() -> None:
    tokenizer = sentencepiece_tokenizer()
    tokens = sentencepiece_metadata()["tokenizer.ggml.tokens"]
    ids = [tokens.index(f"<0x{byte:02X}>") for byte in "€".encode() + b"\xff"]
    assert tokenizer.decode(ids) == "€\ufffd"


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    ticks: list[None] = []
    is_encoded = threading.Event()

    def tick() -> None:
        while not is_encoded.wait(0.001):
            ticks.append(None)

    ticking = threading.Thread(target=tick)
    ticking.start()
    byte_tokenizer().encode("ab " * 300_000)
    is_encoded.set()
    ticking.join()
    assert len(ticks) > 20


def test_a_lone_surrogate_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match=r"'\\ud800' at character 2") as caught:
        byte_tokenizer().encode("ab\ud800")
    assert caught.value.param == "prompt"


def test_token_bytes_and_text_show_the_token_itself() -> None:
    spaced = sentencepiece_metadata()["tokenizer.ggml.tokens"].index("▁Paris")
    assert sentencepiece_tokenizer().token_text(spaced) == " Paris"
    assert byte_tokenizer().token_bytes(0xF0) == b"\xf0"
    assert byte_tokenizer().token_text(0xF0) == "\ufffd"
    assert byte_tokenizer().token_text(tiny.EOS_TOKEN_ID) == "</s>"
    assert byte_tokenizer().token_text(5000) == ""


def test_fragments_carry_no_dummy_space() -> None:
    tokens = sentencepiece_metadata()["tokenizer.ggml.tokens"]
    tokenizer = sentencepiece_tokenizer()
    assert [tokens[i] for i in tokenizer.encode_fragment("the")] == ["t", "he"]
    assert [tokens[i] for i in tokenizer.encode_fragment(" the")] == ["▁the"]
    assert byte_tokenizer().encode_fragment("the") == list(b"the")


def test_special_tokens_are_known_by_role_and_counted() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.bos_token_id == tiny.BOS_TOKEN_ID
    assert tokenizer.eos_token_id == tiny.EOS_TOKEN_ID
    assert tokenizer.special_token_ids == frozenset(range(256, 260))
    assert tokenizer.vocab_size == tiny.VOCAB_SIZE


def test_special_tokens_may_be_written_as_objects(tmp_path: Path) -> None:
    tokenizer = with_settings(tmp_path, eos_token={"content": "<|im_end|>", "lstrip": False})
    assert tokenizer.eos_token_id == tiny.IM_END_TOKEN_ID


def test_truncation_and_padding_left_in_the_file_are_ignored(tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path)
    path = str(tmp_path / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(path)
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(path)
    assert Tokenizer.from_folder(tmp_path).encode("abcdef") == list(b"abcdef")


def test_a_decoder_with_other_rules_is_refused(tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path)
    path = str(tmp_path / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(path)
    backend.decoder = tokenizers.decoders.WordPiece()
    backend.save(path)
    with pytest.raises(CheckpointError, match="decoder of WordPiece, which is not supported"):
        Tokenizer.from_folder(tmp_path)


def test_a_damaged_tokenizer_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot load the tokenizer of"):
        Tokenizer.from_folder(tmp_path)


def test_a_folder_without_tokenizer_json_is_read_by_transformers(tmp_path: Path) -> None:
    chars = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate([*chars, "ab", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("abc") == [vocab["ab"], vocab["c"]]
    assert tokenizer.eos_token_id == vocab["<|endoftext|>"]
    assert tokenizer.decode(tokenizer.encode(" é\n")) == " é\n"


def test_a_folder_without_any_tokenizer_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot load the tokenizer of"):
        Tokenizer.from_folder(tmp_path)


def test_chat_messages_are_rendered_by_the_models_template() -> None:
    tokenizer = byte_tokenizer()
    text = tokenizer.apply_chat_template(USER)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(USER, add_generation_prompt=False).endswith("<|im_end|>\n")


def test_bos_is_not_doubled_when_the_template_writes_it(tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path)
    path = str(tmp_path / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(path)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tiny.BOS_TOKEN_ID)]
    )
    backend.save(path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    text = tokenizer.apply_chat_template(USER, template="{{ bos_token }}{{ messages[0].content }}")
    assert tokenizer.encode(text, add_special_tokens=False) == [tiny.BOS_TOKEN_ID, *b"hi"]
    assert tokenizer.encode("hi") == [tiny.BOS_TOKEN_ID, *b"hi"]


def test_templates_see_the_variables_and_filters_that_transformers_gives() -> None:
    template = (
        "{%- for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.content }}"
        "{% endfor %}|{{ eos_token }}|{{ tools | tojson }}|{{ flag }}|"
        "{{ strftime_now('%Y') | length }}|{% generation %}x{% endgeneration %}"
    )
    text = byte_tokenizer().apply_chat_template(
        [*USER, *USER], template=template, tools=[{"name": "<é>"}], flag=7
    )
    assert text == 'hi|</s>|[{"name": "<é>"}]|7|4|x'


def test_lines_that_hold_only_a_tag_leave_no_trace() -> None:
    template = (
        "{% for m in messages %}\n  {% if true %}\n{{ m.content }}!\n  {% endif %}\n{% endfor %}"
    )
    assert byte_tokenizer().apply_chat_template(USER, template=template) == "hi!\n"


def test_the_sandbox_keeps_templates_from_reaching_into_python() -> None:
    with pytest.raises(InvalidRequest, match="unsafe"):
        byte_tokenizer().apply_chat_template(USER, template="{{ ''.__class__.__mro__ }}")
    with pytest.raises(InvalidRequest, match="unsafe"):
        byte_tokenizer().apply_chat_template(USER, template="{{ messages.append(1) }}")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "Expected"),
        ("{{ messages[0].content + 1 }}", "can only concatenate"),
        ("{{ missing.field }}", "'missing' is undefined"),
    ],
)
def test_template_errors_are_invalid_requests_in_the_templates_words(
    template: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        byte_tokenizer().apply_chat_template(USER, template=template)


def test_without_a_template_the_caller_learns_how_to_pass_one(tmp_path: Path) -> None:
    tokenizer = with_settings(tmp_path, chat_template=None)
    with pytest.raises(InvalidRequest, match="no chat template; pass chat_template"):
        tokenizer.apply_chat_template(USER)


def test_the_template_file_wins_over_the_settings(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert with_settings(tmp_path).apply_chat_template(USER) == "from the file"


def test_a_template_of_the_operator_replaces_all_that_the_model_brings(tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path, chat_template="ours {{ tools | length }}")
    assert tokenizer.template_names == ("default",)
    assert tokenizer.apply_chat_template(USER, tools=[{}]) == "ours 1"
    with pytest.raises(ConfigError, match="no Jinja template: Expected"):
        Tokenizer.from_folder(tmp_path, chat_template="{% for %}")


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_truncated_text_keeps_what_belongs_around_it(side: Any) -> None:
    tokenizer = sentencepiece_tokenizer()
    bos, *text = whole = tokenizer.encode("the Paris the Paris")
    assert bos == tokenizer.bos_token_id
    for limit in range(1, len(whole) + 2):
        ids, is_cut = tokenizer.encode_truncated("the Paris the Paris", limit, side)
        assert is_cut == (limit < len(whole))
        num_left = limit - 1
        assert ids == [
            bos,
            *(text[max(0, len(text) - num_left) :] if side == "left" else text[:num_left]),
        ]


def test_named_templates_are_chosen_by_name_or_by_tools(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }} tool"},
        {"name": "rag", "template": "documents"},
    ]
    tokenizer = with_settings(tmp_path, chat_template=named)
    assert tokenizer.apply_chat_template(USER) == "plain"
    assert tokenizer.apply_chat_template(USER, tools=[{"name": "f"}]) == "1 tool"
    assert tokenizer.apply_chat_template(USER, template="rag") == "documents"


def test_without_a_default_the_named_templates_are_listed(tmp_path: Path) -> None:
    tokenizer = with_settings(tmp_path, chat_template=[{"name": "rag", "template": "documents"}])
    with pytest.raises(InvalidRequest, match="name one of: rag"):
        tokenizer.apply_chat_template(USER)
