"""Messages <-> bytes: one kind byte, then the message's fields as msgpack, decoded by type.

The kind table is the protocol. Decoding goes through a strict twin of each record (msgspec ignores
unknown keys of a dataclass but can refuse those of a Struct), then builds the record itself, so
that `SamplingParams` validates what came over the wire exactly as it does at home.
"""

import dataclasses
from collections.abc import Mapping
from functools import reduce
from operator import or_
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from nano.engine.messages import (
    AbortRequests,
    AddRequests,
    ControlReply,
    ControlRequest,
    EngineFailure,
    EngineHeartbeat,
    EngineOutputs,
    EngineReady,
    FromCore,
    ToCore,
)
from nano.errors import NanoError

# The first byte of a message. Numbers are never reused.
KINDS: dict[int, type[ToCore | FromCore]] = {
    1: AddRequests,
    2: AbortRequests,
    3: ControlRequest,
    4: EngineOutputs,
    5: ControlReply,
    6: EngineReady,
    7: EngineHeartbeat,
    8: EngineFailure,
}

# What a front end says when it connects and when it leaves. Raw words, told from messages by their
# first byte: the core knows a front end by its socket, not by anything it could write.
HELLO = b"hello"
GOODBYE = b"goodbye"


class CodecError(NanoError, ValueError):
    """Bytes that are no message of this protocol."""


def _twin(hint: Any, known: dict[type, Any]) -> Any:
    """`hint` with every dataclass in it replaced by a Struct that forbids unknown fields."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if hint not in known:
            hints = get_type_hints(hint)
            fields = [(f.name, _twin(hints[f.name], known)) for f in dataclasses.fields(hint)]
            # No defaults: a sender always writes every field, so a missing one is damage.
            known[hint] = msgspec.defstruct(hint.__name__, fields, forbid_unknown_fields=True)
        return known[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return reduce(or_, (_twin(arg, known) for arg in args))
    if origin in (list, dict, tuple, Mapping):
        return origin[tuple(arg if arg is ... else _twin(arg, known) for arg in args)]
    return hint


_TWINS: dict[type, Any] = {}
_ENCODER = msgspec.msgpack.Encoder()
_KIND_BYTE = {message: bytes([kind]) for kind, message in KINDS.items()}
_DECODERS = {
    kind: msgspec.msgpack.Decoder(_twin(message, _TWINS)) for kind, message in KINDS.items()
}


def encode(message: ToCore | FromCore) -> bytes:
    """The bytes of one message."""
    return _KIND_BYTE[type(message)] + _ENCODER.encode(message)


def decode(data: bytes) -> ToCore | FromCore:
    """The message in `data`. Raises `CodecError` for anything else, whatever the bytes."""
    if not data:
        raise CodecError("an empty message")
    decoder = _DECODERS.get(data[0])
    if decoder is None:
        raise CodecError(f"unknown message kind {data[0]}; known: {', '.join(map(str, KINDS))}")
    try:
        fields = decoder.decode(memoryview(data)[1:])
        return msgspec.convert(fields, KINDS[data[0]], from_attributes=True)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CodecError(f"not a valid {KINDS[data[0]].__name__}: {error}") from error
