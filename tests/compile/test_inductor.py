"""What is taken from Inductor's text, and what is refused."""

import pytest

from nano.compile.inductor import Kernel, UnexpectedCode, extract
from nano.compile.kernels import module_source, unique_names

CODE = """
import torch
from torch._inductor.async_compile import AsyncCompile
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
async_compile = AsyncCompile()

cpp_fused_add_0 = async_compile.cpp_pybinding(['const float*', 'float*', 'const int64_t'], r'''
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0, const int64_t ks0) { }
''')

async_compile.wait(globals())
del async_compile

def call(args):
    arg0_1, arg1_1 = args
    args.clear()
    u0 = arg1_1
    buf0 = empty_strided_cpu((u0, 4), (4, 1), torch.float32)
    cpp_fused_add_0(arg0_1, buf0, u0)
    del arg0_1
    # Original ATen: [nano.rms_norm]
    buf1 = torch.ops.nano.rms_norm.default(buf0, buf0, 1e-06)
    return (buf1, )


def get_args():
    return []
"""


def test_a_piece_becomes_a_function_of_its_inputs():
    code = extract(CODE, "piece_3", num_inputs=2)
    assert code.source == (
        "def piece_3(arg0_1, arg1_1):\n"
        "    u0 = arg1_1\n"
        "    buf0 = empty_strided_cpu((u0, 4), (4, 1), torch.float32)\n"
        "    cpp_fused_add_0(arg0_1, buf0, u0)\n"
        "    del arg0_1\n"
        "    # Original ATen: [nano.rms_norm]\n"
        "    buf1 = op_nano_rms_norm_default(buf0, buf0, 1e-06)\n"
        "    return (buf1, )\n"
    )
    assert code.ops == {"op_nano_rms_norm_default": "nano::rms_norm.default"}
    (kernel,) = code.kernels
    assert kernel.name == "cpp_fused_add_0"
    assert kernel.argument_types == ("const float*", "float*", "const int64_t")


@pytest.mark.parametrize(
    ("find", "replace", "complaint"),
    [
        ("def call(args):", "def run(args):", "0 functions named call"),
        ("args.clear()", "pass", "does not begin by unpacking"),
        ("arg0_1, arg1_1 = args", "arg0_1 = args[0]", "does not begin by unpacking"),
        ("return (buf1, )", "print((buf1, ))", "does not end in a return"),
        ("arg0_1, arg1_1 = args", "arg0_1, arg1_1, arg2_1 = args", "3 parameters for 2 inputs"),
        ("u0 = arg1_1", "u0 = constant0", "calls constant0"),
        ("async_compile.cpp_pybinding", "async_compile.triton", "is made by triton"),
    ],
)
def test_another_shape_is_refused_in_words(find, replace, complaint):
    assert CODE.count(find) == 1
    with pytest.raises(UnexpectedCode, match=complaint):
        extract(CODE.replace(find, replace), "piece_0", num_inputs=2)


def test_kernels_of_one_name_and_other_code_are_told_apart_and_equal_ones_shared():
    one = Kernel("cpp_fused_add_0", ("float*",), "void kernel(float* x) { x[0] = 1; }")
    two = Kernel("cpp_fused_add_0", ("float*",), "void kernel(float* x) { x[0] = 2; }")
    names = unique_names([one, two, one])
    assert names == {one: "fused_add_0", two: "fused_add_1"}
    source = module_source(names)
    assert "void fused_add_0(float* x) { x[0] = 1; }" in source
    assert "void fused_add_1(float* x) { x[0] = 2; }" in source
