// Rows of this step into the blocks of their sequences.
#include "step.h"

namespace tandem {
namespace {

struct WriteArgs {
    const char* key;
    int64_t key_stride, key_head_stride;
    const char* value;
    int64_t value_stride, value_head_stride;
    char* k_pool;
    int64_t k_block_stride, k_row_stride, k_head_stride;
    char* v_pool;
    int64_t v_block_stride, v_row_stride, v_head_stride;
    int64_t item, kv_heads, head_size, head_size_v;
};

struct Rows {
    const char* from;
    int64_t row_stride, head_stride;
    char* pool;
    int64_t pool_block_stride, pool_row_stride, pool_head_stride, size;
};

void write_rows(const Rows& r, int64_t item, int64_t heads, const Step& step, int64_t segment) {
    const int64_t start = step.start[segment], end = start + step.rows(segment);
    const int64_t* table = step.table + step.table_begin[segment];
    int64_t position = start < step.write_from[segment] ? step.write_from[segment] : start;
    for (; position < end; position++) {
        const char* row = r.from + (step.begin[segment] + position - start) * r.row_stride * item;
        char* to = r.pool + (table[position / step.block_size] * r.pool_block_stride +
                             position % step.block_size * r.pool_row_stride) * item;
        for (int64_t h = 0; h < heads; h++)
            std::memcpy(to + h * r.pool_head_stride * item, row + h * r.head_stride * item, r.size * item);
    }
}

}  // namespace
}  // namespace tandem

extern "C" void tandem_write_kv(const int64_t* words, const int64_t* step_words) {
    using namespace tandem;
    const WriteArgs& a = *reinterpret_cast<const WriteArgs*>(words);
    const Step& step = *reinterpret_cast<const Step*>(step_words);
    const Rows key = {a.key, a.key_stride, a.key_head_stride, a.k_pool,
                      a.k_block_stride, a.k_row_stride, a.k_head_stride, a.head_size};
    const Rows value = {a.value, a.value_stride, a.value_head_stride, a.v_pool,
                        a.v_block_stride, a.v_row_stride, a.v_head_stride, a.head_size_v};
    for (int64_t s = 0; s < step.num_segments; s++) {
        write_rows(key, a.item, a.kv_heads, step, s);
        write_rows(value, a.item, a.kv_heads, step, s);
    }
}

