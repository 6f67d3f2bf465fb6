"""GraphKeys: which graphs there are, and which one serves a step. Pure functions of counts.

    piecewise   everything between attention calls; keyed by tokens, for any mix of requests
    full        a whole forward pass; keyed by (requests, query length), for steps in which every
                request computes as many tokens: decode (1), verification of k drafts (k + 1)

Mode names are vLLM's.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nano.attention.backend import AttentionMetadata, GraphSupport
from nano.compile.graph_buckets import bucket_of, fitted_buckets, ladder
from nano.config import GraphMode

_WITH_PIECES = ("PIECEWISE", "FULL_AND_PIECEWISE")
_WITH_FULL = ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")

# Above so many tokens the device takes longer than the host needs to queue its work.
MAX_GRAPH_TOKENS = 512


@dataclass(frozen=True, slots=True)
class StepShape:
    """All that decides about a step's graph."""

    num_tokens: int
    num_requests: int
    query_len: int  # tokens of the longest query
    is_uniform: bool  # every query is as long

    @classmethod
    def of(cls, metadata: AttentionMetadata) -> "StepShape":
        num_requests, query_len = metadata.num_requests, metadata.max_query_len
        is_uniform = num_requests * query_len == metadata.num_tokens
        return cls(metadata.num_tokens, num_requests, query_len, is_uniform)


@dataclass(frozen=True, slots=True)
class GraphKey:
    """A graph, or the graphs of one piecewise step."""

    num_tokens: int  # padding included
    num_requests: int | None = None  # None: piecewise

    @property
    def is_full(self) -> bool:
        return self.num_requests is not None

    @property
    def query_len(self) -> int:
        """Of a full graph's requests."""
        assert self.num_requests is not None
        return self.num_tokens // self.num_requests

    def __str__(self) -> str:
        if self.num_requests is None:
            return f"piecewise {self.num_tokens}"
        return f"full {self.num_requests} x {self.query_len}"


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What becomes of a step."""

    key: GraphKey | None  # None: it runs eagerly
    num_padding_tokens: int = 0
    why_eager: str = ""


@dataclass(frozen=True, slots=True)
class GraphKeys:
    """The buckets of one model, all rising."""

    token_buckets: tuple[int, ...] = ()  # piecewise
    # Query length -> requests of a full graph.
    request_buckets: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of_mode(
        cls,
        mode: GraphMode,
        max_num_tokens: int,
        max_num_requests: int,
        query_lens: Iterable[int] = (1,),
        sizes: Sequence[int] = (),
    ) -> "GraphKeys":
        """The default ladders, or those of `sizes` (in tokens, any order; full graphs are rounded
        up to whole queries), within the sizes that steps can have. `mode` is a settled one."""
        largest = max_num_tokens if sizes else min(max_num_tokens, MAX_GRAPH_TOKENS)
        pieces = sorted({size for size in sizes if size <= largest}) if sizes else ladder(largest)
        full: dict[int, tuple[int, ...]] = {}
        for query_len in sorted(query_lens):
            most = min(max_num_requests, largest // query_len)
            wanted = {-(-size // query_len) for size in sizes}
            found = [n for n in sorted(wanted) if n <= most] if sizes else ladder(most)
            if most and found:
                full[query_len] = tuple(found)
        return cls(
            tuple(pieces) if mode in _WITH_PIECES else (), full if mode in _WITH_FULL else {}
        )

    def fitted(self, shapes: Mapping[StepShape, int]) -> "GraphKeys":
        """As many graphs of each kind, for the same steps, that pad those observed less.

        `shapes`: how often each was seen.
        """
        pieces: Counter[int] = Counter()
        full: dict[int, Counter[int]] = {query_len: Counter() for query_len in self.request_buckets}
        for shape, count in shapes.items():
            key = self.dispatch(shape).key
            if key is None:
                continue
            if key.is_full:
                full[shape.query_len][shape.num_requests] += count
            else:
                pieces[shape.num_tokens] += count
        return GraphKeys(
            fitted_buckets(self.token_buckets, pieces),
            {q: fitted_buckets(self.request_buckets[q], full[q]) for q in full},
        )

    def num_padding_tokens(self, shapes: Mapping[StepShape, int]) -> int:
        """That such steps would be padded with."""
        return sum(
            count * self.dispatch(shape).num_padding_tokens for shape, count in shapes.items()
        )

    def dispatch(self, shape: StepShape) -> Dispatch:
        """The smallest graph that the step fits, whole steps first."""
        if shape.is_uniform:
            query_len = shape.query_len
            num_requests = bucket_of(shape.num_requests, self.request_buckets.get(query_len, ()))
            if num_requests is not None:
                key = GraphKey(num_requests * query_len, num_requests)
                return Dispatch(key, key.num_tokens - shape.num_tokens)
        num_tokens = bucket_of(shape.num_tokens, self.token_buckets)
        if num_tokens is not None:
            return Dispatch(GraphKey(num_tokens), num_tokens - shape.num_tokens)
        if self.token_buckets:
            return Dispatch(None, why_eager=f"more than {self.token_buckets[-1]} tokens")
        if not shape.is_uniform:
            return Dispatch(None, why_eager="queries of several lengths")
        return Dispatch(None, why_eager="no graph for so many requests and tokens of each")

    def capture_order(self) -> list[GraphKey]:
        """Largest first, so that the smaller ones live in memory that these have left behind."""
        pieces = [GraphKey(num_tokens) for num_tokens in self.token_buckets]
        full = [
            GraphKey(num_requests * query_len, num_requests)
            for query_len, buckets in self.request_buckets.items()
            for num_requests in buckets
        ]
        return [
            *sorted(pieces, key=lambda key: -key.num_tokens),
            *sorted(full, key=lambda key: -key.num_tokens),
        ]

    @property
    def max_num_tokens(self) -> int:
        return max((key.num_tokens for key in self.capture_order()), default=0)

    @property
    def max_num_requests(self) -> int:
        """Of a full graph."""
        return max((key.num_requests or 0 for key in self.capture_order()), default=0)


def settle_mode(wanted: GraphMode, support: GraphSupport, backend: str) -> tuple[GraphMode, str]:
    """(the mode that can be had, why it is another one than `wanted`, or "")."""
    if wanted == "NONE":
        return wanted, ""
    if support == GraphSupport.NONE:
        return "NONE", f"attention backend {backend} serves no graphs"
    if wanted == "PIECEWISE":
        return wanted, ""
    if support < GraphSupport.FULL_DECODE:
        return "PIECEWISE", f"attention backend {backend} cannot be captured"
    if wanted == "FULL":
        return "FULL_AND_PIECEWISE", "attention over queries of several lengths is never captured"
    return wanted, ""
