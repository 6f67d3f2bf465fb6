"""`python -m nano.launches --model M [engine flags]`: what does one step launch, in which order?

Loads the model as an engine would, runs some made-up steps, and prints for one step of decode, one
that verifies drafts, and one mixed with a part of a prompt: copies to the device, attention plans,
the graph that was chosen and why, replays, attention between them, operators, sampling, and where
the host waits. Sizes that are not told are as small as these steps need.

On a CPU every step is eager; --simulate-graphs shows what a device with graphs would do.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from nano.config import EngineConfig, add_engine_arguments, config_from_arguments
from nano.errors import ConfigError, NanoError
from nano.log import setup_logging
from nano.spec.options import WITHOUT_A_SECOND_MODEL, SpeculativeOptions

_NUM_DRAFTS = 4  # where nobody says


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m nano.launches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=4, help="that decode side by side")
    parser.add_argument("--drafts", type=int, help="that each verifies; 0: none (default: its own)")
    parser.add_argument("--simulate-graphs", action="store_true", help="record graphs on the CPU")
    parser.add_argument("--json", action="store_true", help="print data instead of text")
    add_engine_arguments(parser)
    args = parser.parse_args(argv)
    setup_logging("launches")
    from nano.launches.rehearsal import Rehearsal  # torch: seconds

    try:
        if args.requests < 1:
            raise ConfigError(f"--requests must be at least 1, got {args.requests}")
        config, num_drafts = _settle(args)
        rehearsal = Rehearsal(config, args.requests, num_drafts, args.simulate_graphs)
        steps = rehearsal.run()
    except (NanoError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    facts = rehearsal.facts()
    if args.json:
        data = [{**dataclasses.asdict(step), "counts": step.counts} for step in steps]
        print(json.dumps({**facts, "steps": data}, indent=1))
    else:
        print("\n".join(f"{name + ':':<11} {value}" for name, value in facts.items()))
        for step in steps:
            print(f"\n{step.text()}")
    return 0


def _settle(args: argparse.Namespace) -> tuple[EngineConfig, int]:
    """The engine, with small sizes where none are told, and how many drafts there are to be."""
    from nano.launches.made_up_requests import MadeUpRequests  # torch

    config = config_from_arguments(args)
    speculative = config.speculative
    configured = [proposer.num_speculative_tokens or 0 for proposer in speculative.proposers]
    num_drafts = args.drafts
    if num_drafts is None:
        num_drafts = max(configured, default=_NUM_DRAFTS)
    if not args.config:  # a recipe has its own
        sizes = MadeUpRequests.sizes(args.requests, num_drafts, config.kv_cache.block_size)
        for name, size in sizes.items():
            if getattr(args, name) is None:
                setattr(args, name, size)
        config = config_from_arguments(args)
    return dataclasses.replace(config, speculative=_drafting(speculative, num_drafts)), num_drafts


def _drafting(options: SpeculativeOptions, num_drafts: int) -> SpeculativeOptions:
    """Whatever proposers are asked for, or one that needs nothing; all of so many tokens."""
    if not num_drafts:
        return SpeculativeOptions()
    proposers = options.proposers or WITHOUT_A_SECOND_MODEL[:1]
    whole = dataclasses.replace(options, proposers=proposers).with_prediction()
    return dataclasses.replace(
        whole,
        proposers=tuple(
            dataclasses.replace(proposer, num_speculative_tokens=num_drafts)
            for proposer in whole.proposers
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
