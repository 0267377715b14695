// Fused attention in float32, request by request: slow, plain, and independent of any fused CPU kernel.
#include "attention.h"

#include <limits>

namespace software_acl {

Shape shape_of(const Attention& a) {
  const auto& q = a.query;
  const std::string layout = a.query_layout();
  if (layout == "BNSD" && q.dim() == 4) return {q.size(0), q.size(1), q.size(2), q.size(3)};
  if (layout == "BSND" && q.dim() == 4) return {q.size(0), q.size(2), q.size(1), q.size(3)};
  if (layout == "BSH" && q.dim() == 3) {
    return {q.size(0), a.heads, q.size(1), q.size(2) / std::max<int64_t>(a.heads, 1)};
  }
  if ((layout == "TND" || layout == "NTD") && q.dim() == 3) {
    const auto rows = a.query_lengths ? static_cast<int64_t>(a.query_lengths->size()) : 0;
    int64_t longest = 0;
    for (int64_t row = 0; row < rows; ++row) longest = std::max(longest, query_length(a, row));
    return {rows, q.size(layout == "TND" ? 1 : 0), longest, q.size(2)};
  }
  throw Refused(kTiling, "input_layout " + a.layout + " with a query of " + std::to_string(q.dim()) + " dimensions");
}

int64_t query_begin(const Attention& a, int64_t row) { return row == 0 ? 0 : (*a.query_lengths)[row - 1]; }

int64_t query_length(const Attention& a, int64_t row) {
  if (a.tokens_first()) return (*a.query_lengths)[row] - query_begin(a, row);
  const int64_t all = a.query.size(a.query_layout() == "BNSD" ? 2 : 1);
  if (!a.query_lengths || a.query_lengths->empty() || all == 1) return all;
  return a.query_lengths->size() == 1 ? (*a.query_lengths)[0] : (*a.query_lengths)[row];
}

int64_t kv_length(const Attention& a, int64_t row) {
  if (a.kv_lengths && !a.kv_lengths->empty()) {
    const auto& all = *a.kv_lengths;
    if (a.tokens_first() && !a.paged()) return all[row] - (row == 0 ? 0 : all[row - 1]);
    return all.size() == 1 ? all[0] : all[row];
  }
  return a.keys[0].size(a.query_layout() == "BNSD" ? 2 : 1);
}

namespace {

// One request's part of a tensor as (heads, tokens, head size).
Tensor part(const Tensor& t, const std::string& layout, int64_t row, int64_t begin, int64_t length, int64_t heads) {
  if (layout == "BNSD") return t[row].narrow(1, 0, length);
  if (layout == "BSND") return t[row].transpose(0, 1).narrow(1, 0, length);
  if (layout == "BSH") return t[row].view({t.size(1), heads, -1}).transpose(0, 1).narrow(1, 0, length);
  if (layout == "NBSD") return t.select(1, row).narrow(1, 0, length);
  if (layout == "TND") return t.narrow(0, begin, length).transpose(0, 1);
  if (layout == "NTD") return t.narrow(1, begin, length);
  throw std::runtime_error("layout " + layout);
}

// Blocks of a paged cache that one request's keys are read from, in the order of its table.
Tensor blocks_of(const Attention& a, int64_t row) {
  const int64_t used = (kv_length(a, row) + a.block_size - 1) / a.block_size;
  return a.block_table[row].narrow(0, 0, used).to(at::kLong);
}

Tensor cached(const Attention& a, const Tensor& cache, int64_t row) {
  const int64_t length = kv_length(a, row), heads = a.kv_count();
  if (!a.paged()) {
    const bool cumulative = a.tokens_first() && row > 0;
    return part(cache, a.query_layout(), row, cumulative ? (*a.kv_lengths)[row - 1] : 0, length, heads);
  }
  Tensor blocks = cache.dim() == 4 ? cache : cache.view({cache.size(0), cache.size(1), heads, -1}).transpose(1, 2);
  Tensor found = blocks.index_select(0, blocks_of(a, row));  // (used, heads, block_size, head size); a wrong id throws
  return found.transpose(0, 1).reshape({heads, found.size(0) * a.block_size, found.size(3)}).narrow(1, 0, length);
}

// The part of an explicit mask that concerns one request.
Tensor explicit_mask(const Attention& a, int64_t row, int64_t queries, int64_t keys, int64_t longest) {
  Tensor mask = a.mask.to(at::kBool);
  if (mask.dim() == 2 && longest == 1 && mask.size(0) > 1) mask = mask.narrow(0, row, 1);
  while (mask.dim() > 2) mask = mask.select(0, mask.size(0) > 1 ? row : 0);
  return mask.narrow(0, 0, queries).narrow(1, 0, keys);
}

// True where a query may not see a key; undefined when everything is visible.
Tensor hidden(const Attention& a, int64_t row, int64_t queries, int64_t keys, int64_t longest) {
  if ((longest == 1 && !a.training) || a.sparse_mode == 1) {  // a single query ignores the mode, not an explicit mask
    return a.explicit_mask(longest) ? explicit_mask(a, row, queries, keys, longest) : Tensor();
  }
  if (a.sparse_mode == 0 && !a.mask.defined()) return Tensor();
  Tensor i = at::arange(queries, at::kLong).unsqueeze(1), j = at::arange(keys, at::kLong);
  Tensor last = i + (keys - queries);  // modes 3 and 4 are anchored at the bottom right
  if (a.sparse_mode == 2) return j > i;
  if (a.sparse_mode == 3) return j > last;
  if (a.sparse_mode == 4) return at::logical_or(j < last - a.pre_tokens, j > last + a.next_tokens);
  Tensor outside = at::logical_or(j < i - a.pre_tokens, j > i + a.next_tokens);
  return at::logical_or(outside, explicit_mask(a, row, queries, keys, longest));
}

}  // namespace

void run_attention(const Attention& a) {
  const Shape s = shape_of(a);
  std::vector<std::vector<int64_t>> read(a.paged() ? s.batch : 0);  // blocks, row by row
  int64_t bytes = 0;
  const int64_t group = a.heads / a.kv_count();
  const double nothing_seen = a.inner_precise >= 2 ? 0.0 : std::numeric_limits<double>::quiet_NaN();
  for (int64_t row = 0; row < s.batch; ++row) {
    const int64_t length = query_length(a, row), keys = kv_length(a, row);
    const int64_t begin = a.tokens_first() ? query_begin(a, row) : 0;
    Tensor out = part(a.out, a.out_layout(), row, begin, a.tokens_first() ? length : s.queries, a.heads);
    if (length < out.size(1) || keys == 0) out.zero_();
    if (length == 0 || keys == 0) continue;
    Tensor q = part(a.query, a.query_layout(), row, begin, length, a.heads).to(at::kFloat);
    Tensor k = cached(a, a.keys[0], row), v = cached(a, a.values[0], row);
    if (a.paged()) {
      Tensor ids = blocks_of(a, row);
      read[row].assign(ids.data_ptr<int64_t>(), ids.data_ptr<int64_t>() + ids.numel());
      bytes += ids.numel() * static_cast<int64_t>(a.keys[0][0].nbytes() + a.values[0][0].nbytes());
    } else {
      bytes += static_cast<int64_t>(k.nbytes() + v.nbytes());
    }
    k = k.to(at::kFloat).repeat_interleave(group, 0);
    v = v.to(at::kFloat).repeat_interleave(group, 0);
    Tensor scores = at::matmul(q, k.transpose(1, 2)) * a.scale;
    Tensor mask = hidden(a, row, length, keys, s.queries);
    if (mask.defined()) scores.masked_fill_(mask, -std::numeric_limits<float>::infinity());
    Tensor result = at::matmul(at::softmax(scores, -1), v);
    if (mask.defined()) result.masked_fill_(mask.all(1).view({1, length, 1}), nothing_seen);
    out.narrow(1, 0, length).copy_(result);
    if (!a.want_lse || a.lse.numel() == 0) continue;
    Tensor lse = at::logsumexp(scores, {-1}, true);
    if (a.tokens_first()) {
      a.lse.narrow(0, begin, length).copy_(lse.transpose(0, 1));
    } else {
      a.lse[row].narrow(1, 0, length).copy_(lse);
    }
  }
  Line("attention").number("queries", s.queries).number("keys", device_address(a.keys[0].data_ptr()))
      .number("bytes", bytes).lists("blocks", read).number("graph", running_graph());
}

}  // namespace software_acl

using namespace software_acl;

namespace {
using T = Tensor;
using I = int64_t;
using S = std::string;

bool any(std::initializer_list<T> tensors) {
  for (const T& each : tensors) {
    if (each.defined()) return true;
  }
  return false;
}

// The three versions differ in a few operands; `sink` and what follows it came with later ones.
#define COMMON_OPERANDS                                                                                            \
  T query, Tensors key, Tensors value, T pse, T mask, Ints lengths, Ints kv_lengths, T dq1, T q1, T dq2, T q2,     \
      T qo2, T aq, T aqo, T table, T qpad, T kvpad, T kaq, T kaqo, T vaq, T vaqo, T kprefix, T vprefix, Ints plen, \
      T qrope, T krope, T kraq
#define COMMON_ATTRIBUTES                                                                                         \
  I heads, double scale, I pre, I next, S layout, I kv_heads, I sparse, I precise, I block, I, bool lse_flag, I, I
#define GATHER(...)                                                                                                 \
  (Attention{query, key, value, mask, lengths, kv_lengths, table,                                                   \
             any({pse, dq1, q1, dq2, q2, qo2, aq, aqo, qpad, kvpad, kaq, kaqo, vaq, vaqo, kprefix, vprefix, qrope,  \
                  krope, kraq __VA_OPT__(, ) __VA_ARGS__}),                                                         \
             heads, kv_heads, scale, pre, next, layout, sparse, precise, block, lse_flag, out, lse})

#define FIA(NAME, EXTRA, PARAMETERS)                                           \
  OP_SIZED(NAME, 16 << 10, ([] PARAMETERS { check_attention(GATHER EXTRA); }), \
           [] PARAMETERS { run_attention(GATHER EXTRA); })                     \
  EXPORT_AS(NAME##GetMaxWorkspaceSize, &NAME##Op::entry::prepare_most)
Attention dense(T query, T key, T value, T mask, double scale, I pre, I next, I heads, const S& layout, I precise,
                I sparse, T out) {
  const I kv_heads = layout == "BNSD" ? key.size(1) : layout == "BSND" ? key.size(2) : heads;
  return {query, {key}, {value}, mask, Ints(), Ints(), T(), false, heads, kv_heads, scale, pre, next, layout,
          sparse, precise, 0, false, out, T(), true};
}
}  // namespace

OP_CHECKED(aclnnFlashAttentionScore,
           ([](T, T, T, T pse, T drop, T padding, T, Ints, double, double keep, I, I, I, S layout, I, I sparse, T, T, T,
               T) {
             const bool known = layout == "BNSD" || layout == "BSND" || layout == "BSH";
             if (!known || any({pse, drop, padding}) || keep != 1.0 || sparse > 4) {
               throw Refused(161002, "only plain attention, BNSD, BSND or BSH, is part of the software ACL");
             }
           }),
           [](T query, T key, T value, T, T, T, T mask, Ints, double scale, double, I pre, I next, I heads, S layout,
              I precise, I sparse, T, T, T, T out) {
             run_attention(dense(query, key, value, mask, scale, pre, next, heads, layout, precise, sparse, out));
           })
FIA(aclnnFusedInferAttentionScoreV3, (), (COMMON_OPERANDS, COMMON_ATTRIBUTES, T out, T lse))
FIA(aclnnFusedInferAttentionScoreV4, (dqq, sink), (COMMON_OPERANDS, T dqq, T sink, COMMON_ATTRIBUTES, I, T out, T lse))
FIA(aclnnFusedInferAttentionScoreV5, (dqq, sink, first, kv_first),
    (COMMON_OPERANDS, T dqq, T sink, T first, T kv_first, COMMON_ATTRIBUTES, I, I, T out, T lse))
