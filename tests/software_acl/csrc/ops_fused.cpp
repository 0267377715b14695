// The fused operators beside attention: norms, rotary position, gated GELU, the paged cache write.
#include "opapi.h"

using namespace software_acl;

namespace {

struct Normed {
  Tensor y, rstd;
};

Normed rms_norm(const Tensor& x, const Tensor& gamma, double epsilon) {
  Tensor wide = x.to(at::kFloat);
  std::vector<int64_t> dims;
  for (int64_t dim = x.dim() - gamma.dim(); dim < x.dim(); ++dim) dims.push_back(dim);
  Tensor rstd = at::rsqrt(at::mean(at::square(wide), dims, true) + epsilon);
  return {(wide * rstd * gamma.to(at::kFloat)).to(x.scalar_type()), rstd};
}

void refuse(bool wrong, const char* what) {
  if (wrong) throw Refused(161002, what);
}

void check_gamma(const Tensor& x, const Tensor& gamma) {
  refuse(gamma.scalar_type() != x.scalar_type() && gamma.scalar_type() != at::kFloat,
         "gamma must have the type of x or float32");
  const auto tail = x.sizes().slice(x.dim() - gamma.dim());
  refuse(tail != gamma.sizes(), "gamma must have the shape of x's last dimensions");
}

Tensor rotated(const Tensor& x, int64_t mode) {
  if (mode == 0) {
    auto halves = at::chunk(x, 2, -1);
    return at::cat({at::neg(halves[1]), halves[0]}, -1);
  }
  Tensor even = x.slice(-1, 0, x.size(-1), 2), odd = x.slice(-1, 1, x.size(-1), 2);
  return at::stack({at::neg(odd), even}, -1).view(x.sizes());
}

void check_rotary(Tensor x, Tensor cos, Tensor sin, int64_t mode, Tensor) {
  refuse(mode != 0 && mode != 1, "only the modes half and interleave are supported");
  refuse(x.dim() != 4 && x.dim() != 3, "x must have 3 or 4 dimensions");
  refuse(x.size(-1) >= 896 || x.size(-1) % 2 != 0, "the head size must be even and below 896");
  refuse(cos.sizes() != sin.sizes(), "cos and sin must have the same shape");
  refuse(cos.scalar_type() != x.scalar_type(), "cos must have the type of x");
  refuse(cos.size(-1) != x.size(-1) || cos.dim() != x.dim(), "cos must have x's dimensions and head size");
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    refuse(cos.size(dim) != 1 && cos.size(dim) != x.size(dim), "cos cannot be broadcast to x");
  }
}

void check_scatter(Tensor key, Tensor key_cache, Tensor slots, Tensor value, Tensor value_cache, Tensor lens,
                   Tensor offsets, Tensor seq_lens, std::string mode, std::string, Ints, Ints) {
  const bool compressed = lens.defined() || offsets.defined() || seq_lens.defined();
  refuse(compressed, "compressed caches are not part of the software ACL");
  refuse(!mode.empty() && mode.rfind("Norm", 0) != 0, "only cache_mode Norm is part of the software ACL");
  for (const Tensor* each : {&key, &value, &key_cache, &value_cache, &slots}) {
    refuse(!each->is_contiguous(), "no operand may be strided");
  }
  refuse(key.dim() != 3 || key_cache.dim() != 4, "key must have 3 dimensions, the cache 4");
  refuse(key.scalar_type() != key_cache.scalar_type() || value.scalar_type() != value_cache.scalar_type() ||
             key.scalar_type() != value.scalar_type(),
         "key, value and the caches differ in type");
  refuse(slots.scalar_type() != at::kInt && slots.scalar_type() != at::kLong, "slot_mapping must be int32 or int64");
  refuse(slots.dim() != 1 || slots.size(0) != key.size(0), "slot_mapping must have one slot for each token");
  refuse(key_cache.size(2) * key_cache.size(3) != key.size(1) * key.size(2), "the cache holds tokens of another size");
}

void write_slots(const Tensor& cache, const Tensor& slots, const Tensor& tokens) {
  Tensor flat = cache.view({cache.size(0) * cache.size(1), -1});
  flat.index_copy_(0, slots, tokens.reshape({tokens.size(0), -1}));
}

}  // namespace

OP_CHECKED(aclnnRmsNorm, ([](Tensor x, Tensor gamma, double, Tensor, Tensor) { check_gamma(x, gamma); }),
           [](Tensor x, Tensor gamma, double epsilon, Tensor y, Tensor rstd) {
             auto normed = rms_norm(x, gamma, epsilon);
             y.copy_(normed.y);
             rstd.copy_(normed.rstd);
           })
OP_CHECKED(aclnnAddRmsNorm,
           ([](Tensor a, Tensor b, Tensor gamma, double, Tensor, Tensor, Tensor) {
             refuse(a.sizes() != b.sizes(), "x1 and x2 must have the same shape");
             refuse(gamma.scalar_type() != a.scalar_type(), "gamma must have the type of x1");
             check_gamma(a, gamma);
           }),
           [](Tensor a, Tensor b, Tensor gamma, double epsilon, Tensor y, Tensor rstd, Tensor sum) {
             sum.copy_(at::add(a, b));
             auto normed = rms_norm(sum, gamma, epsilon);
             y.copy_(normed.y);
             rstd.copy_(normed.rstd);
           })
OP_CHECKED(aclnnRotaryPositionEmbedding, (&check_rotary),
           [](Tensor x, Tensor cos, Tensor sin, int64_t mode, Tensor out) {
             out.copy_(at::add(at::mul(x, cos), at::mul(rotated(x, mode), sin)));
           })
OP(aclnnGeGluV3, [](Tensor x, int64_t dim, int64_t approximate, bool activate_left, Tensor out, Tensor activated) {
  auto halves = at::chunk(x, 2, dim);
  activated.copy_(at::gelu(halves[activate_left ? 0 : 1], approximate == 1 ? "tanh" : "none"));
  out.copy_(at::mul(activated, halves[activate_left ? 1 : 0]));
})
OP_CHECKED(aclnnScatterPaKvCache, (&check_scatter),
           [](Tensor key, Tensor key_cache, Tensor slots, Tensor value, Tensor value_cache, Tensor, Tensor, Tensor,
              std::string, std::string, Ints, Ints) {
             Tensor wide = slots.to(at::kLong);
             const int64_t room = key_cache.size(0) * key_cache.size(1);
             if (wide.numel() == 0) return;
             if (wide.min().item<int64_t>() < 0 || wide.max().item<int64_t>() >= room) {
               throw std::runtime_error("slot_mapping is out of range");
             }
             if (std::get<0>(at::_unique(wide)).numel() != wide.numel()) {
               throw std::runtime_error("slot_mapping names a slot twice");
             }
             write_slots(key_cache, wide, key);
             write_slots(value_cache, wide, value);
           })
