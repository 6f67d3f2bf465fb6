"""The rules of docs/architecture.md that a machine can check."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NANO = ROOT / "nano"

# Anybody may import these; among themselves only downwards (checked by `test_no_cycles`).
LEAVES = {
    "errors",
    "log",
    "sampling_params",
    "speculation",
    "outputs",
    "step",
    "kv_spec",
    "spec.options",
    "config",
    "checkpoint",
    "gpus",
    "resolve",
}
# Modules that are a room of their own, apart from their package.
SINGLE_ROOMS = {"spec.options"}

# package or top-level module -> what it may import besides itself and leaves
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "log": set(),
    "sampling_params": set(),
    "speculation": set(),
    "outputs": set(),
    "step": set(),
    "kv_spec": set(),
    "spec.options": set(),
    "config": set(),
    "checkpoint": set(),
    "gpus": set(),
    "resolve": set(),
    "device": {"native"},
    "kv_cache": set(),
    "scheduler": {"kv_cache"},
    "native": set(),
    "attention": {"device", "native"},
    "layers": {"attention", "native"},
    "quant": {"layers", "native"},
    "models": {"attention", "layers", "quant"},
    "compile": {"attention", "device", "native"},
    # A program of its own, and the child that it is for an engine.
    "compile.__main__": {"worker"},
    "compile.child": {"layers", "native"},
    "model_input": {"attention", "device"},
    "sampling": {"model_input", "device", "native"},
    "spec": {"attention", "compile", "device", "model_input", "models", "sampling"},
    "worker": {
        "attention",
        "model_input",
        "compile",
        "device",
        "layers",
        "models",
        "native",
        "sampling",
        "spec",
    },
    "engine": {"kv_cache", "scheduler", "worker"},
    "prompts": set(),
    "llm": {"engine", "prompts"},
    "generate": {"llm"},
    "verify": {"llm"},
    "launches": {"attention", "compile", "device", "sampling", "worker"},
    # Looks at every part from outside, as tests do.
    "gpu_check": {
        "attention",
        "device",
        "engine",
        "llm",
        "model_input",
        "models",
        "sampling",
        "worker",
    },
    "serve": {"engine"},
    "batch": {"serve"},
}
# A leaf may read these leaves only: the records stay free of files and options.
LEAF_MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "log": set(),
    "sampling_params": {"errors"},
    "speculation": {"errors"},
    "outputs": {"speculation", "step"},
    "step": {"sampling_params"},
    "kv_spec": set(),
    "checkpoint": {"errors", "log"},
    "spec.options": {"errors"},
    "config": {"errors", "spec.options"},
    "gpus": set(),
    "resolve": {"checkpoint", "config", "errors", "gpus", "log"},
}
# Narrower than the package: who may reach which module.
ONLY_FROM: dict[str, set[str]] = {
    # The core builds the executor, and nothing else.
    "nano.worker": {"engine.core", "worker", "compile.__main__", "launches", "gpu_check"},
    "nano.attention.cpu_backend": {"attention.select"},
    "nano.attention.torch_backend": {"attention.select"},
    "nano.attention.reference_backend": {"attention.select"},
    "nano.attention.select": {"worker.loaded_model", "gpu_check"},
    "nano.device.cuda": {"device"},
    "nano.device.cuda_graph": {"device"},
}
TORCH_FREE = LEAVES | {"prompts", "kv_cache", "scheduler", "engine", "serve", "batch"}
TORCH_CUDA_FILES = {
    "device/cuda.py",
    "device/cuda_graph.py",
    "attention/flashinfer_backend.py",
    "attention/triton_backend.py",
    "gpu_check/clock.py",
    "parallel/group.py",
}
PROPOSER_NAMES = r"\b(ngram|draft_model|self_quant|eagle|suffix_decoding)\b"
# Host syncs: reading device values inside a step. The sampler's own results are the one place.
SYNC_FREE = [
    "models",
    "layers",
    "attention/op.py",
    "attention/cpu_backend.py",
    "attention/torch_backend.py",
    "compile",
]

FILES = sorted(NANO.rglob("*.py"))


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(NANO).with_suffix("").parts)
    return name.removesuffix(".__init__")


def imports(path: Path) -> list[tuple[str, bool]]:
    """(imported module, whether at the top of the file), for every import statement."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append((node.module or "", id(node) in top))
    return found


def room(module: str) -> str:
    return module if module in SINGLE_ROOMS else module.split(".")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path):
    me = module_name(path)
    if me == "__init__":
        return
    mine = room(me)
    assert mine in MAY_IMPORT, f"{path} is in no room of the table"
    for name, _ in imports(path):
        if not name.startswith("nano."):
            continue
        other = room(name.removeprefix("nano."))
        if other == mine:
            continue
        rooms = MAY_IMPORT.get(me, MAY_IMPORT[mine])
        allowed = LEAF_MAY_IMPORT[mine] if mine in LEAVES else rooms | LEAVES
        assert other in allowed, f"{me} imports {name}"
        for target, importers in ONLY_FROM.items():
            if name == target or name.startswith(target + "."):
                assert me in importers or mine in importers, f"{me} imports {name}"


def test_no_import_cycles_between_modules():
    graph = {
        module_name(path): {
            name.removeprefix("nano.")
            for name, top in imports(path)
            if name.startswith("nano.") and top
        }
        for path in FILES
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail, module])
        if module not in done:
            for other in graph.get(module, ()):
                visit(other, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_control_plane_and_front_ends_never_name_torch(path: Path):
    if room(module_name(path)) not in TORCH_FREE:
        return
    for name, top in imports(path):
        assert room(name) != "torch", f"{path} imports torch"
        # The tokenizer's fallback imports transformers, and with it torch, when it must.
        assert room(name) != "transformers" or not top, f"{path} imports transformers at the top"


def test_importing_the_control_plane_and_the_server_leaves_torch_out():
    program = (
        "import sys, nano, nano.scheduler.scheduler, nano.kv_cache.kv_cache_manager, "
        "nano.engine.core, nano.engine.process, nano.engine.subprocess_client, "
        "nano.serve.app, nano.batch.batch; "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_torch_cuda_is_named_only_where_devices_differ():
    for path in FILES:
        if str(path.relative_to(NANO)) not in TORCH_CUDA_FILES:
            assert "torch.cuda" not in path.read_text(), path


def test_no_proposer_is_named_outside_the_place_that_makes_them():
    for path in FILES:
        if path.parent != NANO / "spec":
            assert not re.search(PROPOSER_NAMES, path.read_text()), path


def test_nothing_inside_the_forward_pass_waits_for_the_device():
    for place in SYNC_FREE:
        target = NANO / place
        for path in [target] if target.suffix else target.glob("*.py"):
            if path.name in ("weights.py", "weight_files.py"):
                continue  # loading is not a step
            forward = [
                node
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.FunctionDef) and node.name in ("forward", "compute_logits")
            ]
            for function in forward:
                calls = {
                    node.func.attr
                    for node in ast.walk(function)
                    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                }
                assert not calls & {"item", "tolist", "cpu", "numpy"}, f"{path}: {calls}"


def test_files_that_grew_past_450_lines_are_known():
    long = {str(p.relative_to(NANO)) for p in FILES if len(p.read_text().splitlines()) > 450}
    assert long == set()
