// Operators that move elements: indexing, scattering, joining.
#include "opapi.h"

using namespace software_acl;

namespace {
// torch_npu stands an empty tensor in for "all of this dimension".
c10::List<std::optional<Tensor>> indices_of(const Tensors& all) {
  c10::List<std::optional<Tensor>> out;
  for (const Tensor& each : all) {
    const bool absent = !each.defined() || (each.numel() == 0 && each.dim() == 1 && each.scalar_type() != at::kBool);
    out.push_back(absent ? std::nullopt : std::optional<Tensor>(each));
  }
  return out;
}

void scatter(Tensor to, int64_t dim, Tensor index, Tensor from, int64_t reduction) {
  if (reduction == 0) to.scatter_(dim, index, from);
  if (reduction == 1) to.scatter_add_(dim, index, from);
  if (reduction == 2) to.scatter_reduce_(dim, index, from, "prod");
}

// torch allows an index above what sort and gather need; a device reads out of bounds silently, this double does not.
Tensor wide(const Tensor& index) { return index.scalar_type() == at::kLong ? index : index.to(at::kLong); }
}  // namespace

OP(aclnnEmbedding, [](Tensor weight, Tensor ids, Tensor out) { out.copy_(at::embedding(weight, wide(ids))); })
OP(aclnnIndexSelect, [](Tensor a, int64_t dim, Tensor index, Tensor out) {
  out.copy_(at::index_select(a, dim, wide(index)));
  note_copy("aclnnIndexSelect", out);
})
OP(aclnnGather, [](Tensor a, int64_t dim, Tensor index, Tensor out) { out.copy_(at::gather(a, dim, wide(index))); })
// An absent index and one without entries look the same, but with the latter there is nothing to compute.
OP(aclnnIndex, [](Tensor a, Tensors all, Tensor out) {
  if (out.numel() != 0) out.copy_(at::index(a, indices_of(all)));
})
OP(aclnnIndexPutImpl, [](Tensor a, Tensors all, Tensor values, bool accumulate, bool) {
  a.index_put_(indices_of(all), values.to(a.scalar_type()), accumulate);
})
OP(aclnnInplaceIndexCopy, [](Tensor a, int64_t dim, Tensor index, Tensor from) {
  a.index_copy_(dim, wide(index), from);
})
OP(aclnnIndexCopy, [](Tensor a, int64_t dim, Tensor index, Tensor from, Tensor out) {
  out.copy_(at::index_copy(a, dim, wide(index), from));
})
OP(aclnnIndexAdd, [](Tensor a, int64_t dim, Tensor index, Tensor from, Scalar alpha, Tensor out) {
  out.copy_(at::index_add(a, dim, index, from, alpha));
})
OP(aclnnIndexFillTensor, [](Tensor a, int64_t dim, Ints index, Scalar value, Tensor out) {
  out.copy_(at::index_fill(a, dim, at::tensor(*index, at::kLong), value));
})
OP(aclnnScatter, [](Tensor a, int64_t dim, Tensor index, Tensor from, int64_t reduction, Tensor out) {
  out.copy_(a);
  scatter(out, dim, wide(index), from, reduction);
})
OP(aclnnInplaceScatter, [](Tensor a, int64_t dim, Tensor index, Tensor from, int64_t reduction) {
  scatter(a, dim, wide(index), from, reduction);
})
OP(aclnnScatterValue, [](Tensor a, int64_t dim, Tensor index, Scalar value, int64_t, Tensor out) {
  out.copy_(at::scatter(a, dim, wide(index), value));
})
OP(aclnnInplaceScatterValue, [](Tensor a, int64_t dim, Tensor index, Scalar value, int64_t) {
  a.scatter_(dim, wide(index), value);
})
OP(aclnnScatterAdd, [](Tensor a, int64_t dim, Tensor index, Tensor from, Tensor out) {
  out.copy_(at::scatter_add(a, dim, wide(index), from));
})
OP(aclnnIsInScalarTensor, [](Scalar a, Tensor all, bool unique, bool invert, Tensor out) {
  out.copy_(at::isin(a, all, unique, invert));
})
OP(aclnnIsInTensorScalar, [](Tensor a, Scalar one, bool unique, bool invert, Tensor out) {
  out.copy_(at::isin(a, one, unique, invert));
})
OP(aclnnInplaceMaskedFillScalar, [](Tensor a, Tensor mask, Scalar value) { a.masked_fill_(mask, value); })
OP(aclnnInplaceMaskedFillTensor, [](Tensor a, Tensor mask, Tensor value) { a.masked_fill_(mask, value.item()); })
OP(aclnnCat, [](Tensors all, int64_t dim, Tensor out) {
  out.copy_(at::cat(all, dim));
  note_copy("aclnnCat", out);
})
OP(aclnnStack, [](Tensors all, int64_t dim, Tensor out) { out.copy_(at::stack(all, dim)); })
OP(aclnnRepeat, [](Tensor a, Ints times, Tensor out) { out.copy_(a.repeat(*times)); })
OP(aclnnRepeatInterleaveInt, [](Tensor a, int64_t times, int64_t, Tensor out) {
  out.copy_(at::repeat_interleave(a, times));
})
OP(aclnnRepeatInterleaveIntWithDim, [](Tensor a, int64_t times, int64_t dim, int64_t, Tensor out) {
  out.copy_(at::repeat_interleave(a, times, dim));
})
OP(aclnnRepeatInterleaveTensor, [](Tensor times, int64_t, Tensor out) { out.copy_(at::repeat_interleave(times)); })
OP(aclnnRepeatInterleave, [](Tensor a, Tensor times, int64_t, Tensor out) {
  out.copy_(at::repeat_interleave(a, times));
})
OP(aclnnRepeatInterleaveWithDim, [](Tensor a, Tensor times, int64_t dim, int64_t, Tensor out) {
  out.copy_(at::repeat_interleave(a, times, dim));
})
OP(aclnnFlip, [](Tensor a, Ints dims, Tensor out) { out.copy_(at::flip(a, *dims)); })
OP(aclnnRoll, [](Tensor a, Ints by, Ints dims, Tensor out) { out.copy_(at::roll(a, *by, *dims)); })
OP(aclnnTriu, [](Tensor a, int64_t diagonal, Tensor out) { out.copy_(at::triu(a, diagonal)); })
OP(aclnnTril, [](Tensor a, int64_t diagonal, Tensor out) { out.copy_(at::tril(a, diagonal)); })
OP(aclnnConstantPadNd, [](Tensor a, Ints pad, Scalar value, Tensor out) {
  out.copy_(at::constant_pad_nd(a, *pad, value));
})

// Operators whose result has a size that only the data know: torch_npu waits for them and asks for the shape.
OP(aclnnNonzero, [](Tensor a, AclTensor* out) {
  Tensor found = at::nonzero(a);
  out->value = out->value.narrow(0, 0, found.size(0));
  out->value.copy_(found);
})
OP(aclnnNonzeroV2, [](Tensor a, AclTensor* out) {
  Tensor found = at::nonzero(a).t();
  out->value = out->value.as_strided(found.sizes(), {found.size(1), 1});
  out->value.copy_(found);
})
OP(aclnnMaskedSelect, [](Tensor a, Tensor mask, AclTensor* out) {
  Tensor found = at::masked_select(a, mask);
  out->value = out->value.narrow(0, 0, found.size(0));
  out->value.copy_(found);
})
