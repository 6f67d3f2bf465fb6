"""Reply: the answer to one call in the shape of its API, whole or as server-sent events."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from nano.outputs import RequestOutput

Json = dict[str, Any]

_encoder = msgspec.json.Encoder()  # a tenth of what json.dumps takes, for each token of each stream
# Ends of lines to Unicode, though not to server-sent events: many clients split streams there.
_LINE_ENDS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event. A text as `data` is sent as it is."""

    data: Json | str
    name: str | None = None

    def encode(self) -> bytes:
        if isinstance(self.data, str):
            data = self.data.encode()
        else:
            data = _encoder.encode(self.data)
            if not data.isascii():
                for char, escaped in _LINE_ENDS.items():
                    data = data.replace(char, escaped)
        name = b"" if self.name is None else b"event: %b\n" % self.name.encode()
        return b"%bdata: %b\n\n" % (name, data)


class Reply(ABC):
    """Give it each output of the call: `whole` takes all of a plain call; of a stream, `opening`
    comes first, then `news` for each output, then `closing`, or `failure` if anything was raised.
    `whole` and `news` raise `RequestFailed` for an output that carries an error.
    """

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """The body of a call that is not streamed; `outputs` are finished, in prompt order."""

    def opening(self) -> Iterator[Event]:
        """What a stream begins with before anything is computed."""
        return iter(())

    @abstractmethod
    def news(self, prompt_index: int, output: RequestOutput) -> Iterator[Event]:
        """The events that `output`, which holds only what is new, gives rise to."""

    @abstractmethod
    def closing(self) -> Iterator[Event]:
        """What ends a stream that went well."""

    @abstractmethod
    def failure(self, error: Exception) -> Iterator[Event]:
        """What ends a stream that did not: the status line is gone, nothing else can tell."""
