// Tensors as our ops see them: torch's stable C++ interface, and what it lacks.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>

using torch::stable::Tensor;

// An uninitialised contiguous float32 tensor on the CPU. (torch::stable::empty looks its op up by name,
// which takes as long as a small kernel.)
static inline Tensor empty_floats(std::initializer_list<int64_t> sizes) {
  int64_t strides[8];
  STD_TORCH_CHECK(sizes.size() <= 8);
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= sizes.begin()[i]) strides[i] = stride;
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      (int64_t)sizes.size(), sizes.begin(), strides, aoti_torch_dtype_float32(),
      aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}
