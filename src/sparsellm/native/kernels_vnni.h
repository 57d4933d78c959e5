/* Products of integers with AVX-512 VNNI: see kernels_planes.h.

   One factor of an instruction has no sign, so that the weights q are taken as q + 128, or q + 8 if they have 4 bits, also removed
   ones as 128 or 8; sums begin with -128 or -8 times the sum of x. */

static ALWAYS_INLINE TARGET_AVX512 __m512i load_bits(const Job *job, const char *x, int64_t column) {
    int64_t rest = job->columns - column;
    __mmask16 valid = rest >= 16 ? 0xffff : rest <= 0 ? 0 : (__mmask16)((1 << rest) - 1);
    if (job->dtype == FLOAT32) return _mm512_maskz_loadu_epi32(valid, x + 4 * column);
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(valid, x + 2 * column)), 16);
}

static ALWAYS_INLINE TARGET_AVX512 int vnni_largest(const Job *job, const char *x) {
    __m512i largest = _mm512_setzero_si512();
    for (int64_t c = 0; c < job->columns; c += 16)
        largest = _mm512_max_epi32(largest, _mm512_and_si512(load_bits(job, x, c), _mm512_set1_epi32(0x7fffffff)));
    return _mm512_reduce_max_epi32(largest);
}

static ALWAYS_INLINE TARGET_AVX512 void vnni_cut(const Job *job, const char *x, int64_t column, float inverse, char *to) {
    const __m512i byte = _mm512_set1_epi32(128);
    for (int n = 0; n < GROUP; n += 16) {
        __m512 numbers = _mm512_mul_ps(_mm512_castsi512_ps(load_bits(job, x, column + n)), _mm512_set1_ps(inverse));
        __m512i c = _mm512_cvtps_epi32(numbers);
        __m512i b = _mm512_srai_epi32(_mm512_add_epi32(c, byte), 8);
        __m512i a = _mm512_srai_epi32(_mm512_add_epi32(b, byte), 8);
        _mm_store_si128((__m128i *)(to + n), _mm512_cvtepi32_epi8(a));
        _mm_store_si128((__m128i *)(to + 64 + n), _mm512_cvtepi32_epi8(b));
        _mm_store_si128((__m128i *)(to + 128 + n), _mm512_cvtepi32_epi8(c));
    }
}

static ALWAYS_INLINE TARGET_AVX512 void vnni_begin(const Job *job, const char *planes, const char *end, char *starts) {
    const __m512i offset = _mm512_set1_epi8(job->value_dtype == INT4 ? 8 : -128), zero = _mm512_setzero_si512();
    __m512i a = zero, b = zero, c = zero;
    for (const char *p = planes; p < end; p += 3 * GROUP) {
        a = _mm512_dpbusd_epi32(a, offset, _mm512_load_si512(p));
        b = _mm512_dpbusd_epi32(b, offset, _mm512_load_si512(p + GROUP));
        c = _mm512_dpbusd_epi32(c, offset, _mm512_load_si512(p + 2 * GROUP));
    }
    _mm512_store_si512(starts, _mm512_sub_epi32(zero, a));
    _mm512_store_si512(starts + GROUP, _mm512_sub_epi32(zero, b));
    _mm512_store_si512(starts + 2 * GROUP, _mm512_sub_epi32(zero, c));
}

#define TARGET TARGET_AVX512
#define INTEGERS __m512i
#define RESULT __m512
#define LOAD_BYTES _mm512_load_si512
#define MULTIPLY_BYTES _mm512_dpbusd_epi32
#define TO_FLOATS _mm512_cvtepi32_ps
#define ADD_SCALED(result, sum, factor) _mm512_fmadd_ps(sum, _mm512_set1_ps(factor), result)
#define LARGEST vnni_largest
#define CUT vnni_cut
#define BEGIN vnni_begin
#define UNIT_INT4 1
#define PART_INT8(v, p, w, n) \
    (v = _mm512_xor_si512(EXPAND_INT8(p, w), _mm512_set1_epi8(-128)), p += __builtin_popcountll(w))
#define PART_INT4(v, p, w, n) (v = EXPAND_INT4(p, w), p += PAIRS(w))
#define PARTS 1
#define COLUMNS const char *
#define LOAD(x, n) (x)
#define START(job, t, group) load_planes((job)->starts + ((t) * (job)->scale_groups + (group)) * PLANES_BYTES)
#define MULTIPLY_PART(sums, v, x, chain) ((void)(chain), sums = multiply_planes(sums, v, load_planes(x)))
#define NOTHING _mm512_setzero_ps()
#define TOTAL_OF _mm512_reduce_add_ps
#define ROWS(tokens) ((tokens) == 1 ? 4 : (tokens) == 2 ? 2 : 1)
#include "kernels_planes.h"
