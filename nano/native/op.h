// Ops: functions of Tensor, std::optional<Tensor>, int64_t and double become ops of torch.
//
//     static const Ops ops{{"add_one(Tensor x, int times) -> Tensor", op<&add_one>}};
//
// A function returns nothing, a double, a Tensor or a std::array of them. The op is nano::add_one, of the CPU,
// from when the library is loaded to the end of the process.
#pragma once

#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "native/tensor.h"

extern "C" {
struct TorchLibraryOpaque;

int32_t aoti_torch_library_init_fragment(const char* name, const char* file, uint32_t line,
                                         TorchLibraryOpaque** library);
int32_t aoti_torch_library_init_impl(const char* name, const char* device, const char* file, uint32_t line,
                                     TorchLibraryOpaque** library);
int32_t aoti_torch_library_def(TorchLibraryOpaque* library, const char* schema);
int32_t torch_library_impl(TorchLibraryOpaque* library, const char* name,
                           void (*function)(uint64_t* stack, uint64_t num_inputs, uint64_t num_outputs),
                           uint64_t version);
}

// An argument from its word on torch's stack, which owned what it points to.
template <class T>
struct Argument {
  static T take(uint64_t word) {
    static_assert(sizeof(T) == sizeof word);
    T value;
    std::memcpy(&value, &word, sizeof word);
    return value;
  }
};

template <>
struct Argument<Tensor> {
  static Tensor take(uint64_t word) { return Tensor(reinterpret_cast<AtenTensorOpaque*>(word)); }
};

template <>
struct Argument<std::optional<Tensor>> {
  static std::optional<Tensor> take(uint64_t word) {
    uint64_t* const inner = reinterpret_cast<uint64_t*>(word);
    if (!inner) return std::nullopt;
    std::optional<Tensor> tensor(Argument<Tensor>::take(*inner));
    delete inner;
    return tensor;
  }
};

static inline void give(uint64_t* stack, double result) { std::memcpy(stack, &result, sizeof result); }

static inline void give(uint64_t* stack, Tensor result) {
  stack[0] = reinterpret_cast<uint64_t>(result.release());
}

template <size_t N>
static void give(uint64_t* stack, std::array<Tensor, N> results) {
  for (size_t i = 0; i < N; i++) give(stack + i, std::move(results[i]));
}

template <auto Function, class Out, class... In, size_t... I>
static void call(Out (*)(In...), uint64_t* stack, std::index_sequence<I...>) {
  if constexpr (std::is_void_v<Out>)
    Function(Argument<std::decay_t<In>>::take(stack[I])...);
  else
    give(stack, Function(Argument<std::decay_t<In>>::take(stack[I])...));
}

template <class Out, class... In>
constexpr auto indices(Out (*)(In...)) {
  return std::index_sequence_for<In...>();
}

// `Function` as torch calls it: arguments come, and results go, on a stack of words.
template <auto Function>
static void op(uint64_t* stack, uint64_t num_inputs, uint64_t) {
  check(num_inputs == indices(Function).size(), "the schema of an op has %zu arguments, its function %zu",
        (size_t)num_inputs, indices(Function).size());
  call<Function>(Function, stack, indices(Function));
}

class Ops {
 public:
  struct Op {
    const char* schema;
    void (*function)(uint64_t* stack, uint64_t num_inputs, uint64_t num_outputs);
  };

  Ops(std::initializer_list<Op> ops) {
    TorchLibraryOpaque *schemas, *functions;  // kept for good: deleted, they would take the ops along
    check_call(aoti_torch_library_init_fragment("nano", __FILE__, __LINE__, &schemas));
    check_call(aoti_torch_library_init_impl("nano", "CPU", __FILE__, __LINE__, &functions));
    for (const Op& op : ops) {
      char name[64];
      std::snprintf(name, sizeof name, "%.*s", (int)std::strcspn(op.schema, "("), op.schema);
      check_call(aoti_torch_library_def(schemas, op.schema));
      check_call(torch_library_impl(functions, name, op.function, TORCH_INTERFACE));
    }
  }
};
