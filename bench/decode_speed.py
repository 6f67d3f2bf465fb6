"""Tokens per second of a real model, end to end through `LLM.generate`.

    python bench/decode_speed.py --model demo [--compile-mode compiled] [--rival]

Decodes 64 greedy tokens at 1, 8 and 32 streams (best of two) and computes prompts of 512 and 2048
tokens. `--rival` runs transformers' `generate` on the same weights in the same process afterwards.
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nano import LLM, SamplingParams
from nano.checkpoint.hf_config import load_decoder_config
from nano.checkpoint.locate import locate_model
from nano.models.weight_sources import CheckpointWeights

NUM_TOKENS = 64


def seconds(work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def rival(folder: Path) -> torch.nn.Module:
    """transformers' model of the same weights as floats, also where `folder` holds others."""
    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    weights = CheckpointWeights(folder, load_decoder_config(folder).quantization)
    for name, parameter in model.named_parameters():
        weight = weights.read(name, tuple(parameter.shape))
        parameter.data.copy_(weight if isinstance(weight, torch.Tensor) else weight.dequantized())
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--compile-mode", default="auto")
    parser.add_argument("--rival", action="store_true")
    args = parser.parse_args()

    settings = {"max_model_len": 4096, "max_num_batched_tokens": 512}
    with LLM(args.model, compile_mode=args.compile_mode, **settings) as llm:
        decode = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        for num_streams in (1, 8, 32):
            prompts = [f"Number {i}: once upon a time there was" for i in range(num_streams)]
            llm.generate(prompts, one, use_tqdm=False)  # prompts are cached from here on
            best = min(
                seconds(lambda p=prompts: llm.generate(p, decode, use_tqdm=False)) for _ in range(2)
            )
            print(
                f"decode, {num_streams:2} streams: {num_streams * NUM_TOKENS / best:7.1f} tokens/s"
            )
        for length in (512, 2048):
            prompt = [5 + (7 * i + length) % 9000 for i in range(length)]
            spent = seconds(lambda p=prompt: llm.generate(p, one, use_tqdm=False))
            print(f"prompt of {length:4}: {length / spent:7.1f} tokens/s")
    if args.rival:
        model = rival(locate_model(args.model))
        ids = torch.arange(100, 110)[None]
        limits = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=2, **limits)
            spent = seconds(lambda: model.generate(ids, max_new_tokens=NUM_TOKENS, **limits))
        print(f"transformers, 1 stream: {NUM_TOKENS / spent:7.1f} tokens/s")


if __name__ == "__main__":
    main()
