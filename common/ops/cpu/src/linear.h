// Linear layers on packed weights: what a call says, how a weight lies in memory, how sums become outputs.
//
// A weight is packed once: panels of kPanel output channels, in each one machine word per channel and step of k (two
// bfloat16 or one float32). So a kernel reads one stream from front to back, for one row as for a thousand. It may read
// kLead words before the first one. Where a Book says so, a panel's tiles are compact instead (compact.h).
#pragma once

#include <algorithm>
#include <vector>

#include "amx.h"
#include "compact.h"
#include "step.h"

namespace tandem {

constexpr int kVectors = 2;                    // vectors across a panel
constexpr int64_t kPanel = kVectors * kLanes;  // output channels of a panel
constexpr int64_t kLead = 16;                  // words: one cache line, so that panels begin where lines do
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "of two values in a word the first is the low half");

struct Linear {
    const void* x;  // [num_rows, in]
    int64_t x_stride;
    void* out;  // [num_rows, out]
    int64_t out_stride;
    const uint32_t* weight;  // packed, [num_groups, panels, steps, kPanel]
    const Book* books;       // [num_groups], or null: no group's weight is compact
    int64_t dtype;           // of x, weight and out
    const void* bias;        // [out] or null
    int64_t bias_dtype;
    int64_t in_features, out_features;
    int64_t num_groups;    // weights one behind the other: 1, or the experts of a layer
    const int64_t* begin;  // [num_groups + 1] first row of each group
    int64_t num_threads;
};

struct Layout {  // of one packed weight
    int64_t steps, panels;
    Layout(int64_t dtype, int64_t in, int64_t out)
        : steps(dtype == kFloat32 ? in : (in + 1) / 2), panels((out + kPanel - 1) / kPanel) {
        if (dtype == kBFloat16 && has_amx()) steps = (steps + kTileSteps - 1) / kTileSteps * kTileSteps;
    }
    int64_t words() const { return panels * steps * kPanel; }
};

inline void store_panel(const Linear& args, int64_t row, int64_t channel, const vf* sums) {
    const int64_t count = std::min(kPanel, args.out_features - channel);
    alignas(64) float bias[kPanel], out[kPanel];
    if (args.bias != nullptr) load_row(bias, args.bias, args.bias_dtype, channel, count);
    for (int v = 0; v * kLanes < count; v++) {
        store(out + v * kLanes, args.bias == nullptr ? sums[v] : sums[v] + load(bias + v * kLanes));
    }
    store_row(args.out, args.dtype, row * args.out_stride + channel, out, count);
}

// On tiles: dtype is bfloat16 and has_amx().
void run_tiles(const Linear& args);

}  // namespace tandem
