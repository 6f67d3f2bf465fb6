"""ChatTemplates: conversations rendered to prompt text, as transformers renders them. Torch-free.

A template is a program from a checkpoint or a request, so it runs in Jinja's sandbox and whatever
it raises is the request's error, in the template's own words. Nothing is left out of the prompt
without a word: variables that it does not read are refused here, and tool calls that it does not
render are made part of the message's text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nano.errors import ConfigError, InvalidRequest

# Marks the end of the message that is to be continued: not characters, so in nobody's text.
_OPEN_END = "\ufdd0\ufdd1\ufdd0"


@dataclass(frozen=True, slots=True)
class _Compiled:
    template: Template
    words: frozenset[str]  # the names, attributes and string constants in it


class ChatTemplates:
    """A model's named templates. Compiled once each; rendering is safe from several threads."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]):
        """`special_tokens` (role -> text) are variables of every template."""
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._environment = _environment()
        self._compiled: dict[str, _Compiled] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        template: str | None,
        variables: Mapping[str, Any],
        continue_final_message: bool = False,
    ) -> str:
        """The prompt text. `template` is a name or Jinja text; None is the model's own."""
        chosen = self._choose(template, has_tools=bool(variables.get("tools")))
        try:
            compiled = self._compile(chosen)
        except Exception as error:
            raise InvalidRequest(f"chat template: {error}", "chat_template") from error
        for name in variables:
            if name not in compiled.words:
                raise InvalidRequest(f"chat template: nothing in it reads {name!r}", name)
        messages = [_known_to(compiled, message) for message in messages]
        if continue_final_message:
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}{_OPEN_END}"}
        try:
            text = compiled.template.render(
                **{
                    **self._special_tokens,
                    "tools": None,
                    "documents": None,
                    **variables,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:
            raise InvalidRequest(f"chat template: {error}", "messages") from error
        if not continue_final_message:
            return text
        open_text, end, _ = text.rpartition(_OPEN_END)
        if not end:
            raise InvalidRequest(
                "chat template: it leaves out the end of the final message, which cannot be "
                "continued then",
                "continue_final_message",
            )
        return open_text

    def _choose(self, template: str | None, has_tools: bool) -> str:
        if template is not None:
            return self._templates.get(template, template)
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if self._templates:
            names = ", ".join(self._templates)
            raise InvalidRequest(
                f"the model has no default chat template; name one of: {names}", "chat_template"
            )
        raise InvalidRequest(
            "the model has no chat template; pass chat_template (the server's --chat-template: "
            "Jinja text or a file of it), put one into its tokenizer_config.json or "
            "chat_template.jinja, or send a plain prompt",
            "chat_template",
        )

    def _compile(self, text: str) -> _Compiled:
        compiled = self._compiled.get(text)
        if compiled is None:
            words = _words(self._environment.parse(text))
            compiled = _Compiled(self._environment.from_string(text), words)
            if text in self._templates.values():  # a request's own template is not kept
                self._compiled[text] = compiled
        return compiled


def check_template(text: str) -> None:
    """Raises `ConfigError` for what is no template."""
    try:
        _environment().from_string(text)
    except TemplateError as error:
        raise ConfigError(f"chat_template is no Jinja template: {error}") from error


def _words(tree: nodes.Template) -> frozenset[str]:
    names = {node.name for node in tree.find_all(nodes.Name)}
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(names | attributes | constants)


def _known_to(compiled: _Compiled, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """`message` for a template that may not know developers or tool calls."""
    if message.get("tool_calls") and "tool_calls" not in compiled.words:
        return {**message, "content": _with_calls(message)}
    if message.get("role") == "developer" and "developer" not in compiled.words:
        return {**message, "role": "system"}  # its older name
    return message


def _with_calls(message: Mapping[str, Any]) -> str:
    """What a message says and, a line each, its tool calls as models write them."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
    return "\n".join([message["content"], *calls] if message["content"] else calls)


class _GenerationTag(Extension):
    """`{% generation %}` ... `{% endgeneration %}`: a mark for training; here plain text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes <, > and & for HTML, which models were not trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
