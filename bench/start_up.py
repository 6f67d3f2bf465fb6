"""From nothing to the first token, with empty caches and with full ones.

    python -m bench.start_up --model PATH

Three starts in processes of their own: cold, which compiles our kernels, serves eagerly and
compiles pieces on the side until they are in use; warm, which finds all that; and warm with mode
eager. Every line of the log is printed with its time since the process began: that is the
breakdown.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

CHILD = """
import time
began = time.perf_counter() - {age}
import logging, sys

class Clock(logging.Handler):
    def emit(self, record):
        say(record.getMessage())

def say(what):
    print(f"  {{time.perf_counter() - began:6.2f}} s  {{what}}", flush=True)

logging.getLogger("nano").addHandler(Clock())
logging.getLogger("nano").setLevel("INFO")
from nano import LLM, SamplingParams
say("imported nano")
llm = LLM({model!r}, compile_mode={mode!r}, max_model_len=2048)
say("loaded")
params = SamplingParams(temperature=0.0, max_tokens=1)
llm.generate("Once upon a time", params, use_tqdm=False)
say("FIRST TOKEN")
core = llm._client._core
while {waits} and core._executor._worker.target.forward.poll() is not None:
    time.sleep(0.05)
print([name for name in sys.modules if name in ("torch._dynamo", "torch._inductor")] or "", end="")
llm.close()
"""


def start(model: str, mode: str, cache: str, *, waits: bool) -> None:
    program = CHILD.format(age=0.02, model=model, mode=mode, waits=waits)
    environment = os.environ | {"XDG_CACHE_HOME": cache}
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    print(f"  {time.perf_counter() - began:6.2f} s  the process has ended\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"load average {load:.2f}" + (": NOT AN IDLE MACHINE" if load > 0.5 else ""))
    with tempfile.TemporaryDirectory() as cache:
        print("cold")
        start(args.model, "auto", cache, waits=True)
        print("warm")
        start(args.model, "auto", cache, waits=False)
        print("warm, eager")
        start(args.model, "eager", cache, waits=False)


if __name__ == "__main__":
    main()
