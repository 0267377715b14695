// Elementwise operators: ATen's CPU kernels, written into the output that torch_npu allocated.
#include "opapi.h"

using namespace software_acl;

#define UNARY(ACL, ATEN)                                                   \
  OP(aclnn##ACL, [](Tensor a, Tensor out) { out.copy_(at::ATEN(a)); })     \
  OP(aclnnInplace##ACL, [](Tensor a) { a.copy_(at::ATEN(a)); })
UNARY(Abs, abs)
UNARY(Ceil, ceil)
UNARY(Cos, cos)
UNARY(Erf, erf)
UNARY(Exp, exp)
UNARY(Floor, floor)
UNARY(Log, log)
UNARY(Log2, log2)
UNARY(LogicalNot, logical_not)
UNARY(Neg, neg)
UNARY(Reciprocal, reciprocal)
UNARY(Relu, relu)
UNARY(Round, round)
UNARY(Rsqrt, rsqrt)
UNARY(Sigmoid, sigmoid)
UNARY(Sin, sin)
UNARY(Sqrt, sqrt)
UNARY(Tanh, tanh)
UNARY(Trunc, trunc)
OP(aclnnSign, [](Tensor a, Tensor out) { out.copy_(at::sign(a)); })
OP(aclnnSilu, [](Tensor a, Tensor out) { out.copy_(at::silu(a)); })
OP(aclnnBitwiseNot, [](Tensor a, Tensor out) { out.copy_(at::bitwise_not(a)); })
OP(aclnnIsFinite, [](Tensor a, Tensor out) { out.copy_(at::isfinite(a)); })
OP(aclnnIsPosInf, [](Tensor a, Tensor out) { out.copy_(at::isposinf(a)); })
OP(aclnnIsNegInf, [](Tensor a, Tensor out) { out.copy_(at::isneginf(a)); })

// Binary operators with a scale on the second operand.
#define SCALED(ACL, ATEN)                                                                                   \
  OP(aclnn##ACL, [](Tensor a, Tensor b, Scalar s, Tensor out) { out.copy_(at::ATEN(a, b, s)); })            \
  OP(aclnn##ACL##s, [](Tensor a, Scalar b, Scalar s, Tensor out) { out.copy_(at::ATEN(a, b, s)); })         \
  OP(aclnnInplace##ACL, [](Tensor a, Tensor b, Scalar s) { a.copy_(at::ATEN(a, b, s)); })                   \
  OP(aclnnInplace##ACL##s, [](Tensor a, Scalar b, Scalar s) { a.copy_(at::ATEN(a, b, s)); })
SCALED(Add, add)
SCALED(Sub, sub)
OP(aclnnRsub, [](Tensor a, Tensor b, Scalar s, Tensor out) { out.copy_(at::rsub(a, b, s)); })
OP(aclnnRsubs, [](Tensor a, Scalar b, Scalar s, Tensor out) { out.copy_(at::rsub(a, b, s)); })

// Binary operators named ...s for a scalar second operand.
#define BINARY(ACL, ATEN)                                                              \
  OP(aclnn##ACL, [](Tensor a, Tensor b, Tensor out) { out.copy_(at::ATEN(a, b)); })    \
  OP(aclnn##ACL##s, [](Tensor a, Scalar b, Tensor out) { out.copy_(at::ATEN(a, b)); }) \
  OP(aclnnInplace##ACL, [](Tensor a, Tensor b) { a.copy_(at::ATEN(a, b)); })           \
  OP(aclnnInplace##ACL##s, [](Tensor a, Scalar b) { a.copy_(at::ATEN(a, b)); })
BINARY(Mul, mul)
BINARY(Div, div)
BINARY(FloorDivide, floor_divide)

namespace {
std::optional<c10::string_view> rounding(int64_t mode) {
  if (mode == 1) return "trunc";
  if (mode == 2) return "floor";
  return std::nullopt;
}
}  // namespace
OP(aclnnDivMod, [](Tensor a, Tensor b, int64_t mode, Tensor out) { out.copy_(at::div(a, b, rounding(mode))); })
OP(aclnnDivMods, [](Tensor a, Scalar b, int64_t mode, Tensor out) { out.copy_(at::div(a, b, rounding(mode))); })
OP(aclnnInplaceDivMod, [](Tensor a, Tensor b, int64_t mode) { a.copy_(at::div(a, b, rounding(mode))); })
OP(aclnnInplaceDivMods, [](Tensor a, Scalar b, int64_t mode) { a.copy_(at::div(a, b, rounding(mode))); })

// Binary operators named ...Tensor and ...Scalar.
#define NAMED(ACL, ATEN)                                                                       \
  OP(aclnn##ACL##Tensor, [](Tensor a, Tensor b, Tensor out) { out.copy_(at::ATEN(a, b)); })    \
  OP(aclnn##ACL##Scalar, [](Tensor a, Scalar b, Tensor out) { out.copy_(at::ATEN(a, b)); })    \
  OP(aclnnInplace##ACL##Tensor, [](Tensor a, Tensor b) { a.copy_(at::ATEN(a, b)); })           \
  OP(aclnnInplace##ACL##Scalar, [](Tensor a, Scalar b) { a.copy_(at::ATEN(a, b)); })
NAMED(Eq, eq)
NAMED(Ne, ne)
NAMED(Lt, lt)
NAMED(Le, le)
NAMED(Gt, gt)
NAMED(Ge, ge)
NAMED(BitwiseAnd, bitwise_and)
NAMED(BitwiseOr, bitwise_or)
NAMED(BitwiseXor, bitwise_xor)
NAMED(Fmod, fmod)
NAMED(RemainderTensor, remainder)
NAMED(PowTensor, pow)
OP(aclnnPowScalarTensor, [](Scalar a, Tensor b, Tensor out) { out.copy_(at::pow(a, b)); })
OP(aclnnRemainderScalarTensor, [](Scalar a, Tensor b, Tensor out) { out.copy_(at::remainder(a, b)); })

#define PLAIN(ACL, ATEN)                                                            \
  OP(aclnn##ACL, [](Tensor a, Tensor b, Tensor out) { out.copy_(at::ATEN(a, b)); }) \
  OP(aclnnInplace##ACL, [](Tensor a, Tensor b) { a.copy_(at::ATEN(a, b)); })
PLAIN(LogicalAnd, logical_and)
PLAIN(LogicalOr, logical_or)
PLAIN(LogicalXor, logical_xor)
OP(aclnnMaximum, [](Tensor a, Tensor b, Tensor out) { out.copy_(at::maximum(a, b)); })
OP(aclnnMinimum, [](Tensor a, Tensor b, Tensor out) { out.copy_(at::minimum(a, b)); })
OP(aclnnLeftShift, [](Tensor a, Tensor b, Tensor out) { out.copy_(at::bitwise_left_shift(a, b)); })
OP(aclnnRightShift, [](Tensor a, Tensor b, Tensor out) { out.copy_(at::bitwise_right_shift(a, b)); })
OP(aclnnEqual, [](Tensor a, Tensor b, Tensor out) { out.fill_(at::equal(a, b)); })
OP(aclnnIsClose, [](Tensor a, Tensor b, double rtol, double atol, bool nan, Tensor out) {
  out.copy_(at::isclose(a, b, rtol, atol, nan));
})

OP(aclnnClamp, [](Tensor a, MaybeScalar lo, MaybeScalar hi, Tensor out) { out.copy_(at::clamp(a, lo, hi)); })
OP(aclnnClampMin, [](Tensor a, Scalar lo, Tensor out) { out.copy_(at::clamp_min(a, lo)); })
OP(aclnnClampMax, [](Tensor a, Scalar hi, Tensor out) { out.copy_(at::clamp_max(a, hi)); })
OP(aclnnInplaceClampMax, [](Tensor a, Scalar hi) { a.copy_(at::clamp_max(a, hi)); })
OP(aclnnClampMinTensor, [](Tensor a, Tensor lo, Tensor out) { out.copy_(at::clamp_min(a, lo)); })
OP(aclnnClampMaxTensor, [](Tensor a, Tensor hi, Tensor out) { out.copy_(at::clamp_max(a, hi)); })
OP(aclnnClampTensor, [](Tensor a, Tensor lo, Tensor hi, Tensor out) {
  auto maybe = [](const Tensor& t) { return t.defined() ? std::optional<Tensor>(t) : std::nullopt; };
  out.copy_(at::clamp(a, maybe(lo), maybe(hi)));
})
OP(aclnnSWhere, [](Tensor condition, Tensor a, Tensor b, Tensor out) { out.copy_(at::where(condition, a, b)); })

OP(aclnnInplaceCopy, [](Tensor to, Tensor from) {
  to.copy_(from);
  note_copy("aclnnInplaceCopy", to);
})
OP(aclnnCast, [](Tensor a, Dtype, Tensor out) { out.copy_(a); })
OP(aclnnInplaceFillScalar, [](Tensor a, Scalar value) { a.fill_(value); })
OP(aclnnInplaceFillTensor, [](Tensor a, Tensor value) { a.fill_(value.item()); })
OP(aclnnInplaceZero, [](Tensor a) { a.zero_(); })
OP(aclnnInplaceOne, [](Tensor a) { a.fill_(1); })
OP(aclnnArange, [](Scalar from, Scalar to, Scalar step, Tensor out) {
  // Computed from the output's length: a rounded end must not change the number of elements.
  const bool integral = from.isIntegral(true) && step.isIntegral(true);
  Tensor steps = at::arange(out.numel(), at::TensorOptions().dtype(integral ? at::kLong : at::kDouble));
  out.copy_(at::add(at::mul(steps, step), from).view(out.sizes()));
})
OP(aclnnEye, [](int64_t n, int64_t m, Tensor out) { out.copy_(at::eye(n, m)); })

// The plain operator is documented with the tanh formula; torch_npu calls it for both values of `approximate`.
OP(aclnnGelu, [](Tensor a, Tensor out) { out.copy_(at::gelu(a, "tanh")); })
OP(aclnnGeluV2, [](Tensor a, int64_t mode, Tensor out) { out.copy_(at::gelu(a, mode == 0 ? "none" : "tanh")); })
OP(aclnnSoftmax, [](Tensor a, int64_t dim, Tensor out) {
  out.copy_(at::softmax(a, dim, out.scalar_type()));
})
OP(aclnnLogSoftmax, [](Tensor a, int64_t dim, Tensor out) { out.copy_(at::log_softmax(a, dim, out.scalar_type())); })

OP(aclnnForeachCopy, [](Tensors from, Tensors to) {
  for (size_t i = 0; i < to.size(); ++i) {
    to[i].copy_(from[i]);
    note_copy("aclnnForeachCopy", to[i]);
  }
})
OP(aclnnForeachZeroInplace, [](Tensors all) {
  for (Tensor& each : all) each.zero_();
})
OP(aclnnForeachMulScalar, [](Tensors a, Tensor factor, Tensors out) {
  for (size_t i = 0; i < out.size(); ++i) out[i].copy_(at::mul(a[i], factor.item()));
})
