// Fused attention of the FIA family, reduced to the arguments this double understands.
#pragma once

#include "opapi.h"

namespace software_acl {

struct Attention {
  Tensor query;
  Tensors keys, values;
  Tensor mask;
  Ints query_lengths, kv_lengths;
  Tensor block_table;
  bool has_unsupported = false;  // quantisation, rope operands, shared prefix, position shift
  int64_t heads = 0, kv_heads = 0;
  double scale = 1.0;
  int64_t pre_tokens = 0, next_tokens = 0;
  std::string layout;
  int64_t sparse_mode = 0, inner_precise = 0, block_size = 0;
  bool want_lse = false;
  Tensor out, lse;
  bool training = false;  // the dense operator behind scaled_dot_product_attention, to which one query is not special

  std::string query_layout() const { return layout.substr(0, layout.find('_')); }
  std::string out_layout() const { return layout.substr(layout.find('_') + 1); }
  bool tokens_first() const { return query_layout() == "TND" || query_layout() == "NTD"; }
  bool paged() const { return block_table.defined(); }
  // Whether the mask says position by position what is hidden; the 2048 x 2048 triangle only switches a mode on.
  bool explicit_mask(int64_t queries) const {
    if (!mask.defined() || sparse_mode <= 1) return mask.defined();
    return queries == 1 && !(mask.size(-1) == 2048 && mask.size(-2) == 2048 && mask.numel() == 2048 * 2048);
  }
  int64_t kv_count() const { return kv_heads == 0 ? heads : kv_heads; }
};

struct Shape {
  int64_t batch, heads, queries, head_size;  // queries: of the longest request
};
Shape shape_of(const Attention& a);
int64_t query_begin(const Attention& a, int64_t row);  // of a request's tokens in a token-first layout
int64_t query_length(const Attention& a, int64_t row);
int64_t kv_length(const Attention& a, int64_t row);

void check_attention(const Attention& a);  // the documented limits; throws Refused
void run_attention(const Attention& a);

}  // namespace software_acl
