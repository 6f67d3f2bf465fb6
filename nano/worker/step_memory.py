"""What a device's memory is spent on beside the KV cache, measured on the loaded models."""

from collections.abc import Iterable

from nano.device.memory import MemoryMeter
from nano.spec.proposers import Proposers
from nano.worker.loaded_model import LoadedModel

_NUM_BLOCKS = 1  # of the cache that graphs are captured over to be measured


def measure_step_memory(
    meter: MemoryMeter,
    loaded: LoadedModel,
    token_budget: int,
    max_num_requests: int,
    query_lens: Iterable[int],
) -> None:
    """Add the activations of a worst-case step, and the graphs of all its sizes, to `meter`.

    Of every model that has steps: they take turns, so the largest step counts, but all graphs do.
    The step verifies a full budget of drafts: as many tokens as there may be, each with logits.
    The graphs are captured over a cache of one block and dropped: those that serve are captured
    once the cache has its place.
    """
    block_size = loaded.config.kv_cache.block_size
    num_tokens = min(token_budget, loaded.max_model_len)
    bytes_per_block = sum(layer.bytes_per_block(block_size) for layer in loaded.kv_layers)
    own = -(-num_tokens // block_size) * bytes_per_block
    with meter.peak("activations", apart_from=own):
        loaded.probe.seconds(0, num_tokens, num_runs=2, num_drafts=num_tokens - 1)
    runner = loaded.make_runner(Proposers(), _NUM_BLOCKS, max_num_requests, token_budget)
    with meter.growth("graphs"):
        loaded.add_graphs(runner.context, token_budget, max_num_requests, query_lens)
        for graphs in loaded.graphs:
            graphs.capture_all()
    loaded.graphs.clear()
