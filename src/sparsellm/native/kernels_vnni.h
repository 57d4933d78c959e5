/* Products of integers with AVX-512 VNNI, which multiplies bytes and adds four products to a number of 32 bits.

   The numbers x of a token become integers X = round(x 2^(22 - e)), where 2^e is above the largest |x| of the token, and X is cut
   into three signed bytes: X = 65536 a + 256 b + c. Products with each are summed without any rounding. x is therefore exact
   where it is bfloat16 and |x| >= 2^(e - 15), and otherwise off by 2^(e - 23) at most, as float32 numbers of size 2^e are.

   One factor of an instruction has no sign, so that the weights q are taken as q + 128, or q + 8 if they have 4 bits, also removed
   ones as 128 or 8; START subtracts 128 or 8 times the sum of x. Each of the 16 sums in a vector takes 4 products of 64
   columns. |q| <= 128 and |byte| <= 128, so that it is 4 * 128 * 128 * MAX_SCALE_WORDS = 2^30 at most. What it holds on the way may pass
   2^31 and come back, since it is computed modulo 2^32. */

enum { PLANES_BYTES = 3 * GROUP }; /* of 64 columns; also of a group's START */

typedef struct { __m512i a, b, c; } Planes;

static ALWAYS_INLINE TARGET_AVX512 Planes load_planes(const char *p) {
    return (Planes){_mm512_load_si512(p), _mm512_load_si512(p + 64), _mm512_load_si512(p + 128)};
}

static ALWAYS_INLINE TARGET_AVX512 Planes multiply_planes(Planes sums, __m512i v, const char *x) {
    Planes planes = load_planes(x);
    return (Planes){_mm512_dpbusd_epi32(sums.a, v, planes.a), _mm512_dpbusd_epi32(sums.b, v, planes.b),
                    _mm512_dpbusd_epi32(sums.c, v, planes.c)};
}

static ALWAYS_INLINE TARGET_AVX512 __m512 scale_planes(__m512 result, Planes sums, float scale) {
    const __m512 byte = _mm512_set1_ps(0x1p-8f);
    __m512 low = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums.c), byte, _mm512_cvtepi32_ps(sums.b));
    __m512 all = _mm512_fmadd_ps(low, byte, _mm512_cvtepi32_ps(sums.a));
    return _mm512_fmadd_ps(all, _mm512_set1_ps(scale), result);
}

static ALWAYS_INLINE TARGET_AVX512 __m512i load_bits(const Job *job, const char *x, int64_t column) {
    int64_t rest = job->columns - column;
    __mmask16 valid = rest >= 16 ? 0xffff : rest <= 0 ? 0 : (__mmask16)((1 << rest) - 1);
    if (job->dtype == FLOAT32) return _mm512_maskz_loadu_epi32(valid, x + 4 * column);
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(valid, x + 2 * column)), 16);
}

/* Prepare one token; 0 if a number is not finite. */
static TARGET_AVX512 int prepare_token(const Job *job, const char *x, char *to, char *starts, float *factor) {
    __m512i largest = _mm512_setzero_si512();
    for (int64_t c = 0; c < job->columns; c += 16)
        largest = _mm512_max_epi32(largest, _mm512_and_si512(load_bits(job, x, c), _mm512_set1_epi32(0x7fffffff)));
    int exponent = _mm512_reduce_max_epi32(largest) >> 23; /* that of 2^(e - 1), plus 127 */
    if (exponent == 255) return 0;
    if (exponent < 32) exponent = 32; /* the factors remain normal numbers */
    *factor = from_bits((uint32_t)(exponent - 5) << 23); /* 2^(e - 6), as scale_planes divides by 65536 */
    const __m512 inverse = _mm512_set1_ps(from_bits((uint32_t)(275 - exponent) << 23));
    const __m512i offset = _mm512_set1_epi8(job->value_dtype == INT4 ? 8 : -128), byte = _mm512_set1_epi32(128);
    for (int64_t group = 0, word = 0; group < job->scale_groups; group++, starts += PLANES_BYTES) {
        int64_t end = job->groups - word < job->scale_words ? job->groups : word + job->scale_words;
        const __m512i zero = _mm512_setzero_si512();
        Planes sums = {zero, zero, zero};
        for (; word < end; word++, to += PLANES_BYTES) {
            for (int n = 0; n < GROUP; n += 16) {
                __m512i c = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(load_bits(job, x, word * GROUP + n)), inverse));
                __m512i b = _mm512_srai_epi32(_mm512_add_epi32(c, byte), 8);
                __m512i a = _mm512_srai_epi32(_mm512_add_epi32(b, byte), 8);
                _mm_store_si128((__m128i *)(to + n), _mm512_cvtepi32_epi8(a));
                _mm_store_si128((__m128i *)(to + 64 + n), _mm512_cvtepi32_epi8(b));
                _mm_store_si128((__m128i *)(to + 128 + n), _mm512_cvtepi32_epi8(c));
            }
            sums = multiply_planes(sums, offset, to);
        }
        _mm512_store_si512(starts, _mm512_sub_epi32(zero, sums.a));
        _mm512_store_si512(starts + 64, _mm512_sub_epi32(zero, sums.b));
        _mm512_store_si512(starts + 128, _mm512_sub_epi32(zero, sums.c));
    }
    return 1;
}

/* Prepare all tokens at `to`, aligned to 64 bytes, and what START reads behind them. Returns 0 if a number is not finite. */
static int prepare_planes(Job *job, char *to, const char *x) {
    int64_t width = job->groups * PLANES_BYTES, starts_width = job->scale_groups * PLANES_BYTES, padded = padded_tokens(job->tokens);
    char *starts = to + padded * width;
    memset(to, 0, (size_t)(padded * (width + starts_width)));
    job->x = to, job->starts = starts;
    for (int64_t t = 0; t < job->tokens; t++, to += width, starts += starts_width, x += job->columns * (job->dtype == FLOAT32 ? 4 : 2))
        if (!prepare_token(job, x, to, starts, &job->factors[t])) return 0;
    return 1;
}

#define TARGET TARGET_AVX512
#define X_BYTES PLANES_BYTES
#define SUMS Planes
#define RESULT __m512
#define PARTS 1
#define VECTOR __m512i
#define COLUMNS const char *
#define LOAD(x, n) (x)
#define KEEP_PART(x) (void)(x)
#define START(job, t, group) load_planes((job)->starts + ((t) * (job)->scale_groups + (group)) * PLANES_BYTES)
#define MULTIPLY_PART(sums, v, x, chain) ((void)(chain), sums = multiply_planes(sums, v, x))
#define SCALE scale_planes
#define NOTHING _mm512_setzero_ps()
#define TOTAL_OF _mm512_reduce_add_ps
#define ROWS(tokens) ((tokens) == 1 ? 4 : (tokens) == 2 ? 2 : 1)

#define NAME int8_planes
#define PART(v, p, w, n) \
    (v = _mm512_xor_si512(EXPAND_INT8(p, w), _mm512_set1_epi8(-128)), p += __builtin_popcountll(w))
#include "kernels_integers.h"
#undef NAME
#undef PART

#define NAME int4_planes
#define PART(v, p, w, n) (v = EXPAND_INT4(p, w), p += PAIRS(w))
#include "kernels_integers.h"
#undef NAME
#undef PART

#undef TARGET
#undef X_BYTES
#undef SUMS
#undef RESULT
#undef PARTS
#undef VECTOR
#undef COLUMNS
#undef LOAD
#undef KEEP_PART
#undef START
#undef MULTIPLY_PART
#undef SCALE
#undef NOTHING
#undef TOTAL_OF
#undef ROWS
