"""`python -m nano.gpu_check [--quick]`: is everything right on this GPU, and how fast is it?

Models are made on the spot, in the shapes of real ones, with random weights. Checks every attention
backend that runs here against the reference on the CPU, sampling against torch, the tokens of every
mode against eager mode, that no step waits for the device or compiles anything; then measures
memory and multipliers, steps, graphs, start-up and speculation. Prints what it finds as it goes and
a table at the end; writes JSON. The exit status is 1 if a check failed, 130 after Ctrl-C.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from nano.errors import NanoError
from nano.log import setup_logging

_EPILOG = """
FlashInfer compiles its kernels with nvcc when they are first used, which takes minutes and is not
counted. Where there is no nvcc, bring them: on a machine that has it, set
FLASHINFER_CUDA_ARCH_LIST (9.0a for an H200) and FLASHINFER_WORKSPACE_BASE (a folder), run this
check there or FlashInfer's own ahead-of-time build, copy the folder, and set
FLASHINFER_WORKSPACE_BASE to it here.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m nano.gpu_check", description=__doc__, epilog=_EPILOG
    )
    parser.add_argument("--quick", action="store_true", help="under 3 minutes, not 8; no 8B")
    parser.add_argument("--device", default="cuda", help="cuda:1, a UUID; cpu: tiny, to try it out")
    parser.add_argument("--model", type=Path, help="a real model, in place of the made-up ones")
    parser.add_argument("--backends", nargs="+", metavar="NAME", help="that are checked, in order")
    parser.add_argument(
        "--leave-out", nargs="+", default=[], metavar="NAME", help="sections and modes"
    )
    parser.add_argument("--seconds", type=float, help="of all of it (quick: 160, else 440)")
    parser.add_argument(
        "--work-folder", type=Path, help="for made-up weights: 25 GB, 5 if quick; /dev/shm is fast"
    )
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"))
    args = parser.parse_args(argv)
    setup_logging(level="WARNING")  # dozens of engines have much to say
    from nano.gpu_check.program import make_box, run_sections  # torch: seconds

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nano-gpu-check-", dir=args.work_folder) as folder:
        try:
            box = make_box(
                args.device,
                Path(folder),
                is_quick=args.quick,
                model=args.model,
                backends=args.backends,
                left_out=args.leave_out,
                seconds=args.seconds,
            )
        except NanoError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        run_sections(box)
        seconds = time.monotonic() - began
        box.report.write(args.output, seconds)
        print(box.report.table())
        print(f"{seconds:.0f} s; {args.output}")
        return box.report.exit_status


if __name__ == "__main__":
    sys.exit(main())
