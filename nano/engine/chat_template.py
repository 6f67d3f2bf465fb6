"""ChatTemplates: conversations rendered to prompt text, as transformers renders them. Torch-free.

A template is a program from a checkpoint or a request, so it runs in Jinja's sandbox and whatever
it raises is the request's error, in the template's own words.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nano.errors import InvalidRequest


class ChatTemplates:
    """A model's named templates. Compiled once each; rendering is safe from several threads."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]):
        """`special_tokens` (role -> text) are variables of every template."""
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._environment = _environment()
        self._compiled: dict[str, Template] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        template: str | None,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt text. `template` is a name or Jinja text; None is the model's own."""
        chosen = self._choose(template, has_tools=bool(variables.get("tools")))
        try:
            return self._compile(chosen).render(
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
            "the model has no chat template; pass chat_template (Jinja text), put one into its "
            "tokenizer_config.json or chat_template.jinja, or send a plain prompt",
            "chat_template",
        )

    def _compile(self, text: str) -> Template:
        compiled = self._compiled.get(text)
        if compiled is None:
            compiled = self._environment.from_string(text)
            if text in self._templates.values():  # a request's own template is not kept
                self._compiled[text] = compiled
        return compiled


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
