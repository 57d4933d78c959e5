/* The functions for AVX2, AVX-512 and AVX-512 BF16: 8, 16 and 32 columns a step. */

#define TARGET_AVX2 __attribute__((target("avx2,fma,f16c,popcnt")))
#define AVX512_FEATURES "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,avx512vnni,avx2,fma,f16c,popcnt"
#define TARGET_AVX512 __attribute__((target(AVX512_FEATURES)))
#define TARGET_BF16 __attribute__((target(AVX512_FEATURES ",avx512bf16")))

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
/* The n-th byte of a mask times 32, the place of its entry in `high_bytes` and `high_words`; it has as many bits as the byte. */
#define PLACE(w, n) ((n) ? (w) >> ((8 * (n) - 5) & 63) & 0x1fe0 : ((w) & 255) << 5)
#define AVX2_HIGH(table, data, place) _mm256_shuffle_epi8(data, _mm256_load_si256((const __m256i *)((const char *)(table) + (place))))
#define AVX2_BFLOAT16(v, p, w, n)                                                                      \
    do {                                                                                               \
        uint64_t place = PLACE(w, n);                                                                  \
        __m256i words = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(p)));            \
        v = _mm256_castsi256_ps(AVX2_HIGH(high_words, words, place));                                  \
        p += __builtin_popcountll(place);                                                              \
    } while (0)
#define AVX2_FLOAT16(v, p, w, n) (v = _mm256_cvtph_ps(AVX2_WORDS(p, BITS(w, n))), p += __builtin_popcountll(BITS(w, n)))
#define AVX2_FLOAT32(v, p, w, n)                                                                       \
    do {                                                                                               \
        __m128i low = AVX2_NUMBERS(p, BITS(w, n) & 15);                                                \
        p += __builtin_popcountll(BITS(w, n) & 15);                                                    \
        v = _mm256_castsi256_ps(_mm256_set_m128i(AVX2_NUMBERS(p, BITS(w, n) >> 4), low));              \
        p += __builtin_popcountll(BITS(w, n) >> 4);                                                    \
    } while (0)
#define AVX2_DENSE(v, p, w, n) (v = AVX2_WIDEN(_mm_loadu_si128((const __m128i *)(p))), p += 8, (void)(w))
#define AVX2_MULTIPLY(sum, v, x) _mm256_fmadd_ps(v, x, sum)
#define KEEP_REGISTER(x) __asm__("" : "+v"(x))
#define AVX2_PLACE_WORDS(to, p, w) \
    (_mm_storeu_si128((__m128i *)(to), AVX2_WORDS(p, (w) & 255)), p += __builtin_popcountll((w) & 255))
#define AVX2_PLACE_NUMBERS(to, p, w) \
    (_mm_storeu_si128((__m128i *)(to), AVX2_NUMBERS(p, (w) & 15)), p += __builtin_popcountll((w) & 15))
#define AVX2_INT8(v, p, w, n)                                                                          \
    do {                                                                                               \
        uint64_t place = PLACE(w, n);                                                                  \
        int64_t bytes;                                                                                 \
        memcpy(&bytes, p, 8);                                                                          \
        v = _mm256_cvtepi32_ps(AVX2_HIGH(high_bytes, _mm256_set1_epi64x(bytes), place));               \
        p += __builtin_popcountll(place);                                                              \
    } while (0)
static ALWAYS_INLINE TARGET_AVX2 void avx2_split(uint8_t *to, const uint8_t *p) {
    const __m256i high = _mm256_set1_epi8((char)0xf0);
    __m256i bytes = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i *)p), 0xd8);
    __m256i even = _mm256_and_si256(_mm256_slli_epi16(bytes, 4), high), odd = _mm256_and_si256(bytes, high);
    _mm256_storeu_si256((__m256i *)to, _mm256_unpacklo_epi8(even, odd));
    _mm256_storeu_si256((__m256i *)(to + 32), _mm256_unpackhi_epi8(even, odd));
}
#define AVX2_LOAD(p) _mm256_loadu_si256((const __m256i *)(p))

#define SET avx2
#define TARGET TARGET_AVX2
#define LANES 8
#define SUM __m256
#define ZERO _mm256_setzero_ps()
#define LOAD_X _mm256_loadu_ps
#define KEEP KEEP_REGISTER
#define MULTIPLY AVX2_MULTIPLY
#define TOTAL avx2_total
#define ADD _mm256_add_ps
#define ADD_SCALED(sum, v, factor) _mm256_fmadd_ps(v, _mm256_set1_ps(factor), sum)
#define ROWS(tokens) (tokens == 8 ? 1 : 2)
#define INTEGER_ROWS(tokens) (tokens == 8 ? 1 : 2)
#define STEP_FLOAT32 AVX2_FLOAT32
#define STEP_BFLOAT16 AVX2_BFLOAT16
#define STEP_FLOAT16 AVX2_FLOAT16
#define STEP_DENSE AVX2_DENSE
#define STEP_INT8 AVX2_INT8
#define UNIT_INT8 0x1p24f
#define SPLIT_INT4 avx2_split
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
static ALWAYS_INLINE TARGET_AVX512 __m512i expand_bytes(__m512i from, uint64_t bits) {
    __m512i to;
    EXPAND("vpexpandb", to, (__mmask64)bits, from);
    return to;
}

/* Pairs of numbers of 4 bits, the first 64 of them, as bytes; the upper half of a byte holds what follows. */
static ALWAYS_INLINE TARGET_AVX512 __m512i split_bytes(const void *p) {
    const __m512i shifts = _mm512_set1_epi64(0x1c1814100c080400);
    return _mm512_multishift_epi64_epi8(shifts, _mm512_cvtepu32_epi64(_mm256_loadu_si256((const __m256i *)p)));
}

static ALWAYS_INLINE TARGET_AVX512 void widen_bytes(__m512 v[4], __m512i bytes) {
    v[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm512_castsi512_si128(bytes)));
    v[1] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32(bytes, 1)));
    v[2] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32(bytes, 2)));
    v[3] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32(bytes, 3)));
}
#define EXPAND_INT8(p, w) expand_bytes(_mm512_loadu_si512(p), w)
/* Plus 8: removed weights become 8, too. */
#define EXPAND_INT4(p, w) \
    _mm512_ternarylogic_epi32(expand_bytes(split_bytes(p), w), _mm512_set1_epi8(15), _mm512_set1_epi8(8), 0x6a)
#define AVX512_WORD_INT8(v, p, w) (widen_bytes(v, EXPAND_INT8(p, w)), p += __builtin_popcountll(w))
#define AVX512_WORD_INT4(v, p, w) \
    (widen_bytes(v, _mm512_sub_epi8(EXPAND_INT4(p, w), _mm512_set1_epi8(8))), p += PAIRS(w))
#define AVX512_WIDEN(words) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16))
#define COUNT16(w, n) __builtin_popcountll((w) >> 16 * (n) & 0xffff)
#define AVX512_BFLOAT16_STEP(v, p, w, n) (v = AVX512_WIDEN(expand_words(p, (w) >> 16 * (n))), p += COUNT16(w, n))
#define AVX512_FLOAT16_STEP(v, p, w, n) (v = _mm512_cvtph_ps(expand_words(p, (w) >> 16 * (n))), p += COUNT16(w, n))
#define AVX512_FLOAT32_STEP(v, p, w, n) (v = _mm512_castsi512_ps(expand_numbers(p, (w) >> 16 * (n))), p += COUNT16(w, n))
#define AVX512_DENSE_STEP(v, p, w, n) (v = AVX512_WIDEN(_mm256_loadu_si256((const __m256i *)(p))), p += 16, (void)(w))
#define AVX512_MULTIPLY(sum, v, x) _mm512_fmadd_ps(v, x, sum)
#define AVX512_PLACE_WORDS(to, p, w) \
    (_mm512_storeu_si512(to, expand_wide(p, w)), p += __builtin_popcountll((w) & 0xffffffff))
#define AVX512_PLACE_NUMBERS(to, p, w) \
    (_mm512_storeu_si512(to, expand_numbers(p, w)), p += __builtin_popcountll((w) & 0xffff))

#define SET avx512
#define TARGET TARGET_AVX512
#define LANES 16
#define SUM __m512
#define ZERO _mm512_setzero_ps()
#define LOAD_X _mm512_loadu_ps
#define KEEP KEEP_REGISTER
#define MULTIPLY AVX512_MULTIPLY
#define TOTAL _mm512_reduce_add_ps
#define ADD _mm512_add_ps
#define ADD_SCALED(sum, v, factor) _mm512_fmadd_ps(v, _mm512_set1_ps(factor), sum)
#define ROWS(tokens) (tokens == 8 ? 2 : 4)
#define INTEGER_ROWS(tokens) 1
#define STEP_FLOAT32 AVX512_FLOAT32_STEP
#define STEP_BFLOAT16 AVX512_BFLOAT16_STEP
#define STEP_FLOAT16 AVX512_FLOAT16_STEP
#define STEP_DENSE AVX512_DENSE_STEP
#define UNIT_INT8 1.0f
#define WORD_INT8 AVX512_WORD_INT8
#define WORD_INT4 AVX512_WORD_INT4
#include "kernels_types.h"
DECODE(decode_words_avx512, TARGET_AVX512, uint16_t, 32, AVX512_PLACE_WORDS)
DECODE(decode_numbers_avx512, TARGET_AVX512, uint32_t, 16, AVX512_PLACE_NUMBERS)
READ_ROWS(read_avx512, TARGET_AVX512, __m512i, _mm512_loadu_si512, _mm512_or_si512)

#include "kernels_vnni.h"

/* Pairs of bfloat16 values and numbers are multiplied and added by one instruction, which takes subnormal numbers as zero. */
#define PAIRS_STEP(v, p, w, n) \
    (v = expand_wide(p, (w) >> 32 * (n)), p += __builtin_popcountll((w) >> 32 * (n) & 0xffffffff))
#define PAIRS_DENSE_STEP(v, p, w, n) (v = _mm512_loadu_si512(p), p += 32, (void)(w))
#define PAIRS_MULTIPLY(sum, v, x) _mm512_dpbf16_ps(sum, (__m512bh)(v), (__m512bh)(x))

#define NAME pairs
#define TARGET TARGET_BF16
#define VALUE uint16_t
#define X uint16_t
#define LANES 32
#define SUM __m512
#define VECTOR __m512i
#define STEP PAIRS_STEP
#define LOAD_X _mm512_loadu_si512
#define KEEP KEEP_REGISTER
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
