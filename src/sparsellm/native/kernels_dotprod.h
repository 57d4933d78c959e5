/* Products of integers with Arm's dot products, which multiply signed bytes: see kernels_planes.h. 16 columns a step.

   Numbers of 4 bits stay in the upper halves of bytes. */

#if defined(__ARM_FEATURE_DOTPROD) /* in all functions */
#define TARGET_DOTPROD
#elif defined(__clang__)
#define TARGET_DOTPROD __attribute__((target("dotprod")))
#else
#define TARGET_DOTPROD __attribute__((target("arch=armv8.2-a+dotprod")))
#endif

/* Instead of vdotq_s32, which clang before 16 has only where all functions are compiled for it. */
static ALWAYS_INLINE TARGET_DOTPROD int32x4_t dot(int32x4_t sum, int32x4_t v, int32x4_t x) {
    __asm__("sdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(v), "w"(x));
    return sum;
}

/* The n-th 16 integers of a word. */
static ALWAYS_INLINE int32x4_t place_bytes(const uint8_t *p, CountedMask w, int n) {
    uint8x16_t places = vaddq_u8(vld1q_u8(first_bytes[BITS(w, 2 * n)]), vld1q_u8(second_bytes[BITS(w, 2 * n + 1)]));
    return vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(p + bytes_before(w, 2 * n, 0)), places));
}

static ALWAYS_INLINE float32x4_t load_numbers(const Job *job, const char *x, int64_t column) {
    uint32_t bits[4] = {0};
    int64_t rest = job->columns - column;
    if (rest >= 4 && job->dtype == FLOAT32) return vld1q_f32((const float *)x + column);
    if (rest >= 4) return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)x + column), 16));
    for (int i = 0; i < rest; i++)
        bits[i] = job->dtype == FLOAT32 ? ((const uint32_t *)x)[column + i] : (uint32_t)((const uint16_t *)x)[column + i] << 16;
    return vreinterpretq_f32_u32(vld1q_u32(bits));
}

static ALWAYS_INLINE int dot_largest(const Job *job, const char *x) {
    int32x4_t largest = vdupq_n_s32(0);
    for (int64_t c = 0; c < job->columns; c += 4)
        largest = vmaxq_s32(largest, vreinterpretq_s32_f32(vabsq_f32(load_numbers(job, x, c))));
    return vmaxvq_s32(largest);
}

static ALWAYS_INLINE void dot_cut(const Job *job, const char *x, int64_t column, float inverse, char *to) {
    for (int64_t stop = column + GROUP; column < stop; to += column % 16 ? 8 : 40) { /* 16 a, 16 b, 16 c */
        int16x4_t a[2], b[2], c[2];
        for (int i = 0; i < 2; i++, column += 4) {
            int32x4_t number = vcvtnq_s32_f32(vmulq_n_f32(load_numbers(job, x, column), inverse));
            c[i] = vmovn_s32(number), number = vrshrq_n_s32(number, 8);
            b[i] = vmovn_s32(number), a[i] = vmovn_s32(vrshrq_n_s32(number, 8));
        }
        vst1_s8((int8_t *)to, vmovn_s16(vcombine_s16(a[0], a[1])));
        vst1_s8((int8_t *)to + 16, vmovn_s16(vcombine_s16(b[0], b[1])));
        vst1_s8((int8_t *)to + 32, vmovn_s16(vcombine_s16(c[0], c[1])));
    }
}

#define TARGET TARGET_DOTPROD
#define INTEGERS int32x4_t
#define RESULT float32x4_t
#define LOAD_BYTES(p) vreinterpretq_s32_s8(vld1q_s8((const int8_t *)(p)))
#define MULTIPLY_BYTES dot
#define TO_FLOATS vcvtq_f32_s32
#define ADD_SCALED vfmaq_n_f32
#define LARGEST dot_largest
#define CUT dot_cut
#define BEGIN(job, planes, end, starts) ((void)(planes), (void)(starts))
#define UNIT_INT4 16
#define PART_INT8(v, p, w, n) (v = place_bytes(p, w, n), MOVE(p, w, 2 * (n) + 1))
#define PART_INT4 PART_INT8
#define SPLIT_INT4 neon_split
#define PARTS 4
#define COLUMNS Planes
#define LOAD(x, n) load_planes((x) + 48 * (n))
#define START(job, t, group) ((Planes){vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)})
#define MULTIPLY_PART(sums, v, x, chain) ((void)(chain), sums = multiply_planes(sums, v, x))
#define NOTHING vdupq_n_f32(0)
#define TOTAL_OF vaddvq_f32
#define ROWS(tokens) (tokens == 1 ? 4 : tokens == 8 ? 1 : 2)
#include "kernels_planes.h"
