/* Sums of y x' over many tokens for factors in bfloat16, with products and short sums in float32 (bf16_gram.py).

   Plain C without Python and torch, called through ctypes. Needs AVX-512 BF16, whose instruction multiplies pairs of numbers, adds
   them to float32 sums and takes subnormal numbers as zero. SPARSELLM_PORTABLE leaves out what only some compilers know,
   SPARSELLM_NARROW leaves out AVX-512, and so all of it. */

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

enum {
    LANES = 16,      /* float32 numbers in a vector */
    WIDTH = 48,      /* columns in a block: 3 vectors */
    HEIGHT = 8,      /* rows of the result whose 3 sums each stay in registers; WIDTH is a multiple */
    CHAIN = 64,     /* pairs of tokens that are summed in float32 before they are added to float64 */
};

EXPORT int sparsellm_width(void) { return WIDTH; }

#if defined(__x86_64__) && !defined(SPARSELLM_PORTABLE) && !defined(SPARSELLM_NARROW)
#include <immintrin.h>

#include "processor.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))

EXPORT int sparsellm_bf16_supported(void) {
    return (processor_sets() & HAS_BF16) != 0;
}

static int64_t smaller(int64_t one, int64_t other) { return one < other ? one : other; }

/* Pairs of tokens; the last token of a unit of odd length has a zero beside it. */
static int64_t pairs_of(int64_t tokens, int64_t unit) { return tokens / unit * ((unit + 1) / 2) + (tokens % unit + 1) / 2; }

/* Copy x (tokens, columns) block by block of columns, (pairs, WIDTH), with the two numbers of a pair side by side. Of every `step`
   blocks the one at `first` is copied. */
TARGET
EXPORT void sparsellm_bf16_pack(const uint16_t *x, int64_t tokens, int64_t columns, int64_t unit, int64_t first, int64_t step,
                                uint32_t *packed) {
    int64_t blocks = (columns + WIDTH - 1) / WIDTH, pairs = pairs_of(tokens, unit);
    for (int64_t block = first; block < blocks; block += step) {
        uint32_t *to = packed + block * pairs * WIDTH;
        for (int64_t token = 0, next; token < tokens; token = next) {
            int64_t stop = smaller(tokens, token - token % unit + unit); /* of the unit */
            next = smaller(token + 2, stop);
            for (int64_t group = 0; group < WIDTH; group += LANES, to += LANES) {
                int64_t column = block * WIDTH + group, left = columns - column;
                __mmask16 mask = left >= LANES ? 0xffff : left > 0 ? (__mmask16)((1 << left) - 1) : 0;
                const uint16_t *from = x + token * columns + (mask ? column : 0);
                __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
                if (next == token + 2) {
                    __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from + columns));
                    low = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
                }
                _mm512_storeu_si512(to, low);
            }
        }
    }
}

#define ROWS(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
#define ZERO(i) __m512 a##i = _mm512_setzero_ps(), b##i = a##i, c##i = a##i;
#define MULTIPLY(i)                                                 \
    {                                                               \
        __m512bh row = (__m512bh)_mm512_set1_epi32((int)left[i]);   \
        a##i = _mm512_dpbf16_ps(a##i, row, x);                      \
        b##i = _mm512_dpbf16_ps(b##i, row, y);                      \
        c##i = _mm512_dpbf16_ps(c##i, row, z);                      \
    }
#define ADD(i)                                                      \
    if (masks[i]) {                                                 \
        add(sums[i], masks[i], a##i);                               \
        add(sums[i] + LANES, masks[i] >> LANES, b##i);              \
        add(sums[i] + 2 * LANES, masks[i] >> 2 * LANES, c##i);      \
    }

/* Add the numbers of a mask to float64 sums. */
TARGET
static inline void add(double *sums, uint64_t mask, __m512 numbers) {
    __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(numbers)), high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(numbers, 1));
    __mmask8 first = (__mmask8)mask, second = (__mmask8)(mask >> 8);
    _mm512_mask_storeu_pd(sums, first, _mm512_add_pd(_mm512_maskz_loadu_pd(first, sums), low));
    _mm512_mask_storeu_pd(sums + 8, second, _mm512_add_pd(_mm512_maskz_loadu_pd(second, sums + 8), high));
}

/* Add the products of HEIGHT columns with WIDTH others to float64 sums. */
TARGET
static void add_tile(const uint32_t *left, const uint32_t *right, int64_t pairs, double *const *sums, const uint64_t *masks) {
    ROWS(ZERO)
    for (int64_t pair = 0; pair < pairs; pair++, left += WIDTH, right += WIDTH) {
        __m512bh x = (__m512bh)_mm512_loadu_si512(right), y = (__m512bh)_mm512_loadu_si512(right + LANES),
                 z = (__m512bh)_mm512_loadu_si512(right + 2 * LANES);
        ROWS(MULTIPLY)
    }
    ROWS(ADD)
}

/* Add y x' over all tokens to sums, of which row i starts at rows[i] and has `columns` entries: packed `left` is y, with a column for each
   row, and packed `right` is x. If they are the same buffer, entries below the diagonal stay. The other arguments are those of
   sparsellm_bf16_pack; the blocks are those of `left`. */
TARGET
EXPORT void sparsellm_bf16_add_products(const uint32_t *left, int64_t outputs, const uint32_t *right, int64_t columns, int64_t tokens,
                                        int64_t unit, int64_t first, int64_t step, double *const *rows) {
    int64_t pairs = pairs_of(tokens, unit), whole = (unit + 1) / 2;
    int symmetric = left == right;
    for (int64_t one = first; one * WIDTH < outputs; one += step)
        for (int64_t other = symmetric ? one : 0; other * WIDTH < columns; other++) {
            double *sums[WIDTH];
            uint64_t masks[WIDTH];
            int64_t begin = other * WIDTH, width = smaller(columns - begin, WIDTH);
            for (int64_t i = 0; i < WIDTH; i++) {
                int64_t row = one * WIDTH + i;
                masks[i] = row < outputs ? (UINT64_C(1) << width) - 1 : 0;
                if (symmetric && one == other) masks[i] &= ~((UINT64_C(1) << i) - 1);
                sums[i] = row < outputs ? rows[row] + begin : NULL;
            }
            for (int64_t pair = 0, next; pair < pairs; pair = next) {
                next = smaller(smaller(pair + CHAIN, pair - pair % whole + whole), pairs);
                for (int64_t i = 0; i < WIDTH; i += HEIGHT)
                    add_tile(left + (one * pairs + pair) * WIDTH + i, right + (other * pairs + pair) * WIDTH, next - pair, sums + i, masks + i);
            }
        }
}

#else

EXPORT int sparsellm_bf16_supported(void) { return 0; }

/* Never called: the loader asks every build for every function. */
EXPORT void sparsellm_bf16_pack(void) {}
EXPORT void sparsellm_bf16_add_products(void) {}

#endif
