/* Products of integers by instructions that multiply bytes and add four products to a number of 32 bits: AVX-512 VNNI
   (kernels_vnni.h) and the dot products of Arm (kernels_dotprod.h).

   The numbers x of a token become integers X = round(x 2^(22 - e)), where 2^e is above the largest |x| of the token, and X is cut
   into three signed bytes: X = 65536 a + 256 b + c. Products with each are summed without any rounding. x is therefore exact
   where it is bfloat16 and |x| >= 2^(e - 15), and otherwise off by 2^(e - 23) at most, as float32 numbers of size 2^e are.

   Each sum of a vector takes 64 / LANES products of 64 columns. |q| <= 128, also times UNIT_INT4, and |byte| <= 128: after
   LANES * MAX_SCALE_WORDS words it is 64 * 128 * 128 * MAX_SCALE_WORDS = 2^30 at most. What it holds on the way may pass 2^31 and come back, since it is
   computed modulo 2^32.

   An instruction set includes this file once, with
     TARGET          the attribute that compiles functions for it
     INTEGERS, RESULT  types of a vector of LANES 32-bit integers, or as many bytes, and of float32
     LOAD_BYTES(p)   such a vector; MULTIPLY_BYTES(s, v, x)  s + products of bytes v and signed bytes x
     TO_FLOATS(s)    s as float32; ADD_SCALED(r, s, f)  r + f * s for a float f
     LARGEST(job, x)  the largest of a token's numbers, without signs, as bits of float32
     CUT(job, x, column, inverse, to)  writes the bytes of 64 numbers from a column on, times `inverse`: for each of the PARTS of
                     kernels_integers.h a, then b, then c
     BEGIN(job, planes, end, starts)  writes what sums with the planes up to `end` begin with, if not with zero
     UNIT_INT4       a power of two up to 16 by which PART_INT4 multiplies numbers of 4 bits
     PART_INT8, PART_INT4, SPLIT_INT4 where it is needed, and what else kernels_integers.h takes
   They end here. */

enum { PLANES_BYTES = 3 * GROUP }; /* of 64 columns; also of a group's START */

typedef struct { INTEGERS a, b, c; } Planes;

static ALWAYS_INLINE TARGET Planes load_planes(const char *p) {
    return (Planes){LOAD_BYTES(p), LOAD_BYTES(p + GROUP / PARTS), LOAD_BYTES(p + 2 * GROUP / PARTS)};
}

static ALWAYS_INLINE TARGET Planes multiply_planes(Planes sums, INTEGERS v, Planes x) {
    return (Planes){MULTIPLY_BYTES(sums.a, v, x.a), MULTIPLY_BYTES(sums.b, v, x.b), MULTIPLY_BYTES(sums.c, v, x.c)};
}

static ALWAYS_INLINE TARGET RESULT scale_planes(RESULT result, Planes sums, float scale) {
    RESULT low = ADD_SCALED(TO_FLOATS(sums.b), TO_FLOATS(sums.c), 0x1p-8f);
    RESULT all = ADD_SCALED(TO_FLOATS(sums.a), low, 0x1p-8f);
    return ADD_SCALED(result, all, scale);
}

/* Prepare one token; 0 if a number is not finite. */
static TARGET int prepare_token(const Job *job, const char *x, char *to, char *starts, float *factor) {
    int exponent = LARGEST(job, x) >> 23; /* that of 2^(e - 1), plus 127 */
    if (exponent == 255) return 0;
    if (exponent < 32) exponent = 32; /* the factors remain normal numbers */
    *factor = from_bits((uint32_t)(exponent - 5) << 23); /* 2^(e - 6), as scale_planes divides by 65536 */
    if (job->value_dtype == INT4) *factor /= UNIT_INT4;
    const float inverse = from_bits((uint32_t)(275 - exponent) << 23);
    for (int64_t group = 0, word = 0; group < job->scale_groups; group++, starts += PLANES_BYTES) {
        int64_t end = job->groups - word < job->scale_words ? job->groups : word + job->scale_words;
        const char *planes = to;
        for (; word < end; word++, to += PLANES_BYTES) CUT(job, x, word * GROUP, inverse, to);
        BEGIN(job, planes, to, starts);
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

#define X_BYTES PLANES_BYTES
#define SUMS Planes
#define VECTOR INTEGERS
#define KEEP_PART(x) (void)(x)
#define SCALE scale_planes

#define NAME int8_planes
#define PART PART_INT8
#include "kernels_integers.h"
#undef NAME
#undef PART

#define NAME int4_planes
#define PART PART_INT4
#ifdef SPLIT_INT4
#define SPLIT SPLIT_INT4
#endif
#include "kernels_integers.h"
#undef NAME
#undef PART
#undef SPLIT

#undef X_BYTES
#undef SUMS
#undef VECTOR
#undef KEEP_PART
#undef SCALE
#undef TARGET
#undef INTEGERS
#undef RESULT
#undef LOAD_BYTES
#undef MULTIPLY_BYTES
#undef TO_FLOATS
#undef ADD_SCALED
#undef LARGEST
#undef CUT
#undef BEGIN
#undef UNIT_INT4
#undef PART_INT8
#undef PART_INT4
#undef SPLIT_INT4
#undef PARTS
#undef COLUMNS
#undef LOAD
#undef START
#undef MULTIPLY_PART
#undef NOTHING
#undef TOTAL_OF
#undef ROWS
