// The argument objects of aclnn calls, and the one place where a kernel enters a stream.
#include <ATen/core/LegacyTypeDispatch.h>

#include "opapi.h"

namespace software_acl {

// Numbers of the public aclDataType enumeration.
at::ScalarType dtype_of(int acl_type) {
  switch (acl_type) {
    case 0: return at::kFloat;
    case 1: return at::kHalf;
    case 2: return at::kChar;
    case 3: return at::kInt;
    case 4: return at::kByte;
    case 6: return at::kShort;
    case 7: return at::kUInt16;
    case 8: return at::kUInt32;
    case 9: return at::kLong;
    case 10: return at::kUInt64;
    case 11: return at::kDouble;
    case 12: return at::kBool;
    case 16: return at::kComplexFloat;
    case 17: return at::kComplexDouble;
    case 27: return at::kBFloat16;
    default: throw Refused(kInvalidParameter, "data type " + std::to_string(acl_type) + " is not supported");
  }
}

int launch(Executor* executor, uint64_t workspace, void* stream) {
  Task task = std::move(executor->task);
  const uint64_t needed = executor->workspace;
  delete executor;
  if (workspace < needed) return fail(kInvalidParameter, task.name + ": the workspace is too small");
  return submit(resolve(stream), std::move(task));
}

void run_kernel(const std::function<void()>& kernel) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  kernel();
}

namespace {

Scalar scalar_from(const void* bytes, int acl_type) {
  Tensor view = at::from_blob(const_cast<void*>(bytes), {}, at::TensorOptions().dtype(dtype_of(acl_type)));
  return view.item();
}

}  // namespace
}  // namespace software_acl

using namespace software_acl;

EXPORT AclTensor* aclCreateTensor(const int64_t* sizes, uint64_t dims, int acl_type, const int64_t* strides,
                                  int64_t offset, int, const int64_t*, uint64_t, void* storage) {
  try {
    const auto type = dtype_of(acl_type);
    auto* first = static_cast<char*>(host_view(storage)) + offset * static_cast<int64_t>(c10::elementSize(type));
    return new AclTensor{at::from_blob(first, at::IntArrayRef(sizes, dims), at::IntArrayRef(strides, dims),
                                       at::TensorOptions().dtype(type))};
  } catch (const std::exception& error) {
    fail(kInvalidParameter, error.what());
    return nullptr;
  }
}
EXPORT int aclDestroyTensor(const AclTensor* tensor) {
  delete tensor;
  return kOk;
}
EXPORT AclScalar* aclCreateScalar(void* bytes, int acl_type) { return new AclScalar{scalar_from(bytes, acl_type)}; }
EXPORT int aclDestroyScalar(const AclScalar* scalar) {
  delete scalar;
  return kOk;
}
EXPORT AclInts* aclCreateIntArray(const int64_t* values, uint64_t count) {
  return new AclInts{{values, values + count}};
}
EXPORT int aclDestroyIntArray(const AclInts* array) {
  delete array;
  return kOk;
}
EXPORT AclFloats* aclCreateFloatArray(const float* values, uint64_t count) {
  return new AclFloats{{values, values + count}};
}
EXPORT int aclDestroyFloatArray(const AclFloats* array) {
  delete array;
  return kOk;
}
EXPORT AclBools* aclCreateBoolArray(const bool* values, uint64_t count) {
  return new AclBools{std::vector<bool>(values, values + count)};
}
EXPORT int aclDestroyBoolArray(const AclBools* array) {
  delete array;
  return kOk;
}
EXPORT AclTensors* aclCreateTensorList(AclTensor* const* tensors, uint64_t count) {
  return new AclTensors{{tensors, tensors + count}};
}
EXPORT int aclDestroyTensorList(const AclTensors* list) {
  for (AclTensor* each : list->value) delete each;
  delete list;
  return kOk;
}
EXPORT AclScalars* aclCreateScalarList(AclScalar* const* scalars, uint64_t count) {
  return new AclScalars{{scalars, scalars + count}};
}
EXPORT int aclDestroyScalarList(const AclScalars* list) {
  for (AclScalar* each : list->value) delete each;
  delete list;
  return kOk;
}
EXPORT int aclGetViewShape(const AclTensor* tensor, int64_t** sizes, uint64_t* dims) {
  *dims = tensor->value.dim();
  *sizes = new int64_t[*dims];
  std::copy(tensor->value.sizes().begin(), tensor->value.sizes().end(), *sizes);
  return kOk;
}
EXPORT int aclDestroyAclOpExecutor(Executor* executor) {
  delete executor;
  return kOk;
}
