// How an aclnn operator is written here: OP(aclnnName, [](Tensor a, Scalar b, Tensor out) { ... }). The macro derives
// the two C functions of the operator from the lambda's parameters: ...GetWorkspaceSize converts the arguments and
// keeps them with the kernel, the other one hands that to the stream. Conversion happens once, so a captured operator
// keeps its addresses and its host arrays exactly as they were, as on hardware.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <tuple>

#include "base.h"

namespace software_acl {

using at::Scalar;
using at::Tensor;
using Tensors = std::vector<Tensor>;
using Ints = std::optional<std::vector<int64_t>>;
using MaybeScalar = std::optional<Scalar>;

struct Dtype {
  at::ScalarType type;
};

// Destroyed by the caller right after the launch; kernels hold the converted value instead.
struct AclTensor {
  Tensor value;
};
struct AclScalar {
  Scalar value;
};
struct AclInts {
  std::vector<int64_t> value;
};
struct AclFloats {
  std::vector<float> value;
};
struct AclBools {
  std::vector<bool> value;
};
struct AclTensors {
  std::vector<AclTensor*> value;
};
struct AclScalars {
  std::vector<AclScalar*> value;
};

at::ScalarType dtype_of(int acl_type);

// What an operator that only moves elements has moved, written when it runs, eagerly or in a replay.
inline void note_copy(const char* op, const Tensor& to) {
  Line("copy").text("op", op).number("bytes", to.nbytes()).number("graph", running_graph());
}

// The C type that stands for T in an aclnn signature, and the conversion to T.
template <class T>
struct Abi {
  using type = T;
  static T take(T value) { return value; }
};
template <>
struct Abi<Tensor> {
  using type = const AclTensor*;
  static Tensor take(type p) { return p == nullptr ? Tensor() : p->value; }
};
template <>
struct Abi<Scalar> {
  using type = const AclScalar*;
  static Scalar take(type p) { return p->value; }
};
template <>
struct Abi<MaybeScalar> {
  using type = const AclScalar*;
  static MaybeScalar take(type p) { return p == nullptr ? MaybeScalar() : MaybeScalar(p->value); }
};
template <>
struct Abi<Ints> {
  using type = const AclInts*;
  static Ints take(type p) { return p == nullptr ? Ints() : Ints(p->value); }
};
template <>
struct Abi<Tensors> {
  using type = const AclTensors*;
  static Tensors take(type p) {
    Tensors out;
    if (p != nullptr) {
      for (const AclTensor* each : p->value) out.push_back(Abi<Tensor>::take(each));
    }
    return out;
  }
};
template <>
struct Abi<std::vector<Scalar>> {
  using type = const AclScalars*;
  static std::vector<Scalar> take(type p) {
    std::vector<Scalar> out;
    for (const AclScalar* each : p->value) out.push_back(each->value);
    return out;
  }
};
template <>
struct Abi<Dtype> {
  using type = int;
  static Dtype take(int acl_type) { return {dtype_of(acl_type)}; }
};
template <>
struct Abi<std::string> {
  using type = const char*;
  static std::string take(type p) { return p == nullptr ? "" : p; }
};

struct Executor {
  Task task;
  uint64_t workspace;
};

constexpr uint64_t kMostWorkspace = 64 << 10;

int launch(Executor* executor, uint64_t workspace, void* stream);
void run_kernel(const std::function<void()>& kernel);  // under the dispatch state that a worker thread needs

// Op has: name, kernel (a function pointer), check (the same parameters; throws Refused).
template <class Op, class Function>
struct Entry;

template <class Op, class... T>
struct Entry<Op, void (*)(T...)> {
  static int prepare(typename Abi<T>::type... arguments, uint64_t* workspace, Executor** executor) {
    try {
      auto values = std::make_tuple(Abi<T>::take(arguments)...);
      if constexpr (Op::check != nullptr) std::apply(Op::check, values);
      *workspace = Op::workspace;
      auto call = [values] { run_kernel([&] { std::apply(Op::kernel, values); }); };
      *executor = new Executor{{Op::name, std::move(call)}, Op::workspace};
      return kOk;
    } catch (const Refused& refused) {
      return fail(refused.code, std::string(Op::name) + ": " + refused.what());
    } catch (const std::exception& error) {
      return fail(kInvalidParameter, std::string(Op::name) + ": " + error.what());
    }
  }
  static int prepare_most(typename Abi<T>::type... arguments, uint64_t* workspace, Executor** executor) {
    const int code = prepare(arguments..., workspace, executor);
    if (code == kOk) *workspace = kMostWorkspace;
    return code;
  }
  static int run(void*, uint64_t workspace, Executor* executor, void* stream) {
    return launch(executor, workspace, stream);
  }
};

// The exported names are indirect functions: the loader asks for the address once and gets the typed entry above.
#define EXPORT_AS(symbol, address)                                                              \
  extern "C" __attribute__((used)) void (*find_##symbol())() {                                  \
    return reinterpret_cast<void (*)()>(address);                                               \
  }                                                                                             \
  extern "C" __attribute__((visibility("default"))) void symbol() __attribute__((ifunc("find_" #symbol)));

#define OP_SIZED(NAME, WORKSPACE, CHECK, ...)                                                                \
  namespace {                                                                                                \
  struct NAME##Op {                                                                                          \
    static constexpr const char* name = #NAME;                                                               \
    static constexpr uint64_t workspace = WORKSPACE;                                                         \
    static constexpr auto kernel = +__VA_ARGS__;                                                             \
    static constexpr decltype(kernel) check = CHECK;                                                         \
    using entry = ::software_acl::Entry<NAME##Op, std::remove_const_t<decltype(kernel)>>;                    \
  };                                                                                                         \
  }                                                                                                          \
  EXPORT_AS(NAME##GetWorkspaceSize, &NAME##Op::entry::prepare)                                               \
  EXPORT_AS(NAME, &NAME##Op::entry::run)

#define OP_CHECKED(NAME, CHECK, ...) OP_SIZED(NAME, 0, CHECK, __VA_ARGS__)
#define OP(NAME, ...) OP_CHECKED(NAME, nullptr, __VA_ARGS__)

}  // namespace software_acl
