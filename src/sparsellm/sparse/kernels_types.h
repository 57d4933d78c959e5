/* Include kernels_tile.h for float32 tokens and each type of value, and kernels_integers.h for each form of integers, with SET, TARGET,
   LANES, SUM, ZERO, LOAD_X, KEEP, MULTIPLY, TOTAL, ADD, ADD_SCALED, ROWS, STEP_... and WORD_... of an instruction set; they end here.
     ADD_SCALED(s, t, f)  s + f * t for a float f
     WORD_INT8(v, p, w)   float32 vectors v of 64 columns, whose mask is w, from bytes at p; moves p
     WORD_INT4(v, p, w)   the same from numbers of 4 bits, two to a byte; or
     SPLIT_INT4(to, p)    64 of them as bytes, which WORD_INT8 takes */

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

typedef struct { SUM v[GROUP / LANES]; } GLUE(Word_, SET);
typedef struct { SUM v[2]; } GLUE(Sums_, SET); /* two, since one addition waits for the one before */

static ALWAYS_INLINE TARGET GLUE(Sums_, SET) GLUE(multiply_, SET)(GLUE(Sums_, SET) sums, const GLUE(Word_, SET) *word, const char *x) {
    UNROLL
    for (int n = 0; n < GROUP / LANES; n++) sums.v[n % 2] = MULTIPLY(sums.v[n % 2], word->v[n], LOAD_X((const float *)x + n * LANES));
    return sums;
}

#define X_BYTES (GROUP * (int)sizeof(float))
#define SUMS GLUE(Sums_, SET)
#define RESULT SUM
#define VECTOR GLUE(Word_, SET)
#define START(job, t, group) ((SUMS){{ZERO, ZERO}})
#define MULTIPLY_WORD(sums, v, x) GLUE(multiply_, SET)(sums, &v, x)
#define SCALE(result, sums, scale) ADD_SCALED(result, ADD((sums).v[0], (sums).v[1]), scale)
#define NOTHING ZERO
#define TOTAL_OF TOTAL
#define ROWS(tokens) 1

#define NAME GLUE(int8_, SET)
#define WORD(v, p, w) WORD_INT8((v).v, p, w)
#include "kernels_integers.h"
DECODE_INTEGERS
#undef NAME
#undef WORD

#define NAME GLUE(int4_, SET)
#ifdef SPLIT_INT4
#define SPLIT SPLIT_INT4
#define WORD(v, p, w) WORD_INT8((v).v, p, w)
#include "kernels_integers.h"
#undef SPLIT
#undef WORD
#define WORD(v, p, w) WORD_OF_HALVES((v).v, p, w)
#else
#define WORD(v, p, w) WORD_INT4((v).v, p, w)
#include "kernels_integers.h"
#endif
DECODE_INTEGERS
#undef NAME
#undef WORD

#undef X_BYTES
#undef SUMS
#undef RESULT
#undef VECTOR
#undef START
#undef MULTIPLY_WORD
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
#undef WORD_INT8
#undef WORD_INT4
#undef SPLIT_INT4
