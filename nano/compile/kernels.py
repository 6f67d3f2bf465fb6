"""The kernels of all pieces as one extension module: C++ in, a shared library out (which
`artifact.py` loads).

Flags: no contraction and none of -ffast-math, so that elementwise arithmetic rounds as torch's
own ops do, and compiled pieces give the bits of the eager model.
"""

import re
import subprocess
import sysconfig
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

from nano.compile.artifact import MODULE
from nano.compile.inductor import Kernel
from nano.errors import NanoError
from nano.native.build import compiler, cpu_flags

_FLAGS = ("-O3", "-std=c++20", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-w")
_PREFIX = "#include <torch/csrc/inductor/cpp_prefix.h>"
_HEAD = f"""\
{_PREFIX}
#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace {{

void* (*tensor_data)(PyObject*);  // torch's own, which needs none of its headers

template <class T>
T argument(PyObject* object) {{
  if constexpr (std::is_pointer_v<T>) {{
    return static_cast<T>(tensor_data(object));
  }} else if constexpr (std::is_floating_point_v<T>) {{
    return static_cast<T>(PyFloat_AsDouble(object));
  }} else {{
    return static_cast<T>(PyLong_AsLongLong(object));
  }}
}}

template <class Body>
PyObject* guarded(Py_ssize_t given, Py_ssize_t wanted, Body body) {{
  if (given != wanted) {{
    PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
    return nullptr;
  }}
  try {{
    body();
  }} catch (const std::exception& error) {{
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }}
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}}

PyObject* bind_py(PyObject*, PyObject* const* args, Py_ssize_t given) {{
  return guarded(given, 1, [&] {{
    tensor_data = reinterpret_cast<void* (*)(PyObject*)>(PyLong_AsVoidPtr(args[0]));
  }});
}}

}}  // namespace
"""
_BINDING = """
static PyObject* {name}_py(PyObject*, PyObject* const* args, Py_ssize_t given) {{
  return guarded(given, {count}, [&] {{ {name}({arguments}); }});
}}
"""
_TAIL = """
static PyMethodDef methods[] = {{
    {{"bind", (PyCFunction)(void*)bind_py, METH_FASTCALL, ""}},
{entries}
    {{nullptr, nullptr, 0, nullptr}}}};
static PyModuleDef_Slot slots[] = {{{{0, nullptr}}}};  // two-phase: sys.modules is left alone
static PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "{module}", nullptr, 0, methods, slots}};
PyMODINIT_FUNC PyInit_{module}(void) {{ return PyModuleDef_Init(&definition); }}
"""


class CompileFailed(NanoError):
    """The C++ compiler is not there, or refused what it was given."""


def unique_names(kernels: Iterable[Kernel]) -> dict[Kernel, str]:
    """Name each distinct kernel for the module; equal ones of several pieces share a name."""
    names: dict[Kernel, str] = {}
    for kernel in kernels:
        stem = kernel.name.removeprefix("cpp_").rstrip("0123456789").rstrip("_")
        names.setdefault(kernel, f"{stem}_{len(names)}")
    return names


def module_source(names: Mapping[Kernel, str]) -> str:
    """C++ of an extension module with every kernel under its name."""
    parts, entries = [_HEAD], []
    for kernel, name in names.items():
        arguments = ", ".join(
            f"argument<{kind}>(args[{i}])" for i, kind in enumerate(kernel.argument_types)
        )
        count = len(kernel.argument_types)
        parts.append(re.sub(r"\bkernel\(", f"{name}(", kernel.source.replace(_PREFIX, ""), count=1))
        parts.append(_BINDING.format(name=name, count=count, arguments=arguments))
        entries.append(f'    {{"{name}", (PyCFunction)(void*){name}_py, METH_FASTCALL, ""}},')
    parts.append(_TAIL.format(entries="\n".join(entries), module=MODULE))
    return "".join(parts)


def compile_module(source: Path, library: Path) -> None:
    """Raises `CompileFailed` with what the compiler said."""
    found = compiler()
    if found is None:
        raise CompileFailed("no C++ compiler found")
    spec = find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    torch_folder = Path(spec.submodule_search_locations[0])
    headers = [torch_folder / "include", sysconfig.get_paths()["include"]]
    command = [found, *_FLAGS, *cpu_flags(), *(f"-I{header}" for header in headers)]
    command += [str(source), "-o", str(library), f"-L{torch_folder / 'lib'}", "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"{found} failed with {done.returncode}"]
        raise CompileFailed(next((line for line in said if "error" in line), said[-1]))
