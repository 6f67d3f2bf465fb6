"""What every test runs under. Before torch is imported."""

import os

# A spinning OpenMP thread makes a shared machine fifty times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# "auto" would start a compiler for every tiny model, so tests of compiled pieces ask for them. With
# "compiled" in the environment all other tests run so, too.
os.environ.setdefault("NANO_COMPILE_MODE", "eager")
# "auto" would take a GPU where there is one, and tests say what is true of a CPU.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
