// Reductions, products, sorting, and random numbers.
#include <ATen/CPUGeneratorImpl.h>

#include "opapi.h"

using namespace software_acl;

namespace {
at::OptionalIntArrayRef dims_of(const Ints& dims) {
  return dims && !dims->empty() ? at::OptionalIntArrayRef(*dims) : at::OptionalIntArrayRef();
}

Tensor reduce_logical(Tensor a, const Ints& dims, bool keep, bool all) {
  if (!dims || dims->empty() || static_cast<int64_t>(dims->size()) == a.dim()) {
    return all ? at::all(a) : at::any(a);
  }
  return all ? at::all(a, at::OptionalIntArrayRef(*dims), keep) : at::any(a, at::OptionalIntArrayRef(*dims), keep);
}

// Random numbers are those of a CPU generator seeded by what torch_npu passes: reproducible, not the device's.
at::Generator generator(int64_t seed, int64_t offset) {
  const auto mixed = static_cast<uint64_t>(seed) * 1000003u + static_cast<uint64_t>(offset);
  return at::make_generator<at::CPUGeneratorImpl>(mixed);
}
// Graph-safe forms keep seed and offset in device tensors, so that a replay draws anew.
at::Generator generator(const Tensor& seed, const Tensor& offset, int64_t inside) {
  return generator(seed.item().toLong(), offset.item().toLong() + inside);
}
}  // namespace

OP(aclnnReduceSum, [](Tensor a, Ints dims, bool keep, Dtype type, Tensor out) {
  out.copy_(at::sum(a, dims_of(dims), keep, type.type).view(out.sizes()));
})
OP(aclnnMean, [](Tensor a, Ints dims, bool keep, Dtype type, Tensor out) {
  out.copy_(at::mean(a, dims_of(dims), keep, type.type).view(out.sizes()));
})
OP(aclnnProd, [](Tensor a, Dtype type, Tensor out) { out.copy_(at::prod(a, type.type)); })
OP(aclnnProdDim, [](Tensor a, int64_t dim, bool keep, Dtype type, Tensor out) {
  out.copy_(at::prod(a, dim, keep, type.type));
})
OP(aclnnAny, [](Tensor a, Ints dims, bool keep, Tensor out) {
  out.copy_(reduce_logical(a, dims, keep, false).view(out.sizes()));
})
OP(aclnnAll, [](Tensor a, Ints dims, bool keep, Tensor out) {
  out.copy_(reduce_logical(a, dims, keep, true).view(out.sizes()));
})
OP(aclnnMax, [](Tensor a, Tensor out) { out.copy_(at::max(a)); })
OP(aclnnMin, [](Tensor a, Tensor out) { out.copy_(at::min(a)); })
OP(aclnnMaxDim, [](Tensor a, int64_t dim, bool keep, Tensor values, Tensor indices) {
  auto [v, i] = at::max(a, dim, keep);
  values.copy_(v), indices.copy_(i);
})
OP(aclnnMinDim, [](Tensor a, int64_t dim, bool keep, Tensor values, Tensor indices) {
  auto [v, i] = at::min(a, dim, keep);
  values.copy_(v), indices.copy_(i);
})
OP(aclnnAmax, [](Tensor a, Ints dims, bool keep, Tensor out) { out.copy_(at::amax(a, *dims, keep)); })
OP(aclnnAmin, [](Tensor a, Ints dims, bool keep, Tensor out) { out.copy_(at::amin(a, *dims, keep)); })
OP(aclnnArgMax, [](Tensor a, int64_t dim, bool keep, Tensor out) { out.copy_(at::argmax(a, dim, keep)); })
OP(aclnnArgMin, [](Tensor a, int64_t dim, bool keep, Tensor out) { out.copy_(at::argmin(a, dim, keep)); })
OP(aclnnCumsum, [](Tensor a, int64_t dim, Dtype type, Tensor out) { out.copy_(at::cumsum(a, dim, type.type)); })
OP(aclnnCumprod, [](Tensor a, Scalar dim, Dtype type, Tensor out) {
  out.copy_(at::cumprod(a, dim.toLong(), type.type));
})
OP(aclnnTopk, [](Tensor a, int64_t k, int64_t dim, bool largest, bool sorted, Tensor values, Tensor indices) {
  auto [v, i] = at::topk(a, k, dim, largest, sorted);
  values.copy_(v), indices.copy_(i);
})
OP(aclnnSort, [](Tensor a, bool stable, int64_t dim, bool descending, Tensor values, Tensor indices) {
  auto [v, i] = at::sort(a, stable, dim, descending);
  values.copy_(v), indices.copy_(i);
})

OP(aclnnMm, [](Tensor a, Tensor b, Tensor out, int8_t) { out.copy_(at::mm(a, b)); })
OP(aclnnMatmul, [](Tensor a, Tensor b, Tensor out, int8_t) { out.copy_(at::matmul(a, b)); })
OP(aclnnBatchMatMul, [](Tensor a, Tensor b, Tensor out, int8_t) { out.copy_(at::bmm(a, b)); })
OP(aclnnAddmm, [](Tensor c, Tensor a, Tensor b, Scalar beta, Scalar alpha, Tensor out, int8_t) {
  out.copy_(at::addmm(c, a, b, beta, alpha));
})
OP(aclnnBaddbmm, [](Tensor c, Tensor a, Tensor b, Scalar beta, Scalar alpha, Tensor out, int8_t) {
  out.copy_(at::baddbmm(c, a, b, beta, alpha));
})

OP(aclnnInplaceUniform, [](Tensor a, double from, double to, int64_t seed, int64_t offset) {
  a.uniform_(from, to, generator(seed, offset));
})
OP(aclnnInplaceUniformTensor, [](Tensor a, double from, double to, Tensor seed, Tensor offset, int64_t inside) {
  a.uniform_(from, to, generator(seed, offset, inside));
})
OP(aclnnInplaceNormal, [](Tensor a, float mean, float std, int64_t seed, int64_t offset) {
  a.normal_(mean, std, generator(seed, offset));
})
OP(aclnnInplaceNormalTensor, [](Tensor a, float mean, float std, Tensor seed, Tensor offset, int64_t inside) {
  a.normal_(mean, std, generator(seed, offset, inside));
})
OP(aclnnInplaceRandom, [](Tensor a, int64_t from, int64_t to, int64_t seed, int64_t offset) {
  a.random_(from, to, generator(seed, offset));
})
OP(aclnnInplaceRandomTensor, [](Tensor a, int64_t from, int64_t to, Tensor seed, Tensor offset, int64_t inside) {
  a.random_(from, to, generator(seed, offset, inside));
})
OP(aclnnMultinomial, [](Tensor a, int64_t samples, bool replacement, int64_t seed, int64_t offset, Tensor out) {
  out.copy_(at::multinomial(a, samples, replacement, generator(seed, offset)));
})
OP(aclnnMultinomialTensor,
   [](Tensor a, int64_t samples, bool replacement, Tensor seed, Tensor offset, int64_t inside, Tensor out) {
     out.copy_(at::multinomial(a, samples, replacement, generator(seed, offset, inside)));
   })

namespace {
// Dropout masks are packed: one bit for each element, least significant first.
void pack_mask(const Ints& shape, double p, at::Generator random, Tensor mask) {
  int64_t count = 1;
  for (int64_t size : *shape) count *= size;
  Tensor keep = at::zeros({mask.numel() * 8}, at::kByte);
  keep.narrow(0, 0, count).copy_(at::ge(at::rand({count}, random), p));
  Tensor weights = at::bitwise_left_shift(at::ones({8}, at::kByte), at::arange(8, at::kByte));
  mask.copy_(at::sum(keep.view({-1, 8}) * weights, {1}, false, at::kByte).view(mask.sizes()));
}
}  // namespace
OP(aclnnDropoutGenMaskV2, [](Ints shape, double p, int64_t seed, int64_t offset, Dtype, Tensor mask) {
  pack_mask(shape, p, generator(seed, offset), mask);
})
OP(aclnnDropoutGenMaskV2Tensor,
   [](Ints shape, double p, Tensor seed, Tensor offset, int64_t inside, Dtype, Tensor mask) {
     pack_mask(shape, p, generator(seed, offset, inside), mask);
   })
OP(aclnnDropoutDoMask, [](Tensor a, Tensor mask, double p, Tensor out) {
  Tensor bits = at::bitwise_right_shift(mask.view({-1, 1}), at::arange(8, at::kByte)).bitwise_and(1);
  Tensor keep = bits.view(-1).narrow(0, 0, a.numel()).view(a.sizes());
  out.copy_(p >= 1.0 ? at::zeros_like(a) : a * keep * (1.0 / (1.0 - p)));
})
