"""The table of request parameters: what a route makes of each field of its body.

The body's class is the table. Every field says in which of three states it is:

    applied   it does what it says, or the request is refused
    neutral   taken because clients send it, as long as it changes nothing
    refused   known, and not to be had: the answer is a 400 that names it and says why

`GET /v1/capabilities`, the OpenAPI page, the refusals and the tests all read it from there.
"""

import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class State(StrEnum):
    APPLIED = "applied"
    NEUTRAL = "neutral"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Parameter:
    """`accepts` is which values, in words; `reason` why there are no others."""

    state: State
    accepts: str
    reason: str | None = None


def applied(accepts: str, default: Any = None) -> Any:
    """A field that is applied. A `default` of ... makes it required."""
    return _field(Parameter(State.APPLIED, accepts), default)


def neutral(accepts: str, reason: str | None = None) -> Any:
    """A field whose type admits only what changes nothing; `reason` is told of other values."""
    return _field(Parameter(State.NEUTRAL, accepts, reason), None)


def refused(reason: str) -> Any:
    """A field of type None."""
    return _field(Parameter(State.REFUSED, "null", reason), None)


def _field(parameter: Parameter, default: Any) -> Any:
    words = {"state": parameter.state.value, "accepts": parameter.accepts}
    if parameter.reason is not None:
        words["reason"] = parameter.reason
    description = f"{parameter.state.value.capitalize()}: {parameter.reason or parameter.accepts}"
    return Field(default=default, description=description, json_schema_extra={**words})


class Body(BaseModel):
    """Strict: no unknown field, no number made from a string. null means not given (OpenAI)."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @field_validator("*", mode="wrap")
    @classmethod
    def _refuse_in_words(
        cls, value: Any, accept: Callable[[Any], Any], info: ValidationInfo
    ) -> Any:
        try:
            accepted = accept(value)
        except ValidationError as error:
            parameter = parameter_of(cls, info.field_name or "")
            first = error.errors(include_url=False, include_input=False)[0]
            is_of_union = "str" in first["loc"]  # pydantic complains of each member in turn
            if parameter.reason is not None:
                why = parameter.reason
            elif not parameter.accepts or (first["loc"] and not is_of_union):
                raise  # it says what is wrong, deeper inside
            else:
                why = f"got {reprlib.repr(value)}" if is_of_union else first["msg"]
            raise _refusal(parameter, why) from None
        # A Literal compares: 0.0 would do for false, and true for 1.
        if isinstance(accepted, bool) is not isinstance(value, bool):
            parameter = parameter_of(cls, info.field_name or "")
            raise _refusal(parameter, parameter.reason or f"got {reprlib.repr(value)}")
        return accepted


def _refusal(parameter: Parameter, why: str) -> PydanticCustomError:
    return PydanticCustomError(
        "refused", "{why}; accepted: {accepts}", {"why": why, "accepts": parameter.accepts}
    )


def parameter_of(body: type[Body], name: str) -> Parameter:
    """The row of one field. A field that says nothing is applied as its type says."""
    words = body.model_fields[name].json_schema_extra
    if not isinstance(words, dict):
        return Parameter(State.APPLIED, "")
    reason = words.get("reason")
    return Parameter(
        State(str(words["state"])),
        str(words["accepts"]),
        None if reason is None else str(reason),
    )


def parameters_of(body: type[Body]) -> dict[str, Parameter]:
    """The table of one route, by field."""
    return {name: parameter_of(body, name) for name in body.model_fields}
