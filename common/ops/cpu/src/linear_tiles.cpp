// Linear layers on AMX tiles, for any number of rows, plain or compact weights.
//
// Rows are taken in chunks that stay in the L2 cache, of these groups of kGroupRows. A panel passes in blocks of tiles
// that stay in the L1 cache while all groups of a chunk are multiplied with them. What comes next from memory is fetched,
// or expanded, beside the products.
#include "linear.h"

namespace tandem {

#if defined(TANDEM_AMX)
namespace {

// Tiles of a block, at most: a block stays in the L1 cache as far as it fits. Best of 8 to 56.
constexpr int64_t kMaxBlockTiles = 24;
constexpr int64_t kFewGroups = 4;  // up to so many groups of rows, blocks of compact weights have 4 tiles
constexpr int64_t kTileLines = kTileSteps * kPanel * 4 / kLineBytes;
// Bytes and rows of x in a chunk, at most: every panel reads them, so they should stay in the L2 cache.
constexpr int64_t kCachedBytes = 768 << 10;
constexpr int64_t kMaxCachedRows = 512;
// How far ahead of its use a weight is fetched, in words, to the first-level cache. Best of 1024 to 8192 on a Sapphire
// Rapids: 8.5 GB/s, where 2048 words ahead to the second level got 8.0 and a plain read gives 9.1.
constexpr int64_t kTileFarWords = 4096;
// Panels of a task, at least; tasks for each thread, about: a slow thread leaves some of its own to the others.
constexpr int64_t kTaskPanels = 4, kThreadTasks = 4;

struct alignas(kLineBytes) Line {
    float values[kLineBytes / 4];
};

struct Chunk {  // rows [first, last), all of one weight
    int64_t weight, first, last;
};

// sums [count, kPanel] -> rows [first, first + count) of the output.
void store_rows(const Linear& args, int64_t first, int64_t count, int64_t channel, const float* sums) {
    const bool is_plain = args.bias == nullptr && channel + kPanel <= args.out_features;
    uint16_t* out = static_cast<uint16_t*>(args.out) + first * args.out_stride + channel;
    for (int64_t r = 0; r < count; r++, sums += kPanel, out += args.out_stride) {
        const vf both[kVectors] = {load(sums), load(sums + kLanes)};
        if (is_plain) {
            const auto rounded = _mm512_cvtne2ps_pbh((__m512)both[1], (__m512)both[0]);
            std::memcpy(out, &rounded, sizeof rounded);
        } else {
            store_panel(args, first + r, channel, both);
        }
    }
}

// How panels [first, last) of a weight are cut into blocks, for so many groups of rows.
struct Blocks {
    const uint32_t* weight;  // of the chunk's rows
    int64_t panels, panel_tiles;
    int64_t first, last;
    int64_t num_groups;
    int64_t per_panel, size;

    Blocks(const uint32_t* weight, const Layout& layout, int64_t first, int64_t last, int64_t num_groups, int64_t limit)
        : weight(weight), panels(layout.panels), panel_tiles(layout.steps / kTileSteps), first(first), last(last),
          num_groups(num_groups), per_panel((panel_tiles + limit - 1) / limit),
          size((panel_tiles + per_panel - 1) / per_panel) {}

    int64_t begin(int64_t block) const { return std::min(block * size, panel_tiles); }  // in tiles of the panel
    int64_t count(int64_t block) const { return begin(block + 1) - begin(block); }
};

// Where a product finds a block, and what it does beside. open() is called for every block in order.
class PlainWeight {
   public:
    static int64_t max_tiles(int64_t) { return kMaxBlockTiles; }

    PlainWeight(const Linear&, const Chunk&, const Blocks& blocks) : blocks_(blocks) {}

    const uint32_t* open(int64_t panel, int64_t block) {
        block_ = blocks_.weight + (panel * blocks_.panel_tiles + blocks_.begin(block)) * kTileSteps * kPanel;
        tiles_ = blocks_.count(block);
        return block_;
    }

    FetchWeight beside(int64_t group, const FetchRows& rows) const {
        const char* block = reinterpret_cast<const char*>(block_);
        if (blocks_.num_groups == 1) return {block + kTileFarWords * 4, kTileLines, true, rows};
        // Each group fetches its part of the block, or panel, that follows.
        const int64_t lines = (kTileLines + blocks_.num_groups - 1) / blocks_.num_groups;
        return {block + (tiles_ * kTileLines + group * tiles_ * lines) * kLineBytes, lines, false, rows};
    }

   private:
    const Blocks& blocks_;
    const uint32_t* block_ = nullptr;
    int64_t tiles_ = 0;
};

class CompactWeight {
   public:
    // With few rows to multiply, expanding is most of the work: what is written should not leave the L1 cache.
    static int64_t max_tiles(int64_t num_groups) {
        return num_groups == 1 ? 2 : num_groups <= kFewGroups ? 4 : kMaxBlockTiles;
    }

    CompactWeight(const Linear& args, const Chunk& chunk, const Blocks& blocks)
        : blocks_(blocks), expander_(args.books[chunk.weight]) {
        constexpr int64_t block_lines = kMaxBlockTiles * kTileLines;
        static thread_local std::vector<Line> memory(2 * block_lines);
        for (int i = 0; i < 2; i++) expanded_[i] = reinterpret_cast<uint16_t*>(memory.data() + i * block_lines);
        expansion(blocks.first, 0, expanded_[0]).run(expander_, 0, blocks.count(0) * kTileSteps);
    }

    const uint32_t* open(int64_t panel, int64_t block) {
        if (block == 0) {
            exceptions_ = exceptions(blocks_.weight, blocks_.panels, blocks_.panel_tiles, panel);
        }
        uint16_t* here = expanded_[num_opened_++ % 2];
        const int64_t begin = blocks_.begin(block), end = blocks_.begin(block + 1);
        exceptions_.patch(here, begin * kTileValues, end * kTileValues);
        const bool is_last = block + 1 == blocks_.per_panel;
        const int64_t next_panel = is_last ? panel + 1 : panel, next = is_last ? 0 : block + 1;
        next_ = expansion(next_panel, next, expanded_[num_opened_ % 2]);
        next_steps_ = next_panel < blocks_.last ? blocks_.count(next) * kTileSteps : 0;
        const int64_t products = blocks_.num_groups * (end - begin);
        steps_ = (next_steps_ + products - 1) / products;
        tiles_ = end - begin;
        return reinterpret_cast<const uint32_t*>(here);
    }

    ExpandNext beside(int64_t group, const FetchRows& rows) const {
        return {expander_, next_, group * tiles_ * steps_, next_steps_, steps_, rows};
    }

   private:
    Expansion expansion(int64_t panel, int64_t block, uint16_t* to) const {
        const int64_t tile = panel * blocks_.panel_tiles + blocks_.begin(block);
        const char* from = reinterpret_cast<const char*>(blocks_.weight) + tile * kCompactTileBytes;
        return {from, to, blocks_.num_groups == 1};
    }

    const Blocks& blocks_;
    Expander expander_;
    uint16_t* expanded_[2];
    int64_t num_opened_ = 0;
    Exceptions exceptions_ = {};
    Expansion next_ = {};
    int64_t next_steps_ = 0, steps_ = 0, tiles_ = 0;
};

// Panels [first, last) for the rows of a chunk. totals: [rows, kPanel]
template <class Weight>
void run_panels(const Linear& args, const Layout& layout, Tiles& tiles, const Chunk& chunk, int64_t first, int64_t last,
                const char* x, int64_t row_bytes, float* totals) {
    const int64_t num_groups = (chunk.last - chunk.first + kGroupRows - 1) / kGroupRows;
    const int64_t limit = Weight::max_tiles(num_groups);
    const Blocks blocks(args.weight + chunk.weight * layout.words(), layout, first, last, num_groups, limit);
    const int64_t out_bytes = args.out_stride * 2;
    Weight weight(args, chunk, blocks);
    for (int64_t panel = first; panel < last; panel++) {
        char* out = static_cast<char*>(args.out) + panel * kPanel * 2;
        for (int64_t block = 0; block < blocks.per_panel; block++) {
            const uint32_t* w = weight.open(panel, block);
            const int64_t count_tiles = blocks.count(block);
            const bool is_last = block + 1 == blocks.per_panel;
            for (int64_t group = 0; group < num_groups; group++) {
                const int64_t row = chunk.first + group * kGroupRows, count = std::min(kGroupRows, chunk.last - row);
                FetchRows fetch;
                if (num_groups > 1 && is_last && count == kGroupRows) {
                    fetch = {out + row * out_bytes, out_bytes, (kGroupRows + count_tiles - 1) / count_tiles};
                }
                const auto beside = weight.beside(group, fetch);
                using Beside = std::remove_const_t<decltype(beside)>;
                const auto multiply = count > kTileRows ? multiply_tiles<true, Beside> : multiply_tiles<false, Beside>;
                tiles.set_rows(count);
                float* sums = totals + group * kGroupRows * kPanel;
                multiply(x + row * row_bytes + blocks.begin(block) * 64, row_bytes, w, count_tiles, block != 0, beside,
                         sums);
                if (is_last) store_rows(args, row, count, panel * kPanel, sums);
            }
        }
    }
}

}  // namespace

void run_tiles(const Linear& args) {
    const Layout layout(args.dtype, args.in_features, args.out_features);
    const int64_t num_rows = args.begin[args.num_groups];
    const char* x = static_cast<const char*>(args.x);
    int64_t row_bytes = args.x_stride * 2;
    if (args.in_features != 2 * layout.steps) {  // rows must be whole tiles wide
        const int64_t from_bytes = row_bytes;
        row_bytes = layout.steps * 4;
        char* padded_x = reinterpret_cast<char*>(scratch(num_rows * layout.steps));
        for (int64_t r = 0; r < num_rows; r++) {
            std::memcpy(padded_x + r * row_bytes, x + r * from_bytes, args.in_features * 2);
            std::memset(padded_x + r * row_bytes + args.in_features * 2, 0, row_bytes - args.in_features * 2);
        }
        x = padded_x;
    }
    const int64_t fitting = kCachedBytes / (layout.steps * 4) / kGroupRows * kGroupRows;
    const int64_t chunk_rows = std::min(std::max(fitting, kGroupRows), kMaxCachedRows);
    std::vector<Chunk> chunks;
    for (int64_t g = 0; g < args.num_groups; g++) {
        for (int64_t first = args.begin[g]; first < args.begin[g + 1]; first += chunk_rows) {
            chunks.push_back({g, first, std::min(first + chunk_rows, args.begin[g + 1])});
        }
    }
    const int64_t panels = std::max(kTaskPanels, layout.panels / (kThreadTasks * args.num_threads));
    const int64_t tasks = (layout.panels + panels - 1) / panels;
    parallel(tasks * int64_t(chunks.size()), args.num_threads, num_rows * args.in_features * args.out_features,
             [&](int64_t task) {
                 static thread_local std::vector<Line> totals;  // on whole lines: a tile's rows must not straddle two
                 const Chunk& chunk = chunks[task / tasks];
                 const int64_t first = task % tasks * panels, last = std::min(first + panels, layout.panels);
                 totals.resize(chunk_rows * kPanel * 4 / kLineBytes);
                 const bool is_compact = args.books != nullptr && args.books[chunk.weight].is_compact;
                 const auto run = is_compact ? run_panels<CompactWeight> : run_panels<PlainWeight>;
                 Tiles tiles;
                 run(args, layout, tiles, chunk, first, last, x, row_bytes, totals.data()->values);
             });
}
#endif

}  // namespace tandem
