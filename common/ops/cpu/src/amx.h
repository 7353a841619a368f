// Matrix products on AMX tiles, for packed bfloat16 weights: where the CPU has them, ten times the rate of vectors.
//
// A packed panel is what a tile wants to see as its second operand: one row per step of two k, 16 channels of two values.
// Steps are padded to whole tiles. Rows of x are read where they are; a call with one row has tiles of one row. Sums are
// cut at the same k for every row, so a row's bits do not depend on the other rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define TANDEM_AMX 1
#endif

namespace tandem {

constexpr int64_t kTileRows = 16, kTileSteps = 16;  // a tile is 16 rows of 64 bytes: 16 steps, or 16 float32
constexpr int64_t kGroupRows = 2 * kTileRows;       // two tiles of rows by two of channels share every load
constexpr int64_t kLineBytes = 64;                  // of the caches

#if defined(TANDEM_AMX)

// The system hands tile registers out on request, once per process. Refused by old kernels and some hypervisors.
inline bool has_amx() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    static const bool is_granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return is_granted;
}

// The intrinsics do not tell the compiler what memory they read: nothing that was written before may wait until after.
inline void finish_writes() { __asm__ volatile("" ::: "memory"); }

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0-3 hold sums, 4 and 5 rows of x, 6 and 7 channels of the weight. Leaves the thread as it was: other libraries
// remember how they configured it.
class Tiles {
   public:
    Tiles() {
        _tile_storeconfig(&before_);
        finish_writes();
    }
    ~Tiles() {
        finish_writes();
        _tile_loadconfig(&before_);
    }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    void set_rows(int64_t num_rows) {
        if (num_rows == num_rows_) return;
        num_rows_ = num_rows;
        const uint8_t first = uint8_t(std::min(num_rows, kTileRows));
        const uint8_t second = num_rows > kTileRows ? uint8_t(num_rows - kTileRows) : 1;
        TileConfig config;
        for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = 64, config.rows[tile] = kTileRows;
        config.rows[0] = config.rows[1] = config.rows[4] = first;
        config.rows[2] = config.rows[3] = config.rows[5] = second;
        finish_writes();
        _tile_loadconfig(&config);
    }

   private:
    TileConfig before_;
    int64_t num_rows_ = -1;
};

// Rows of a product's output, which are about to be written: fetched while it computes, a few with every tile of k.
struct FetchRows {
    char* out = nullptr;    // null: none
    int64_t out_bytes = 0;  // between two rows
    int64_t rows = 0;       // per tile

    // Inlined by order: GCC takes a function that only fetches for one without effect and leaves its calls out.
    __attribute__((always_inline)) void step(int64_t tile) const {
        if (out == nullptr) return;
        const int64_t end = std::min((tile + 1) * rows, kGroupRows);
        for (int64_t row = tile * rows; row < end; row++) __builtin_prefetch(out + row * out_bytes, 1, 3);
    }
};

// Weights that come next, fetched the same way.
struct FetchWeight {
    const char* weight = nullptr;
    int64_t lines = 0;     // per tile
    bool is_next = false;  // they are this product's own: to the first-level cache; others to the second
    FetchRows rows;

    __attribute__((always_inline)) void step(int64_t tile) const {
        const char* from = weight + tile * lines * kLineBytes;
        if (is_next) {
            for (int64_t line = 0; line < lines; line++) __builtin_prefetch(from + line * kLineBytes, 0, 3);
        } else {
            for (int64_t line = 0; line < lines; line++) __builtin_prefetch(from + line * kLineBytes, 0, 2);
        }
        rows.step(tile);
    }
};

// sums [num_rows <= kGroupRows, 32] = (is_more: +=) x [num_rows, 32 * num_tiles] times a panel's steps from w on.
// kTwo: there are more than kTileRows rows. ahead.step(t): what else is to be done beside tile t.
template <bool kTwo, class Ahead>
inline void multiply_tiles(const char* x, int64_t row_bytes, const uint32_t* w, int64_t num_tiles, bool is_more,
                           const Ahead& ahead, float* sums) {
    constexpr int64_t kPanelWords = 32, kStepBytes = kPanelWords * 4, kTileWords = kTileSteps * kPanelWords;
    float* second = sums + kTileRows * kPanelWords;
    finish_writes();
    if (is_more) {
        _tile_loadd(0, sums, kStepBytes);
        _tile_loadd(1, sums + 16, kStepBytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
    }
    if constexpr (kTwo) {
        if (is_more) {
            _tile_loadd(2, second, kStepBytes);
            _tile_loadd(3, second + 16, kStepBytes);
        } else {
            _tile_zero(2);
            _tile_zero(3);
        }
        const int64_t half = kTileRows * row_bytes;
        _tile_loadd(4, x, row_bytes);
        _tile_loadd(6, w, kStepBytes);
        _tile_loadd(5, x + half, row_bytes);
        _tile_loadd(7, w + 16, kStepBytes);
        // A register is loaded anew right after its last product, while others go on: when the core's other thread uses
        // tiles as well, a load does not overtake the products before it, and nothing else hides it.
        for (int64_t t = 0; t + 1 < num_tiles; t++) {
            ahead.step(t);
            x += 64;
            w += kTileWords;
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(2, 5, 6);
            _tile_loadd(6, w, kStepBytes);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(4, x, row_bytes);
            _tile_dpbf16ps(3, 5, 7);
            _tile_loadd(5, x + half, row_bytes);
            _tile_loadd(7, w + 16, kStepBytes);
        }
        ahead.step(num_tiles - 1);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    } else {
        for (int64_t t = 0; t < num_tiles; t++, x += 64, w += kTileWords) {
            ahead.step(t);
            _tile_loadd(4, x, row_bytes);
            _tile_loadd(6, w, kStepBytes);
            _tile_loadd(7, w + 16, kStepBytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
    }
    _tile_stored(0, sums, kStepBytes);
    _tile_stored(1, sums + 16, kStepBytes);
    if constexpr (kTwo) {
        _tile_stored(2, second, kStepBytes);
        _tile_stored(3, second + 16, kStepBytes);
    }
}

// out [rows, 16 * Columns] = (is_more: +=) a [rows, words] times b [words, 16 * Columns], a word being two values and
// words 16 * num_tiles. Rows of a, b and out lie that many bytes apart. kTwo: there are more than kTileRows rows.
template <bool kTwo, int Columns>
inline void multiply_words(const float* a, int64_t a_bytes, const float* b, int64_t b_bytes, int64_t num_tiles,
                           bool is_more, float* out, int64_t out_bytes) {
    static_assert(Columns == 1 || Columns == 2);
    float* second = out + kTileRows * (out_bytes / 4);
    finish_writes();
    if (is_more) {
        _tile_loadd(0, out, out_bytes);
        if constexpr (Columns == 2) _tile_loadd(1, out + 16, out_bytes);
        if constexpr (kTwo) _tile_loadd(2, second, out_bytes);
        if constexpr (kTwo && Columns == 2) _tile_loadd(3, second + 16, out_bytes);
    } else {
        _tile_zero(0);
        if constexpr (Columns == 2) _tile_zero(1);
        if constexpr (kTwo) _tile_zero(2);
        if constexpr (kTwo && Columns == 2) _tile_zero(3);
    }
    for (int64_t t = 0; t < num_tiles; t++, a += kTileSteps, b += kTileSteps * (b_bytes / 4)) {
        _tile_loadd(4, a, a_bytes);
        _tile_loadd(6, b, b_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (Columns == 2) {
            _tile_loadd(7, b + 16, b_bytes);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (kTwo) {
            _tile_loadd(5, a + kTileRows * (a_bytes / 4), a_bytes);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (Columns == 2) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, out, out_bytes);
    if constexpr (Columns == 2) _tile_stored(1, out + 16, out_bytes);
    if constexpr (kTwo) _tile_stored(2, second, out_bytes);
    if constexpr (kTwo && Columns == 2) _tile_stored(3, second + 16, out_bytes);
}

#else
inline bool has_amx() { return false; }
#endif

}  // namespace tandem
