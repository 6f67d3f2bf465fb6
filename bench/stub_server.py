"""`python -m nano.serve` over the core of `bench.stub_core`; same flags."""

import sys
from functools import partial

from nano.engine.subprocess_client import SubprocessClient
from nano.serve import __main__ as program
from nano.serve.processes import cores

STUB_COMMAND = (sys.executable, "-m", "bench.stub_core")

if __name__ == "__main__":
    cores.SubprocessClient = partial(SubprocessClient, command=STUB_COMMAND)  # type: ignore
    sys.exit(program.main())
