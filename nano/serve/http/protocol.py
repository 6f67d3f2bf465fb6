"""HttpProtocol: HTTP/1.1 as uvicorn and httptools read and write it, with a limit to a head."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 1 << 16  # of a request line and headers, or of trailers


class HttpProtocol(HttpToolsProtocol):  # type: ignore[misc]  # uvicorn has no types for us
    """One connection. A chunk of a stream costs a third of what it does with h11, which would bound
    heads by itself; httptools lets one grow for as long as its sender likes.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._num_bytes = 0  # read since something came of it

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        super().data_received(data)
        if self._num_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The headers must have at most {MAX_HEAD_BYTES} bytes.")

    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_bytes = 0
        super().on_message_complete()
