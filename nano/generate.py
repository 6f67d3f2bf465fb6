"""`python -m nano.generate --model demo "prompt"`: a quick look at a model, streamed."""

import argparse
import sys

from nano.config import ENGINE_ARGS, add_engine_arguments
from nano.errors import NanoError, RequestFailed
from nano.llm import LLM
from nano.log import setup_logging
from nano.sampling_params import SamplingParams


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m nano.generate", description=__doc__)
    parser.add_argument("prompt", help="what to continue, or with --chat to answer")
    parser.add_argument("--chat", action="store_true", help="use the model's chat template")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    add_engine_arguments(parser)
    args = parser.parse_args()
    if args.config:
        parser.error("--config is for the server; give the engine's flags here")
    setup_logging()
    engine_args = {name: getattr(args, name) for name in ENGINE_ARGS if name != "model"}
    try:
        params = SamplingParams(
            max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p
        )
        with LLM(args.model or "demo", **engine_args) as llm:
            if args.chat:
                messages = [{"role": "user", "content": args.prompt}]
                stream = llm.chat(messages, params, stream=True)
            else:
                stream = llm.generate(args.prompt, params, stream=True)
            for output in stream:
                completion = output.outputs[0]
                print(completion.text, end="", flush=True)
                if completion.error is not None:
                    raise RequestFailed(completion.error)
            print()
    except NanoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
