"""Greedy ids of a real model against transformers, prompt by prompt.

    python -m bench.transformers_parity --model FOLDER_OR_GGUF --prompts question.jsonl

nano generates; transformers (float32, eager attention) then scores every position of prompt and
output in one pass, which tells what its own greedy decoding would have said there. A divergence
counts as a tie if transformers' two best logits differ by less than 1e-3, and ends that prompt's
comparison. With --generate, transformers' own `generate` is run as well and compared id by id.
Exits 1 on a divergence that is no tie.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GgufConfig

from nano import LLM, SamplingParams

TIE = 1e-3


def load_reference(path: Path) -> torch.nn.Module:
    settings = {"dtype": torch.float32, "attn_implementation": "eager"}
    if path.suffix == ".gguf":
        settings |= {
            "gguf_file": path.name,
            "quantization_config": GgufConfig(dequantize=True),
        }
        path = path.parent
    return AutoModelForCausalLM.from_pretrained(path, **settings).eval()


def first_divergence(ours: list[int], logits: torch.Tensor) -> tuple[int, float] | None:
    """(position, gap between the two best logits) where `ours` leaves the argmax of `logits`."""
    wrong = (logits.argmax(-1) != torch.tensor(ours)).nonzero().flatten()
    if not len(wrong):
        return None
    position = int(wrong[0])
    best, second = logits[position].topk(2).values.tolist()
    return position, best - second


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench question.jsonl")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--generate", action="store_true")
    args = parser.parse_args()

    questions = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    step = len(questions) // args.num_prompts
    turns = [question["turns"][0] for question in questions[::step][: args.num_prompts]]
    conversations = [[{"role": "user", "content": turn}] for turn in turns]
    params = SamplingParams(temperature=0.0, max_tokens=args.num_tokens, ignore_eos=True)
    with LLM(args.model, max_model_len=4096) as llm:
        started = time.perf_counter()
        outputs = llm.chat(conversations, params, use_tqdm=False)
        seconds = time.perf_counter() - started
    print(f"nano: {len(outputs)} prompts x {args.num_tokens} tokens in {seconds:.1f} s")

    reference = load_reference(args.model)
    num_equal = num_ties = num_wrong = 0
    with torch.inference_mode():
        for i, output in enumerate(outputs):
            prompt, ours = output.prompt_token_ids, output.outputs[0].token_ids
            ids = torch.tensor([prompt + ours[:-1]])
            logits = reference(ids).logits[0, len(prompt) - 1 :]
            found = first_divergence(ours, logits)
            if args.generate:
                theirs = reference.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    max_new_tokens=args.num_tokens,
                    eos_token_id=None,
                    do_sample=False,
                    repetition_penalty=1.0,
                )[0, len(prompt) :].tolist()
                same = next((j for j, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)
                print(f"prompt {i}: generate() {'equal' if same is None else f'differs at {same}'}")
            if found is None:
                num_equal += 1
                continue
            position, gap = found
            is_tie = gap < TIE
            num_ties += is_tie
            num_wrong += not is_tie
            print(
                f"prompt {i}: diverges at token {position}, gap {gap:.2e}"
                f"{' (a tie)' if is_tie else ''}"
            )
    print(f"{num_equal} equal in full, {num_ties} up to a tie, {num_wrong} wrong")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
