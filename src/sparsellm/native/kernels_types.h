/* Include kernels_tile.h for float32 tokens and each type of value, and kernels_integers.h for each form of integers, with SET, TARGET,
   LANES, SUM, ZERO, LOAD_X, KEEP, MULTIPLY, TOTAL, ADD, ADD_SCALED, ROWS, INTEGER_ROWS, STEP_..., UNIT_INT8 and WORD_... or SPLIT_INT4
   of an instruction set. Their definitions end with this file.
     ADD_SCALED(s, t, f)  s + f * t for a float f
     STEP_INT8(v, p, w, n)  float32 integers, times UNIT_INT8, from bytes at p as STEP in kernels_tile.h; or
     WORD_INT8(v, p, w)   vectors v of 64 columns, whose mask is w, from bytes at p; moves p
     SPLIT_INT4(to, p)    64 numbers of 4 bits, two to a byte at p, times 16, as bytes that these take; or
     WORD_INT4(v, p, w)   the same as WORD_INT8 from numbers of 4 bits
     UNIT_INT8            a power of two: integers in the upper byte of 32 bits need no shift. Sums are divided by it, which loses no bit,
                          and `shrink` sees to it that they do not overflow
     INTEGER_ROWS         ROWS of kernels_integers.h */

#define X float
#define VECTOR SUM
#define DENSE 0

#define NAME GLUE(float32_, SET)
#define VALUE float
#define STEP STEP_FLOAT32
#include "kernels_tile.h"
#undef NAME
#undef VALUE
#undef STEP

#define NAME GLUE(bfloat16_, SET)
#define VALUE uint16_t
#define STEP STEP_BFLOAT16
#include "kernels_tile.h"
#undef NAME
#undef STEP

#define NAME GLUE(float16_, SET)
#define STEP STEP_FLOAT16
#include "kernels_tile.h"
#undef NAME
#undef STEP

#undef DENSE
#define DENSE 1
#define NAME GLUE(dense_, SET)
#define STEP STEP_DENSE
#include "kernels_tile.h"
#undef NAME
#undef VALUE
#undef STEP

#undef X
#undef VECTOR
#undef DENSE
#undef ROWS

typedef struct { SUM v[2]; } GLUE(Sums_, SET); /* two, since one addition waits for the one before */
#ifdef STEP_INT8
#define WORD_INT8(v, p, w) \
    UNROLL for (int n = 0; n < GROUP / LANES; n++) STEP_INT8(v[n], p, w, n)
#define PARTS (GROUP / LANES)
#define VECTOR SUM
#define COLUMNS SUM
#define LOAD(x, n) LOAD_X((const float *)(x) + (n) * LANES)
#define KEEP_PART KEEP
#define MULTIPLY_PART(sums, a, x, chain) ((sums).v[chain] = MULTIPLY((sums).v[chain], a, x))
#define PART_INT8 STEP_INT8
#else
typedef struct { SUM v[GROUP / LANES]; } GLUE(Word_, SET);
static ALWAYS_INLINE TARGET GLUE(Sums_, SET) GLUE(multiply_, SET)(GLUE(Sums_, SET) sums, const GLUE(Word_, SET) *word, const float *x) {
    UNROLL
    for (int n = 0; n < GROUP / LANES; n++) sums.v[n % 2] = MULTIPLY(sums.v[n % 2], word->v[n], LOAD_X(x + n * LANES));
    return sums;
}
#define PARTS 1
#define VECTOR GLUE(Word_, SET)
#define COLUMNS const float *
#define LOAD(x, n) ((const float *)(x))
#define KEEP_PART(x) (void)(x)
#define MULTIPLY_PART(sums, a, x, chain) ((void)(chain), sums = GLUE(multiply_, SET)(sums, &a, x))
#define PART_INT8(a, p, w, n) WORD_INT8((a).v, p, w)
#define PART_INT4(a, p, w, n) WORD_INT4((a).v, p, w)
#endif

#define X_BYTES (GROUP * (int)sizeof(float))
#define SUMS GLUE(Sums_, SET)
#define RESULT SUM
#define START(job, t, group) ((SUMS){{ZERO, ZERO}})
#define INTEGERS(a) (UNIT == 1 ? (a) : ADD_SCALED(ZERO, a, 1 / UNIT))
#define SCALE(result, sums, scale) ADD_SCALED(result, INTEGERS(ADD((sums).v[0], (sums).v[1])), scale)
#define NOTHING ZERO
#define TOTAL_OF TOTAL
#define ROWS INTEGER_ROWS

#define NAME GLUE(int8_, SET)
#define PART PART_INT8
#define WORD WORD_INT8
#define UNIT UNIT_INT8
#include "kernels_integers.h"
DECODE_INTEGERS
#undef NAME
#undef PART
#undef WORD
#undef UNIT

#define NAME GLUE(int4_, SET)
#ifdef SPLIT_INT4
#define SPLIT SPLIT_INT4
#define PART PART_INT8
#define WORD WORD_OF_HALVES
#define UNIT (16 * UNIT_INT8)
#else
#define PART PART_INT4
#define WORD WORD_INT4
#define UNIT UNIT_INT8
#endif
#include "kernels_integers.h"
DECODE_INTEGERS
#undef NAME
#undef SPLIT
#undef PART
#undef WORD
#undef UNIT

#undef X_BYTES
#undef SUMS
#undef RESULT
#undef PARTS
#undef VECTOR
#undef COLUMNS
#undef LOAD
#undef KEEP_PART
#undef PART_INT8
#undef PART_INT4
#undef START
#undef MULTIPLY_PART
#undef INTEGERS
#undef SCALE
#undef NOTHING
#undef TOTAL_OF
#undef SET
#undef TARGET
#undef LANES
#undef SUM
#undef ZERO
#undef LOAD_X
#undef KEEP
#undef MULTIPLY
#undef TOTAL
#undef ADD
#undef ADD_SCALED
#undef ROWS
#undef STEP_FLOAT32
#undef STEP_BFLOAT16
#undef STEP_FLOAT16
#undef STEP_DENSE
#undef INTEGER_ROWS
#undef STEP_INT8
#undef UNIT_INT8
#undef WORD_INT8
#undef WORD_INT4
#undef SPLIT_INT4
