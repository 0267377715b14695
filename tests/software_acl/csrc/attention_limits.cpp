// The documented limits of fused attention for the SoC that SOFTWARE_ACL_SOC names. The operator's meta kernel in
// torch_npu enforces none of them, so without these checks a test would only prove that the host protocol is right.
#include "attention.h"

namespace software_acl {
namespace {

constexpr int kParameter = 161002;  // refused by an operator's parameter check, before tiling

bool is_950() {
  static const bool yes = setting("SOFTWARE_ACL_SOC", "Ascend910B3").rfind("Ascend950", 0) == 0;
  return yes;
}

void require(bool condition, const std::string& what, int code = kTiling) {
  if (!condition) throw Refused(code, what);
}

std::string text(int64_t value) { return std::to_string(value); }

void check_operands(const Attention& a) {
  require(!a.has_unsupported, "quantised, rope, prefix and shift operands are not emulated", kParameter);
  require(a.keys.size() == 1 && a.values.size() == 1, "lists of keys and values are not emulated", kParameter);
  const auto type = a.query.scalar_type();
  static const bool allow_float = setting("SOFTWARE_ACL_FP32", "0") == "1";
  require(type == at::kHalf || type == at::kBFloat16 || (allow_float && type == at::kFloat),
          std::string("query has type ") + c10::toString(type) + ", only float16 and bfloat16 are supported",
          kParameter);
  const std::pair<const char*, const Tensor*> operands[] = {
      {"query", &a.query}, {"key", &a.keys[0]}, {"value", &a.values[0]}, {"atten_mask", &a.mask},
      {"block_table", &a.block_table}, {"attention_out", &a.out}};
  for (const auto& [name, tensor] : operands) {
    require(!tensor->defined() || tensor->is_contiguous(), std::string(name) + " is not contiguous", kParameter);
  }
  require(a.keys[0].scalar_type() == type && a.values[0].scalar_type() == type && a.out.scalar_type() == type,
          "query, key, value and attention_out differ in type", kParameter);
}

void check_sizes(const Attention& a, const Shape& s) {
  const int64_t kv = a.kv_count();
  require(a.heads > 0 && a.heads <= 256, "num_heads is " + text(a.heads) + ", must be in 1..256");
  require(a.heads == s.heads, "num_heads is " + text(a.heads) + ", query has " + text(s.heads));
  require(a.heads % kv == 0, "num_heads " + text(a.heads) + " is not a multiple of num_key_value_heads " + text(kv));
  require(is_950() || a.heads / kv <= 64, "num_heads / num_key_value_heads is above 64");
  require(s.batch > 0 && s.batch <= 65536, "batch is " + text(s.batch) + ", must be in 1..65536");
  require(s.head_size % 16 == 0 && s.head_size <= 512,
          "D is " + text(s.head_size) + ", must be a multiple of 16 and at most 512");
  if (!a.tokens_first() || is_950()) return;
  static const bool allow_256 = setting("SOFTWARE_ACL_TND_256", "0") == "1";
  require(s.head_size != 512, "D is 512, " + a.layout + ", q_rope and k_rope should not be null");
  const bool listed = s.head_size == 64 || s.head_size == 128 || s.head_size == 192;
  require(listed || (allow_256 && s.head_size == 256),
          a.layout + ": queryD(" + text(s.head_size) + ") must be 192/128/64");
}

void check_lengths(const Attention& a, const Shape& s) {
  if (a.tokens_first()) {
    require(a.query_lengths.has_value() && !a.query_lengths->empty(), a.layout + " needs actual_seq_lengths");
    int64_t before = 0;
    for (int64_t end : *a.query_lengths) {
      require(end >= before, a.layout + ": actual_seq_lengths must be cumulative");
      before = end;
    }
    const int64_t tokens = a.query.size(a.query_layout() == "TND" ? 0 : 1);
    require(before == tokens, "the last of actual_seq_lengths is " + text(before) + ", T is " + text(tokens));
    require(a.kv_lengths.has_value(), a.layout + " needs actual_seq_lengths_kv");
  } else if (a.query_lengths && s.queries > 1) {
    const auto count = static_cast<int64_t>(a.query_lengths->size());
    require(count == 1 || count >= s.batch,
            "actual_seq_lengths has " + text(count) + " values for batch " + text(s.batch));
    for (int64_t each : *a.query_lengths) {
      require(each >= 0 && each <= s.queries, "an actual_seq_lengths value is out of range");
    }
  }
  if (a.paged()) require(a.kv_lengths.has_value(), "actual_seq_lengths_kv is mandatory with a block table");
  if (!a.kv_lengths) return;
  const auto count = static_cast<int64_t>(a.kv_lengths->size());
  require(count >= s.batch || (count == 1 && !a.tokens_first()),
          "actual_seq_lengths_kv has " + text(count) + " values for batch " + text(s.batch));
  for (int64_t row = 0; row < s.batch; ++row) {
    const int64_t length = kv_length(a, row);
    require(length >= 0, "actual_seq_lengths_kv[" + text(row) + "] is " + text(length));
    require(s.queries > 1 || length <= 262144, "KV_S is above 262144");
  }
}

void check_paging(const Attention& a, const Shape& s) {
  if (!a.paged()) return;
  const Tensor &table = a.block_table, &key = a.keys[0];
  require(table.scalar_type() == at::kInt && table.dim() == 2, "block_table must be a 2-d int32 tensor");
  require(table.size(0) == s.batch, "block_table has " + text(table.size(0)) + " rows for batch " + text(s.batch));
  require(key.dim() == 3 || key.dim() == 4, "a paged cache has 3 or 4 dimensions");
  require(key.sizes() == a.values[0].sizes(), "key and value caches differ in shape");
  const bool flat = key.dim() == 3;  // (blocks, block_size, KV_N * D); else (blocks, KV_N, block_size, D)
  const bool blocked_allowed = a.query_layout() == "BNSD" || a.tokens_first();
  require(flat || blocked_allowed, a.layout + " takes a paged cache only as (blocks, block_size, H)");
  const int64_t size = flat ? key.size(1) : key.size(2);
  require(size == a.block_size, "block_size is " + text(a.block_size) + ", the cache has blocks of " + text(size));
  const int64_t width = a.kv_count() * s.head_size;
  if (flat) {
    require(key.size(2) == width,
            "the cache's last dimension is " + text(key.size(2)) + ", KV_N * D is " + text(width));
    require(width <= 65535, "KV_N * D is " + text(width) + ", at most 65535 in this cache layout");
  } else {
    require(key.size(1) == a.kv_count() && key.size(3) == s.head_size,
            "the cache's heads or head size differ from the query's");
  }
  const int64_t most = is_950() && s.queries > 1 ? 1024 : 512;
  require(size <= most && size % 16 == 0,
          "block_size " + text(size) + " must be a multiple of 16, at most " + text(most));
  require(s.queries == 1 || (size % 128 == 0), "block_size " + text(size) + " must be a multiple of 128 when Q_S > 1");
  for (int64_t row = 0; row < s.batch; ++row) {
    require(kv_length(a, row) <= table.size(1) * size, "block_table is too narrow: row " + text(row) + " has " +
                                                           text(kv_length(a, row)) + " tokens, room for " +
                                                           text(table.size(1) * size));
  }
}

void check_mask(const Attention& a, const Shape& s) {
  require(a.sparse_mode >= 0 && a.sparse_mode <= 4, "sparse_mode " + text(a.sparse_mode) + " is not supported");
  if (a.mask.defined()) {
    const auto type = a.mask.scalar_type();
    require(type == at::kBool || type == at::kChar || type == at::kByte, "atten_mask must be bool, int8 or uint8");
  }
  if (a.sparse_mode >= 2 && s.queries > 1) {
    require(a.mask.defined() && a.mask.size(-1) == 2048 && a.mask.size(-2) == 2048 && a.mask.numel() == 2048 * 2048,
            "sparse_mode " + text(a.sparse_mode) + " needs a 2048 x 2048 atten_mask");
  } else if (a.explicit_mask(s.queries)) {
    int64_t keys = a.paged() ? a.block_table.size(1) * a.block_size : 0;
    for (int64_t row = 0; row < s.batch; ++row) keys = std::max(keys, a.paged() ? 0 : kv_length(a, row));
    require(a.mask.size(-1) >= keys, "atten_mask covers " + text(a.mask.size(-1)) + " keys of " + text(keys));
    const int64_t rows = a.mask.dim() == 2 ? (s.queries == 1 ? 1 : a.mask.size(0)) : a.mask.size(-2);
    require(rows >= s.queries, "atten_mask covers " + text(rows) + " queries of " + text(s.queries));
    const int64_t batch = a.mask.dim() > 2 ? a.mask.size(0) : (s.queries == 1 ? a.mask.size(0) : 1);
    require(batch == 1 || batch == s.batch, "atten_mask is for a batch of " + text(batch));
  }
}

}  // namespace

void check_attention(const Attention& a) {
  check_operands(a);
  const Shape s = shape_of(a);
  check_sizes(a, s);
  check_lengths(a, s);
  check_paging(a, s);
  check_mask(a, s);
}

}  // namespace software_acl
