/* The functions for NEON, which every 64-bit ARM processor has: 8 columns a step. */

typedef struct { float32x4_t low, high; } Pair;

static ALWAYS_INLINE Pair pair_add(Pair a, Pair b) { return (Pair){vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
static ALWAYS_INLINE Pair pair_add_scaled(Pair sum, Pair v, float factor) {
    return (Pair){vfmaq_n_f32(sum.low, v.low, factor), vfmaq_n_f32(sum.high, v.high, factor)};
}
static ALWAYS_INLINE float pair_total(Pair a) { return vaddvq_f32(vaddq_f32(a.low, a.high)); }
static ALWAYS_INLINE Pair pair_load(const float *p) { return (Pair){vld1q_f32(p), vld1q_f32(p + 4)}; }
static ALWAYS_INLINE Pair pair_multiply(Pair sum, Pair v, Pair x) {
    return (Pair){vfmaq_f32(sum.low, v.low, x.low), vfmaq_f32(sum.high, v.high, x.high)};
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
#define NEON_WORD_INT8(v, p, w)                                                                        \
    for (int n = 0; n < 8; n++) {                                                                      \
        int16x8_t words = vmovl_s8(vreinterpret_s8_u8(vtbl1_u8(vld1_u8(p), vld1_u8(byte_places[BITS(w, n)])))); \
        v[n].low = vcvtq_f32_s32(vmovl_s16(vget_low_s16(words)));                                      \
        v[n].high = vcvtq_f32_s32(vmovl_s16(vget_high_s16(words)));                                    \
        p += __builtin_popcount(BITS(w, n));                                                           \
    }
static ALWAYS_INLINE void neon_split(uint8_t *to, const uint8_t *p) {
    for (int i = 0; i < 32; i += 16) {
        uint8x16_t bytes = vld1q_u8(p + i);
        vst2q_u8(to + 2 * i, ((uint8x16x2_t){{vshlq_n_u8(bytes, 4), vandq_u8(bytes, vdupq_n_u8(0xf0))}}));
    }
}
#define NEON_LOAD(p) vld1q_u8((const uint8_t *)(p))

#define SET neon
#define TARGET
#define LANES 8
#define SUM Pair
#define ZERO ((Pair){vdupq_n_f32(0), vdupq_n_f32(0)})
#define LOAD_X pair_load
#define KEEP(x) (void)(x) /* instructions here read no memory, so that compilers keep it */
#define MULTIPLY pair_multiply
#define TOTAL pair_total
#define ADD pair_add
#define ADD_SCALED pair_add_scaled
#define ROWS(tokens) (tokens == 8 ? 1 : 2)
#define INTEGER_ROWS(tokens) 1
#define STEP_FLOAT32 NEON_FLOAT32
#define STEP_BFLOAT16 NEON_BFLOAT16
#define STEP_FLOAT16 NEON_FLOAT16
#define STEP_DENSE NEON_DENSE
#define WORD_INT8 NEON_WORD_INT8
#define UNIT_INT8 1.0f
#define SPLIT_INT4 neon_split
#include "kernels_types.h"
DECODE(decode_words_neon, , uint16_t, 8, NEON_PLACE_WORDS)
DECODE(decode_numbers_neon, , uint32_t, 4, NEON_PLACE_NUMBERS)
READ_ROWS(read_neon, , uint8x16_t, NEON_LOAD, vorrq_u8)
