/* The functions of each instruction set: for kernels_tile.h one step of a row, and functions that decode rows and read memory. */

enum {
    FLOAT32_VALUES,  /* values of each type, numbered as the types are, times float32 x */
    BFLOAT16_VALUES,
    FLOAT16_VALUES,
    DENSE_VALUES,    /* a dense bfloat16 matrix times float32 x */
    BFLOAT16_PAIRS,  /* values and x in bfloat16, multiplied in pairs */
    DENSE_PAIRS,
    DECODE_WORDS,
    DECODE_NUMBERS,
    READ,
    FUNCTIONS
};

/* A function that decodes rows; PLACE(to, p, w) writes LANES values whose mask is the low bits of w, and moves p. */
#define DECODE(NAME, TARGET, VALUE, LANES, PLACE)                                                      \
    static TARGET void NAME(const Job *job, int64_t row, int64_t stop) {                               \
        for (; row < stop; row++) {                                                                    \
            const VALUE *p = (const VALUE *)job->values + job->row_starts[row];                        \
            VALUE *to = (VALUE *)job->out + row * job->columns;                                        \
            for (int64_t group = 0; group < job->groups; group++, to += GROUP) {                       \
                uint64_t w = read_mask(job->mask + (row * job->groups + group) * 8);                   \
                VALUE last[GROUP];                                                                     \
                int full = (group + 1) * GROUP <= job->columns;                                        \
                VALUE *block = full ? to : last;                                                       \
                PREFETCH(p);                                                                           \
                for (int n = 0; n < GROUP; n += LANES) PLACE(block + n, p, w >> n);                    \
                if (!full) memcpy(to, last, (size_t)(job->columns % GROUP) * sizeof(VALUE));           \
            }                                                                                          \
        }                                                                                              \
    }

/* A function that reads rows of PAGE bytes. */
#define READ_ROWS(NAME, TARGET, VECTOR, LOAD, OR)                                                      \
    static TARGET void NAME(const Job *job, int64_t row, int64_t stop) {                               \
        const char *p = (const char *)job->values + row * PAGE;                                        \
        const char *end = (const char *)job->values + stop * PAGE;                                     \
        const size_t size = sizeof(VECTOR);                                                            \
        VECTOR a = LOAD(p), b = a, c = a, d = a;                                                       \
        for (; p < end; p += 4 * size) {                                                               \
            for (size_t byte = 0; byte < 4 * size; byte += 64) PREFETCH(p + byte);                     \
            a = OR(a, LOAD(p)), b = OR(b, LOAD(p + size));                                             \
            c = OR(c, LOAD(p + 2 * size)), d = OR(d, LOAD(p + 3 * size));                              \
        }                                                                                              \
        a = OR(OR(a, b), OR(c, d));                                                                    \
        __asm__ volatile("" : : "m"(a)); /* the reads must happen */                                   \
    }

/* Portable: 8 columns a step, which compilers vectorise as far as the architecture's basic instructions go. */

typedef struct { float lane[8]; } Eight;

static ALWAYS_INLINE Eight eight_add(Eight a, Eight b) {
    for (int i = 0; i < 8; i++) a.lane[i] += b.lane[i];
    return a;
}

static ALWAYS_INLINE Eight eight_multiply(Eight sum, Eight v, const float *x) {
    for (int i = 0; i < 8; i++) sum.lane[i] += v.lane[i] * x[i];
    return sum;
}

static ALWAYS_INLINE float eight_total(Eight a) {
    return ((a.lane[0] + a.lane[4]) + (a.lane[2] + a.lane[6])) + ((a.lane[1] + a.lane[5]) + (a.lane[3] + a.lane[7]));
}

/* Without branches, which a processor would mispredict for every other weight. */
#define EIGHT_STEP(v, p, w, n, CONVERT)                                                                \
    for (int lane = 0; lane < 8; lane++) {                                                             \
        uint32_t kept = (uint32_t)((w) >> (8 * (n) + lane) & 1);                                       \
        v.lane[lane] = from_bits(to_bits(CONVERT(*(p))) & -kept);                                      \
        p += kept;                                                                                     \
    }
#define SAME(number) (number)
#define EIGHT_FLOAT32(v, p, w, n) EIGHT_STEP(v, p, w, n, SAME)
#define EIGHT_BFLOAT16(v, p, w, n) EIGHT_STEP(v, p, w, n, from_bfloat16)
#define EIGHT_FLOAT16(v, p, w, n) EIGHT_STEP(v, p, w, n, from_float16)
#define EIGHT_DENSE(v, p, w, n) EIGHT_STEP(v, p, ~(w), n, from_bfloat16) /* a dense matrix has w = 0 */
#define PLACE_ONE(to, p, w) (*(to) = *(p) * ((w) & 1), p += (w) & 1)
#define LOAD_WORD(p) (*(const uint64_t *)(const void *)(p))
#define OR_WORD(a, b) ((a) | (b))

#define SET portable
#define TARGET
#define LANES 8
#define SUM Eight
#define ZERO ((Eight){{0}})
#define MULTIPLY eight_multiply
#define TOTAL eight_total
#define ADD eight_add
#define ROWS(tokens) 1
#define STEP_FLOAT32 EIGHT_FLOAT32
#define STEP_BFLOAT16 EIGHT_BFLOAT16
#define STEP_FLOAT16 EIGHT_FLOAT16
#define STEP_DENSE EIGHT_DENSE
#include "kernels_types.h"
DECODE(decode_words_portable, , uint16_t, 1, PLACE_ONE)
DECODE(decode_numbers_portable, , uint32_t, 1, PLACE_ONE)
READ_ROWS(read_portable, , uint64_t, LOAD_WORD, OR_WORD)

#ifdef ARM

typedef struct { float32x4_t low, high; } Pair;

static ALWAYS_INLINE Pair pair_add(Pair a, Pair b) { return (Pair){vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
static ALWAYS_INLINE float pair_total(Pair a) { return vaddvq_f32(vaddq_f32(a.low, a.high)); }
static ALWAYS_INLINE Pair pair_multiply(Pair sum, Pair v, const float *x) {
    return (Pair){vfmaq_f32(sum.low, v.low, vld1q_f32(x)), vfmaq_f32(sum.high, v.high, vld1q_f32(x + 4))};
}
static ALWAYS_INLINE uint8x16_t pair_words(const uint16_t *p, uint64_t bits) {
    return vqtbl1q_u8(vld1q_u8((const uint8_t *)p), vld1q_u8(word_places[bits & 255]));
}
static ALWAYS_INLINE uint8x16_t pair_numbers(const void *p, uint64_t bits) {
    return vqtbl1q_u8(vld1q_u8((const uint8_t *)p), vld1q_u8(number_places[bits & 15]));
}
static ALWAYS_INLINE Pair pair_bfloat16(uint8x16_t bytes) {
    uint16x8_t words = vreinterpretq_u16_u8(bytes);
    return (Pair){vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(words), 16)),
                  vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(words), 16))};
}
static ALWAYS_INLINE Pair pair_float16(uint8x16_t bytes) {
    float16x8_t halves = vreinterpretq_f16_u8(bytes);
    return (Pair){vcvt_f32_f16(vget_low_f16(halves)), vcvt_f32_f16(vget_high_f16(halves))};
}
#define BITS(w, n) ((w) >> 8 * (n) & 255)
#define NEON_BFLOAT16(v, p, w, n) (v = pair_bfloat16(pair_words(p, BITS(w, n))), p += __builtin_popcount(BITS(w, n)))
#define NEON_FLOAT16(v, p, w, n) (v = pair_float16(pair_words(p, BITS(w, n))), p += __builtin_popcount(BITS(w, n)))
#define NEON_FLOAT32(v, p, w, n)                                                                       \
    (v.low = vreinterpretq_f32_u8(pair_numbers(p, BITS(w, n))), p += __builtin_popcount(BITS(w, n) & 15),  \
     v.high = vreinterpretq_f32_u8(pair_numbers(p, BITS(w, n) >> 4)), p += __builtin_popcount(BITS(w, n) >> 4))
#define NEON_DENSE(v, p, w, n) (v = pair_bfloat16(vld1q_u8((const uint8_t *)(p))), p += 8, (void)(w))
#define NEON_PLACE_WORDS(to, p, w) \
    (vst1q_u8((uint8_t *)(to), pair_words(p, w)), p += __builtin_popcount((w) & 255))
#define NEON_PLACE_NUMBERS(to, p, w) \
    (vst1q_u8((uint8_t *)(to), pair_numbers(p, w)), p += __builtin_popcount((w) & 15))
#define NEON_LOAD(p) vld1q_u8((const uint8_t *)(p))

#define SET neon
#define TARGET
#define LANES 8
#define SUM Pair
#define ZERO ((Pair){vdupq_n_f32(0), vdupq_n_f32(0)})
#define MULTIPLY pair_multiply
#define TOTAL pair_total
#define ADD pair_add
#define ROWS(tokens) (tokens == 8 ? 1 : 2)
#define STEP_FLOAT32 NEON_FLOAT32
#define STEP_BFLOAT16 NEON_BFLOAT16
#define STEP_FLOAT16 NEON_FLOAT16
#define STEP_DENSE NEON_DENSE
#include "kernels_types.h"
DECODE(decode_words_neon, , uint16_t, 8, NEON_PLACE_WORDS)
DECODE(decode_numbers_neon, , uint32_t, 4, NEON_PLACE_NUMBERS)
READ_ROWS(read_neon, , uint8x16_t, NEON_LOAD, vorrq_u8)

#endif
#ifdef X86

#define TARGET_AVX2 __attribute__((target("avx2,fma,f16c,popcnt")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,avx2,fma,f16c,popcnt")))
#define TARGET_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,avx512bf16,avx2,fma,f16c,popcnt")))

static ALWAYS_INLINE TARGET_AVX2 float avx2_total(__m256 a) {
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
#define AVX2_WORDS(p, bits) \
    _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(p)), _mm_loadu_si128((const __m128i *)word_places[bits]))
#define AVX2_NUMBERS(p, bits) \
    _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(p)), _mm_loadu_si128((const __m128i *)number_places[bits]))
#define AVX2_WIDEN(words) _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16))
#define BITS(w, n) ((w) >> 8 * (n) & 255)
#define AVX2_BFLOAT16(v, p, w, n) (v = AVX2_WIDEN(AVX2_WORDS(p, BITS(w, n))), p += __builtin_popcountll(BITS(w, n)))
#define AVX2_FLOAT16(v, p, w, n) (v = _mm256_cvtph_ps(AVX2_WORDS(p, BITS(w, n))), p += __builtin_popcountll(BITS(w, n)))
#define AVX2_FLOAT32(v, p, w, n)                                                                       \
    do {                                                                                               \
        __m128i low = AVX2_NUMBERS(p, BITS(w, n) & 15);                                                \
        p += __builtin_popcountll(BITS(w, n) & 15);                                                    \
        v = _mm256_castsi256_ps(_mm256_set_m128i(AVX2_NUMBERS(p, BITS(w, n) >> 4), low));              \
        p += __builtin_popcountll(BITS(w, n) >> 4);                                                    \
    } while (0)
#define AVX2_DENSE(v, p, w, n) (v = AVX2_WIDEN(_mm_loadu_si128((const __m128i *)(p))), p += 8, (void)(w))
#define AVX2_MULTIPLY(sum, v, x) _mm256_fmadd_ps(v, _mm256_loadu_ps(x), sum)
#define AVX2_PLACE_WORDS(to, p, w) \
    (_mm_storeu_si128((__m128i *)(to), AVX2_WORDS(p, (w) & 255)), p += __builtin_popcountll((w) & 255))
#define AVX2_PLACE_NUMBERS(to, p, w) \
    (_mm_storeu_si128((__m128i *)(to), AVX2_NUMBERS(p, (w) & 15)), p += __builtin_popcountll((w) & 15))
#define AVX2_LOAD(p) _mm256_loadu_si256((const __m256i *)(p))

#define SET avx2
#define TARGET TARGET_AVX2
#define LANES 8
#define SUM __m256
#define ZERO _mm256_setzero_ps()
#define MULTIPLY AVX2_MULTIPLY
#define TOTAL avx2_total
#define ADD _mm256_add_ps
#define ROWS(tokens) (tokens == 8 ? 1 : 2)
#define STEP_FLOAT32 AVX2_FLOAT32
#define STEP_BFLOAT16 AVX2_BFLOAT16
#define STEP_FLOAT16 AVX2_FLOAT16
#define STEP_DENSE AVX2_DENSE
#include "kernels_types.h"
DECODE(decode_words_avx2, TARGET_AVX2, uint16_t, 8, AVX2_PLACE_WORDS)
DECODE(decode_numbers_avx2, TARGET_AVX2, uint32_t, 4, AVX2_PLACE_NUMBERS)
READ_ROWS(read_avx2, TARGET_AVX2, __m256i, AVX2_LOAD, _mm256_or_si256)

/* The expanding instructions wait for their destination register as though they read it. A register that was just zeroed is
   ready: this halves their time on Zen 4. */
#define EXPAND(instruction, to, mask, from) \
    __asm__("vpxor %x0,%x0,%x0\n\t" instruction " %2,%0%{%1%}%{z%}" : "=&x"(to) : "Yk"(mask), "x"(from))

static ALWAYS_INLINE TARGET_AVX512 __m256i expand_words(const void *p, uint64_t bits) {
    __m256i to, from = _mm256_loadu_si256((const __m256i *)p);
    EXPAND("vpexpandw", to, (__mmask16)bits, from);
    return to;
}
static ALWAYS_INLINE TARGET_AVX512 __m512i expand_wide(const void *p, uint64_t bits) {
    __m512i to, from = _mm512_loadu_si512(p);
    EXPAND("vpexpandw", to, (__mmask32)bits, from);
    return to;
}
static ALWAYS_INLINE TARGET_AVX512 __m512i expand_numbers(const void *p, uint64_t bits) {
    __m512i to, from = _mm512_loadu_si512(p);
    EXPAND("vpexpandd", to, (__mmask16)bits, from);
    return to;
}
#define AVX512_WIDEN(words) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16))
#define COUNT16(w, n) __builtin_popcountll((w) >> 16 * (n) & 0xffff)
#define AVX512_BFLOAT16_STEP(v, p, w, n) (v = AVX512_WIDEN(expand_words(p, (w) >> 16 * (n))), p += COUNT16(w, n))
#define AVX512_FLOAT16_STEP(v, p, w, n) (v = _mm512_cvtph_ps(expand_words(p, (w) >> 16 * (n))), p += COUNT16(w, n))
#define AVX512_FLOAT32_STEP(v, p, w, n) (v = _mm512_castsi512_ps(expand_numbers(p, (w) >> 16 * (n))), p += COUNT16(w, n))
#define AVX512_DENSE_STEP(v, p, w, n) (v = AVX512_WIDEN(_mm256_loadu_si256((const __m256i *)(p))), p += 16, (void)(w))
#define AVX512_MULTIPLY(sum, v, x) _mm512_fmadd_ps(v, _mm512_loadu_ps(x), sum)
#define AVX512_PLACE_WORDS(to, p, w) \
    (_mm512_storeu_si512(to, expand_wide(p, w)), p += __builtin_popcountll((w) & 0xffffffff))
#define AVX512_PLACE_NUMBERS(to, p, w) \
    (_mm512_storeu_si512(to, expand_numbers(p, w)), p += __builtin_popcountll((w) & 0xffff))

#define SET avx512
#define TARGET TARGET_AVX512
#define LANES 16
#define SUM __m512
#define ZERO _mm512_setzero_ps()
#define MULTIPLY AVX512_MULTIPLY
#define TOTAL _mm512_reduce_add_ps
#define ADD _mm512_add_ps
#define ROWS(tokens) (tokens == 8 ? 2 : 4)
#define STEP_FLOAT32 AVX512_FLOAT32_STEP
#define STEP_BFLOAT16 AVX512_BFLOAT16_STEP
#define STEP_FLOAT16 AVX512_FLOAT16_STEP
#define STEP_DENSE AVX512_DENSE_STEP
#include "kernels_types.h"
DECODE(decode_words_avx512, TARGET_AVX512, uint16_t, 32, AVX512_PLACE_WORDS)
DECODE(decode_numbers_avx512, TARGET_AVX512, uint32_t, 16, AVX512_PLACE_NUMBERS)
READ_ROWS(read_avx512, TARGET_AVX512, __m512i, _mm512_loadu_si512, _mm512_or_si512)

/* Pairs of bfloat16 values and numbers are multiplied and added by one instruction, which takes subnormal numbers as zero. */
#define PAIRS_STEP(v, p, w, n) \
    (v = expand_wide(p, (w) >> 32 * (n)), p += __builtin_popcountll((w) >> 32 * (n) & 0xffffffff))
#define PAIRS_DENSE_STEP(v, p, w, n) (v = _mm512_loadu_si512(p), p += 32, (void)(w))
#define PAIRS_MULTIPLY(sum, v, x) _mm512_dpbf16_ps(sum, (__m512bh)(v), (__m512bh)_mm512_loadu_si512(x))

#define NAME pairs
#define TARGET TARGET_BF16
#define VALUE uint16_t
#define X uint16_t
#define LANES 32
#define SUM __m512
#define VECTOR __m512i
#define STEP PAIRS_STEP
#define MULTIPLY PAIRS_MULTIPLY
#define ZERO _mm512_setzero_ps()
#define TOTAL _mm512_reduce_add_ps
#define ADD _mm512_add_ps
#define ROWS(tokens) (tokens == 8 ? 2 : 4)
#define DENSE 0
#include "kernels_tile.h"
#undef NAME
#undef STEP
#undef DENSE
#define NAME dense_pairs
#define STEP PAIRS_DENSE_STEP
#define DENSE 1
#include "kernels_tile.h"

#endif

#define NUMBERED(SET)                                                                                                          \
    [FLOAT32_VALUES] = rows_float32_##SET, [BFLOAT16_VALUES] = rows_bfloat16_##SET, [FLOAT16_VALUES] = rows_float16_##SET,      \
    [DENSE_VALUES] = rows_dense_##SET, [DECODE_WORDS] = decode_words_##SET, [DECODE_NUMBERS] = decode_numbers_##SET,           \
    [READ] = read_##SET

static Function *const functions[INSTRUCTION_SETS][FUNCTIONS] = {
    [PORTABLE] = {NUMBERED(portable)},
#ifdef ARM
    [NEON] = {NUMBERED(neon)},
#endif
#ifdef X86
    [AVX2] = {NUMBERED(avx2)},
    [AVX512] = {NUMBERED(avx512)},
    [AVX512_BF16] = {NUMBERED(avx512), [BFLOAT16_PAIRS] = rows_pairs, [DENSE_PAIRS] = rows_dense_pairs},
#endif
};
