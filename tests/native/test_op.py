"""Functions of C++ as ops of torch: what comes in and goes out, is let go of, and is refused."""

import pytest
import torch

from nano.native.build import compiler, load_ops

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")

SOURCE = """
#include "native/op.h"

namespace {

// 100 x + count + factor, onto `more` if it is there. x: [N] float32.
Tensor mix(const Tensor& x, const std::optional<Tensor>& more, int64_t count, double factor) {
  const Tensor dense = contiguous(x);
  Tensor out = empty<float>({x.size(0)});
  for (int64_t i = 0; i < x.numel(); i++) {
    const float base = more ? more->const_data_ptr<float>()[i] : 0;
    out.mutable_data_ptr<float>()[i] =
        base + 100 * dense.const_data_ptr<float>()[i] + (float)count + (float)factor;
  }
  return out;
}

// `x` itself, what torch says of it, and its first dimension as an empty tensor.
std::array<Tensor, 3> describe(const Tensor& x) {
  Tensor facts = empty<int64_t>({4});
  int64_t* fact = facts.mutable_data_ptr<int64_t>();
  fact[0] = x.dim(), fact[1] = x.numel(), fact[2] = x.stride(0);
  fact[3] = (int64_t)x.element_size();
  return {x, facts, empty<int32_t>({x.size(0), 0, 2})};
}

void fill(const Tensor& x, double value) {
  check(value >= 0, "fill with %g, %s", value, "a negative value");
  for (int64_t i = 0; i < x.numel(); i++) x.mutable_data_ptr<double>()[i] = value;
}

}  // namespace

static const Ops ops{
    {"test_mix(Tensor x, Tensor? more, int count, float factor) -> Tensor", op<&mix>},
    {"test_describe(Tensor x) -> (Tensor, Tensor, Tensor)", op<&describe>},
    {"test_fill(Tensor(a!) x, float value) -> ()", op<&fill>},
    {"test_arity(Tensor x) -> ()", op<&fill>},
};
"""


@pytest.fixture(scope="module")
def ops(tmp_path_factory):
    source = tmp_path_factory.mktemp("op") / "ops_of_a_test.cpp"
    source.write_text(SOURCE)
    assert load_ops(source)
    return torch.ops.nano


def test_arguments_of_every_kind(ops):
    x, more = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.25, 0.5, 0.75])
    large = 2**24 - 512
    assert ops.test_mix(x, None, large, 0.5).tolist() == (100 * x + large + 0.5).tolist()
    assert ops.test_mix(x, more, -7, -0.5).tolist() == (more + 100 * x - 7 - 0.5).tolist()
    every_other = torch.arange(6.0)[::2]
    assert ops.test_mix(every_other, None, 0, 0.0).tolist() == [0.0, 200.0, 400.0]


def test_results_of_every_kind(ops):
    x = torch.zeros(3, 8, dtype=torch.float16)[:, ::2]
    itself, facts, nothing = ops.test_describe(x)
    assert itself.data_ptr() == x.data_ptr()
    assert facts.tolist() == [2, 12, 8, 2]
    assert (nothing.shape, nothing.dtype) == ((3, 0, 2), torch.int32)
    x = torch.zeros(3, dtype=torch.float64)
    assert ops.test_fill(x, 1.5) is None
    assert x.tolist() == [1.5] * 3


def test_nothing_is_held_after_a_call(ops):
    x, more = torch.ones(4), torch.ones(4)
    results = [ops.test_mix(x, more, 1, 1.0), *ops.test_describe(x)]
    with pytest.raises(RuntimeError):
        ops.test_mix(x, more.double(), 1, 1.0)
    assert results[1] is x
    assert {one._use_count() for one in (x, more, *results)} == {1}  # that of Python


def test_what_does_not_fit_is_an_error_of_python(ops):
    x = torch.ones(2)
    with pytest.raises(
        RuntimeError, match="float32 elements expected, not those of torch's dtype 7"
    ):
        ops.test_mix(x.double(), None, 1, 1.0)
    with pytest.raises(RuntimeError, match=r"fill with -1\.5, a negative value"):
        ops.test_fill(x.double(), -1.5)
    with pytest.raises(RuntimeError, match="has 1 arguments, its function 2"):
        ops.test_arity(x)
    assert ops.test_mix(x, None, 1, 1.0).tolist() == [102.0, 102.0]  # and it goes on
