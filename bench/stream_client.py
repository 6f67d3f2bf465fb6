"""A client of N streams that costs little: one process, one thread, raw sockets, one epoll.

python -m bench.stream_client --port 8000 --model NAME --streams 64 --tokens 300 --times FILE

Every token is stamped when its bytes have been read; what they say is looked at when all streams
have ended. Prints one line of JSON: delays from the end of a token's step to its stamp, in seconds,
of the middle of each stream (its first and last tenth share the machine with requests that come and
go), and what this client itself took.
"""

import argparse
import json
import re
import resource
import selectors
import socket
import time
from bisect import bisect_left
from itertools import accumulate
from pathlib import Path

from bench.step_clock import StepTimes, percentile

READ_BYTES = 1 << 16
TEXT = re.compile(rb'"(?:text|content)":\s?"([A-Za-z0-9_-]*)"')
PROMPT = "Fixed steps for all. "
END = b"data: [DONE]"
SHARE_LEFT_OUT = 0.1  # at either end


class Stream:
    """One open request. `pieces` are what was read, and when."""

    def __init__(self, port: int, request: bytes):
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.sendall(request)
        self.pieces: list[tuple[float, bytes]] = []

    def read(self) -> bool:
        """Take what is there; whether more will come."""
        data = self.socket.recv(READ_BYTES)
        self.pieces.append((time.monotonic(), data))
        return bool(data) and END not in data

    def tokens(self) -> tuple[str, list[float]]:
        """(letters, when each had been read)."""
        whole = b"".join(data for _, data in self.pieces)
        assert whole.startswith(b"HTTP/1.1 200"), whole[:500]
        ends = list(accumulate(len(data) for _, data in self.pieces))
        letters, times = [], []
        for match in TEXT.finditer(whole):
            text = match[1].decode()
            letters.append(text)
            times += [self.pieces[bisect_left(ends, match.end())][0]] * len(text)
        return "".join(letters), times


def request_bytes(model: str, num_tokens: int) -> bytes:
    fields = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def stream_all(port: int, request: bytes, num_streams: int) -> list[Stream]:
    streams = [Stream(port, request) for _ in range(num_streams)]
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        num_open = num_streams
        while num_open:
            for key, _ in selector.select():
                if not key.data.read():
                    selector.unregister(key.fileobj)
                    num_open -= 1
    for stream in streams:
        stream.socket.close()
    return streams


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--times", type=Path, required=True, help="the file of the StepClock")
    args = parser.parse_args()
    began, began_cpu = time.monotonic(), cpu_seconds()
    streams = stream_all(args.port, request_bytes(args.model, args.tokens), args.streams)
    seconds, own_seconds = time.monotonic() - began, cpu_seconds() - began_cpu
    step_times = StepTimes(str(args.times))
    delays: list[float] = []
    num_tokens = num_reads = 0
    for stream in streams:
        letters, times = stream.tokens()
        assert len(letters) == args.tokens, f"{len(letters)} tokens"
        num_tokens += len(letters)
        num_reads += len(stream.pieces)
        left_out = int(SHARE_LEFT_OUT * len(letters))
        delays += step_times.delays(letters, times)[left_out : len(letters) - left_out]
    answer = {
        "p50": percentile(delays, 0.5),
        "p99": percentile(delays, 0.99),
        "seconds": seconds,
        "tokens": num_tokens,
        "reads_per_token": num_reads / num_tokens,
        "client_cpu": own_seconds,
    }
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
