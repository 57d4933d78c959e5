/* The functions for NEON, which every 64-bit Arm processor has: 8 columns a step. */

#undef MASK
#undef READ_MASK
#undef COUNT_BITS

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

/* Byte indices of 8 numbers, of which the second four may lie in two vectors; and two entries whose sum has those of 16 bytes, as the
   first one adds its bits to the indices of the second. 0x80 to 0x88 make a zero. */
static uint8_t low_numbers[256][16], high_numbers[256][16], first_bytes[256][16], second_bytes[256][16];

__attribute__((constructor)) static void fill_neon_tables(void) {
    for (int mask = 0; mask < 256; mask++) {
        memset(low_numbers[mask], 0x80, 16), memset(high_numbers[mask], 0x80, 16);
        memset(first_bytes[mask], 0x80, 8), memset(first_bytes[mask] + 8, __builtin_popcount((unsigned)mask), 8);
        memset(second_bytes[mask] + 8, 0x80, 8);
        for (int column = 0, kept = 0; column < 8; column++) {
            if (!(mask >> column & 1)) continue;
            uint8_t *number = (column < 4 ? low_numbers : high_numbers)[mask] + column % 4 * 4;
            for (int byte = 0; byte < 4; byte++) number[byte] = (uint8_t)(4 * kept + byte);
            first_bytes[mask][column] = second_bytes[mask][8 + column] = (uint8_t)kept++;
        }
    }
}

/* A mask of 64 columns; byte n of `ends` is the number of bits of its bytes 0 to n. Steps read their places from it and leave p where
   the 64 columns begin, so that none waits for another; the last one moves p. */
typedef struct { uint64_t bits, ends; } CountedMask;

static ALWAYS_INLINE CountedMask count_mask(uint64_t bits) {
    uint64_t ends = vget_lane_u64(vreinterpret_u64_u8(vcnt_u8(vcreate_u8(bits))), 0) * 0x0101010101010101u;
    __asm__("" : "+r"(ends)); /* otherwise clang multiplies once for each byte, by fewer bits */
    return (CountedMask){bits, ends};
}
static ALWAYS_INLINE CountedMask read_counted(const uint8_t *p) { return count_mask(read_mask(p)); }
#define MASK CountedMask
#define READ_MASK read_counted
#define COUNT_BITS(w) ((w).ends >> 56)

/* Bytes from p to the values of the n-th byte of a mask, 1 << shift bytes each. One shift does both: below a byte of `ends` lie the
   upper bits of the one before, which are zero. */
static ALWAYS_INLINE uint64_t bytes_before(CountedMask w, int n, int shift) {
    const int low = 8 * n - 8 - shift;
    return n == 0 ? 0 : (low < 0 ? w.ends << -low : w.ends >> low) & 255;
}
#define BITS(w, n) ((w).bits >> 8 * (n) & 255)
#define MOVE(p, w, n) (p += (n) == 7 ? COUNT_BITS(w) : 0)

static ALWAYS_INLINE uint8x16_t pair_words(const uint16_t *p, CountedMask w, int n) {
    uint8x16_t words = vld1q_u8((const uint8_t *)p + bytes_before(w, n, 1));
    return vqtbl1q_u8(words, vld1q_u8(word_places[BITS(w, n)]));
}
static ALWAYS_INLINE Pair pair_numbers(const void *p, CountedMask w, int n) {
    const uint8_t *from = (const uint8_t *)p + bytes_before(w, n, 2);
    uint8x16x2_t numbers = {{vld1q_u8(from), vld1q_u8(from + 16)}};
    return (Pair){vreinterpretq_f32_u8(vqtbl1q_u8(numbers.val[0], vld1q_u8(low_numbers[BITS(w, n)]))),
                  vreinterpretq_f32_u8(vqtbl2q_u8(numbers, vld1q_u8(high_numbers[BITS(w, n)])))};
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
/* The 8 integers in the upper bytes of 32 bits, from where the conversion divides by 2^24. */
static ALWAYS_INLINE Pair pair_int8(const uint8_t *p, CountedMask w, int n) {
    const uint8_t *places = high_bytes[BITS(w, n)];
    uint8x16_t bytes = vcombine_u8(vld1_u8(p + bytes_before(w, n, 0)), vdup_n_u8(0));
    return (Pair){vcvtq_n_f32_s32(vreinterpretq_s32_u8(vqtbl1q_u8(bytes, vld1q_u8(places))), 24),
                  vcvtq_n_f32_s32(vreinterpretq_s32_u8(vqtbl1q_u8(bytes, vld1q_u8(places + 16))), 24)};
}
#define NEON_BFLOAT16(v, p, w, n) (v = pair_bfloat16(pair_words(p, w, n)), MOVE(p, w, n))
#define NEON_FLOAT16(v, p, w, n) (v = pair_float16(pair_words(p, w, n)), MOVE(p, w, n))
#define NEON_FLOAT32(v, p, w, n) (v = pair_numbers(p, w, n), MOVE(p, w, n))
#define NEON_DENSE(v, p, w, n) (v = pair_bfloat16(vld1q_u8((const uint8_t *)(p))), p += 8, (void)(w))
#define NEON_INT8(v, p, w, n) (v = pair_int8(p, w, n), MOVE(p, w, n))
#define NEON_PLACE_WORDS(to, p, w)                                                                     \
    do {                                                                                               \
        CountedMask counted = count_mask(w);                                                           \
        UNROLL for (int i = 0; i < 8; i++) vst1q_u8((uint8_t *)((to) + 8 * i), pair_words(p, counted, i)); \
        p += COUNT_BITS(counted);                                                                      \
    } while (0)
#define NEON_PLACE_NUMBERS(to, p, w)                                                                   \
    do {                                                                                               \
        CountedMask counted = count_mask(w);                                                           \
        UNROLL                                                                                         \
        for (int i = 0; i < 8; i++) {                                                                  \
            Pair numbers = pair_numbers(p, counted, i);                                                \
            memcpy((to) + 8 * i, &numbers, sizeof numbers);                                            \
        }                                                                                              \
        p += COUNT_BITS(counted);                                                                      \
    } while (0)
static ALWAYS_INLINE void neon_split(uint8_t *to, const uint8_t *p) {
    UNROLL
    for (int i = 0; i < 32; i += 16) {
        uint8x16_t bytes = vld1q_u8(p + i);
        uint8x16_t even = vshlq_n_u8(bytes, 4), odd = vandq_u8(bytes, vdupq_n_u8(0xf0));
        vst2q_u8(to + 2 * i, ((uint8x16x2_t){{even, odd}}));
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
#define ROWS(tokens) (tokens == 1 ? 4 : tokens == 8 ? 1 : 2)
#define INTEGER_ROWS(tokens) (tokens == 1 ? 4 : tokens == 8 ? 1 : 2)
#define STEP_FLOAT32 NEON_FLOAT32
#define STEP_BFLOAT16 NEON_BFLOAT16
#define STEP_FLOAT16 NEON_FLOAT16
#define STEP_DENSE NEON_DENSE
#define STEP_INT8 NEON_INT8
#define UNIT_INT8 1.0f
#define SPLIT_INT4 neon_split
#include "kernels_types.h"
DECODE(decode_words_neon, , uint16_t, GROUP, NEON_PLACE_WORDS)
DECODE(decode_numbers_neon, , uint32_t, GROUP, NEON_PLACE_NUMBERS)
READ_ROWS(read_neon, , uint8x16_t, NEON_LOAD, vorrq_u8)

#include "kernels_dotprod.h"
