"""What each way of storing weights costs in quality, against the unquantised model.

    python -m bench.quantisation_quality --model FOLDER_OR_GGUF [--schemes int8,w8a8]
    python -m bench.quantisation_quality --layers

Every position of the texts beside this file (prose, dialogue, code), teacher-forced: the mean and
the 99.9th percentile of KL(unquantised || scheme) in nats, perplexity, and how often both models
find the same token likeliest. `--layers` compares single made-up layers, among them ones with a few
input channels that are 50 times larger than the rest.

The models that can be downloaded for this project's tests are themselves dequantised from 4 bits:
figures measured on them are not figures for original weights.
"""

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from nano.attention.backend import AttentionBackend, AttentionMetadata, AttentionSetup
from nano.attention.op import ForwardContext, forward_context
from nano.attention.select import select_backend
from nano.checkpoint.hf_config import load_decoder_config
from nano.checkpoint.locate import locate_model
from nano.device import make_device
from nano.layers.linear import Linear
from nano.layers.select import select_kernels
from nano.models.decoder import Decoder
from nano.models.weight_storage import WeightStorage
from nano.models.weights import load_model

TEXTS = Path(__file__).with_name("texts")
UNQUANTISED, BFLOAT16_KV, BFLOAT16_DTYPE = "unquantised", "bfloat16 KV", "dtype bfloat16"
SCHEMES = ("bfloat16", "int8", "w8a8", "int4", "w4a8", BFLOAT16_KV, BFLOAT16_DTYPE)
CHUNK = 256  # positions whose logits exist at once
BLOCK_SIZE = 16
CPU = make_device("cpu").torch_device  # sets the threads as the engine does


class Continuation:
    """A model that computes as `scheme` says, reading one text chunk by chunk."""

    def __init__(self, model: Decoder, scheme: str, num_tokens: int):
        self.model = model
        kv_dtype = "bfloat16" if scheme in (BFLOAT16_KV, BFLOAT16_DTYPE) else "float32"
        multiplied = torch.bfloat16 if scheme == BFLOAT16_DTYPE else None
        specs = model.kv_specs(kv_dtype)
        setup = AttentionSetup(
            BLOCK_SIZE, specs[0], model.config.num_heads, torch.float32, CPU, multiplied=multiplied
        )
        self.backend: AttentionBackend = select_backend("auto", specs, CPU).for_model(setup)
        self.num_blocks = -(-num_tokens // BLOCK_SIZE)
        caches = [
            torch.zeros(
                self.backend.kv_cache_shape(spec, self.num_blocks), dtype=getattr(torch, kv_dtype)
            )
            for spec in specs
        ]
        self.context = ForwardContext(self.backend, caches)
        self.num_read = 0

    def logits(self, token_ids: Tensor) -> Tensor:
        """token_ids: [T], those that follow what has been read. Returns [T, V]."""
        num_tokens = len(token_ids)
        positions = torch.arange(self.num_read, self.num_read + num_tokens)
        self.num_read += num_tokens
        self.backend.plan(
            AttentionMetadata(
                num_requests=1,
                num_tokens=num_tokens,
                max_query_len=num_tokens,
                max_seq_len=self.num_read,
                num_decode_requests=0,
                query_start_loc=np.array([0, num_tokens], np.int32),
                seq_lens=np.array([self.num_read], np.int32),
                block_table=torch.arange(self.num_blocks, dtype=torch.int32)[None],
                slot_mapping=positions,
            )
        )
        with forward_context(self.context):
            hidden = self.model(token_ids.int(), positions)
        return self.model.compute_logits(hidden)


@dataclass
class Comparison:
    """What has been found at all positions so far."""

    divergences: list[Tensor] = field(default_factory=list)
    log_likelihood: float = 0.0
    num_agreeing: int = 0

    def add(self, expected: Tensor, logits: Tensor, next_ids: Tensor) -> None:
        """expected: logits of the unquantised model; [T, V] like `logits`."""
        expected, found = expected.log_softmax(-1), logits.log_softmax(-1)
        self.divergences.append((expected.exp() * (expected - found)).sum(-1))
        self.log_likelihood += float(found.gather(1, next_ids[:, None]).double().sum())
        self.num_agreeing += int((expected.argmax(-1) == found.argmax(-1)).sum())

    def row(self) -> str:
        kl = torch.cat(self.divergences).double()
        perplexity = math.exp(-self.log_likelihood / len(kl))
        return (
            f"{kl.mean():.6f} | {kl.quantile(0.999):.5f} | {perplexity:.4f} | "
            f"{self.num_agreeing / len(kl):.2%}"
        )


def compare_models(path: str, schemes: list[str], max_tokens: int) -> None:
    """All models are in memory at once, so that the unquantised one reads the texts only once."""
    folder = locate_model(path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [
        torch.tensor(tokenizer.encode(file.read_text(encoding="utf-8")).ids[:max_tokens])
        for file in sorted(TEXTS.glob("*.txt"))
    ]
    print(f"{folder.name}: {sum(len(ids) - 1 for ids in texts)} positions of {len(texts)} texts")
    print("(a test model dequantised from 4 bits gives no figures for original weights)\n")
    reference = load(folder, None)
    models = {UNQUANTISED: reference}
    for scheme in schemes:
        models[scheme] = reference if scheme == BFLOAT16_KV else load(folder, scheme)
    comparisons = {name: Comparison() for name in models}
    for ids in texts:
        readers = {name: Continuation(model, name, len(ids)) for name, model in models.items()}
        for start in range(0, len(ids) - 1, CHUNK):
            end = min(start + CHUNK, len(ids) - 1)
            expected = readers[UNQUANTISED].logits(ids[start:end])
            for name, reader in readers.items():
                logits = expected if name == UNQUANTISED else reader.logits(ids[start:end])
                comparisons[name].add(expected, logits, ids[start + 1 : end + 1])
    print("| scheme | GB | mean KL | KL, 99.9 % | perplexity | same likeliest |")
    print("|---|---|---|---|---|---|")
    for name, model in models.items():
        num_bytes = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
        print(f"| {name} | {num_bytes / 1e9:.3f} | {comparisons[name].row()} |")


def load(folder: Path, scheme: str | None) -> Decoder:
    config = load_decoder_config(folder)
    is_narrow = scheme == BFLOAT16_DTYPE
    kernels = select_kernels("bfloat16" if is_narrow else "float32", "exact")
    model = load_model(
        folder,
        config,
        dtype=torch.float32,
        device=CPU,
        max_model_len=min(config.max_model_len, 8192),
        quantization=None if is_narrow else scheme,
        kernels=kernels,
        show_progress=False,
    )
    model.pack(kernels)
    return model


def compare_layers(size: int = 1024, num_rows: int = 64, num_outliers: int = 8) -> None:
    """Relative error of a layer's result, in the root mean square of all its numbers."""
    generator = torch.Generator().manual_seed(0)
    outliers = torch.ones(size)
    outliers[torch.randperm(size, generator=generator)[:num_outliers]] = 50.0
    weight = torch.randn(size, size, generator=generator) * size**-0.5
    x = torch.randn(num_rows, size, generator=generator)
    cases = {
        "plain": (x, weight),
        f"{num_outliers} inputs 50 times larger": (x * outliers, weight),
        f"{num_outliers} columns of weights 50 times larger": (x, weight * outliers),
        "both, as if one made up for the other": (x * outliers, weight / outliers),
    }
    schemes = [scheme for scheme in SCHEMES if scheme not in (BFLOAT16_KV, BFLOAT16_DTYPE)]
    kernels = select_kernels("float32", "exact")
    print(f"one layer of {size} x {size}, {num_rows} rows: relative error of the result\n")
    print(f"| layer | {' | '.join(schemes)} |")
    print(f"|---{'|---' * len(schemes)}|")
    for name, (inputs, matrix) in cases.items():
        exact = inputs.double() @ matrix.double().T
        errors = []
        for scheme in schemes:
            storage = WeightStorage(scheme, dtype=torch.float32, device=CPU, kernels=kernels)
            layer = Linear(size, size)
            storage.fill_linear(layer, [matrix], None, is_output=False)
            error = (layer(inputs).double() - exact).norm() / exact.norm()
            errors.append(f"{error:.4f}")
        print(f"| {name} | {' | '.join(errors)} |")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="'demo', a folder, or a .gguf file")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--max-tokens", type=int, default=4096, help="of each text")
    parser.add_argument("--layers", action="store_true", help="compare made-up layers")
    args = parser.parse_args()
    if args.layers:
        compare_layers()
    if args.model:
        compare_models(args.model, args.schemes.split(","), args.max_tokens)


if __name__ == "__main__":
    main()
