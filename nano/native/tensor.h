// Tensors and errors as our ops see them: a thin layer over torch's C interface.
//
// torch's own C++ headers for that interface take most of a second to compile, in each of our files and
// before the first token of a first start; the functions below are all that they would call for us. They are
// declared here as torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h declare them, which
// promise to keep them.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <initializer_list>

extern "C" {
struct AtenTensorOpaque;  // a reference to a tensor, with an owner

int32_t aoti_torch_new_tensor_handle(AtenTensorOpaque* from, AtenTensorOpaque** to);
int32_t aoti_torch_delete_tensor_object(AtenTensorOpaque* tensor);
int32_t aoti_torch_empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                 int32_t device_type, int32_t device_index, AtenTensorOpaque** tensor);
int32_t aoti_torch_get_dim(AtenTensorOpaque* tensor, int64_t* dims);
int32_t aoti_torch_get_numel(AtenTensorOpaque* tensor, int64_t* count);
int32_t aoti_torch_get_size(AtenTensorOpaque* tensor, int64_t dim, int64_t* size);
int32_t aoti_torch_get_stride(AtenTensorOpaque* tensor, int64_t dim, int64_t* stride);
int32_t aoti_torch_get_dtype(AtenTensorOpaque* tensor, int32_t* dtype);
int32_t aoti_torch_is_contiguous(AtenTensorOpaque* tensor, bool* is_contiguous);
int32_t torch_get_const_data_ptr(AtenTensorOpaque* tensor, const void** data);
int32_t torch_get_mutable_data_ptr(AtenTensorOpaque* tensor, void** data);
int32_t torch_call_dispatcher(const char* op, const char* overload, uint64_t* stack, uint64_t version);
const char* torch_exception_get_what();

size_t aoti_torch_dtype_element_size(int32_t dtype);
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float64();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_memory_format_contiguous_format();
}

// Of the interface that this file was written for, torch 2.10: later ones keep to it when told so.
constexpr uint64_t TORCH_INTERFACE = uint64_t(2) << 56 | uint64_t(10) << 48;

// Reaches Python as a RuntimeError.
class Error : public std::exception {
 public:
  Error(const char* format, va_list values) { std::vsnprintf(what_, sizeof what_, format, values); }
  const char* what() const noexcept override { return what_; }

 private:
  char what_[512];
};

// Throw an Error with a message in the manner of printf, unless `is_so`.
__attribute__((format(printf, 2, 3))) static inline void check(bool is_so, const char* format, ...) {
  if (__builtin_expect(is_so, true)) return;
  va_list values;
  va_start(values, format);
  const Error error(format, values);
  va_end(values);
  throw error;
}

// Of a call of torch's interface.
static inline void check_call(int32_t status) {
  if (status) check(false, "%s", torch_exception_get_what());
}

// torch's dtype for elements T: its name, and the number of it.
template <class T>
struct Dtype;
template <>
struct Dtype<float> {
  static constexpr const char* name = "float32";
  static int32_t number() { return aoti_torch_dtype_float32(); }
};
template <>
struct Dtype<double> {
  static constexpr const char* name = "float64";
  static int32_t number() { return aoti_torch_dtype_float64(); }
};
template <>
struct Dtype<int32_t> {
  static constexpr const char* name = "int32";
  static int32_t number() { return aoti_torch_dtype_int32(); }
};
template <>
struct Dtype<int64_t> {
  static constexpr const char* name = "int64";
  static int32_t number() { return aoti_torch_dtype_int64(); }
};

// A reference to a tensor of torch's; a copy is another reference. As there, a const one may be written to.
class Tensor {
 public:
  explicit Tensor(AtenTensorOpaque* handle) : handle_(handle) {}  // which it owns
  Tensor(const Tensor& other) { check_call(aoti_torch_new_tensor_handle(other.handle_, &handle_)); }
  Tensor(Tensor&& other) noexcept : handle_(other.release()) {}
  Tensor& operator=(Tensor) = delete;
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  // Its handle, which the caller owns from now on.
  AtenTensorOpaque* release() {
    AtenTensorOpaque* const handle = handle_;
    handle_ = nullptr;
    return handle;
  }

  int64_t dim() const { return number(aoti_torch_get_dim); }
  int64_t numel() const { return number(aoti_torch_get_numel); }
  int64_t size(int64_t dim) const { return number(aoti_torch_get_size, dim); }
  int64_t stride(int64_t dim) const { return number(aoti_torch_get_stride, dim); }

  bool is_contiguous() const {
    bool is_so;
    check_call(aoti_torch_is_contiguous(handle_, &is_so));
    return is_so;
  }

  size_t element_size() const { return aoti_torch_dtype_element_size(dtype()); }

  const void* const_data_ptr() const {
    const void* data;
    check_call(torch_get_const_data_ptr(handle_, &data));
    return data;
  }
  void* mutable_data_ptr() const {
    void* data;
    check_call(torch_get_mutable_data_ptr(handle_, &data));
    return data;
  }

  // Of elements that are T.
  template <class T>
  const T* const_data_ptr() const {
    check_elements<T>();
    return static_cast<const T*>(const_data_ptr());
  }
  template <class T>
  T* mutable_data_ptr() const {
    check_elements<T>();
    return static_cast<T*>(mutable_data_ptr());
  }

 private:
  template <class Get, class... In>
  int64_t number(Get get, In... dim) const {
    int64_t found;
    check_call(get(handle_, dim..., &found));
    return found;
  }

  int32_t dtype() const {
    int32_t found;
    check_call(aoti_torch_get_dtype(handle_, &found));
    return found;
  }

  template <class T>
  void check_elements() const {
    const int32_t found = dtype();
    check(found == Dtype<T>::number(), "%s elements expected, not those of torch's dtype %d",
          Dtype<T>::name, found);
  }

  AtenTensorOpaque* handle_;
};

// Of elements T on the CPU, contiguous, not initialised.
template <class T>
Tensor empty(std::initializer_list<int64_t> sizes) {
  int64_t strides[8];
  check(sizes.size() <= 8, "%zu dimensions", sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= sizes.begin()[i]) strides[i] = stride;
  AtenTensorOpaque* handle;
  check_call(aoti_torch_empty_strided((int64_t)sizes.size(), sizes.begin(), strides, Dtype<T>::number(),
                                      aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

// `x` itself, or a copy if its elements do not lie side by side.
static inline Tensor contiguous(const Tensor& x) {
  if (x.is_contiguous()) return x;
  uint64_t stack[] = {reinterpret_cast<uint64_t>(Tensor(x).release()),
                      (uint64_t)aoti_torch_memory_format_contiguous_format()};
  check_call(torch_call_dispatcher("aten::contiguous", "", stack, TORCH_INTERFACE));
  return Tensor(reinterpret_cast<AtenTensorOpaque*>(stack[0]));
}
