/* Include kernels_tile.h for float32 tokens and each type of value, with SET, TARGET, LANES, SUM, ZERO, MULTIPLY, TOTAL, ADD, ROWS
   and STEP_... of an instruction set; they end here. */

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
#undef SET
#undef TARGET
#undef LANES
#undef SUM
#undef ZERO
#undef MULTIPLY
#undef TOTAL
#undef ADD
#undef ROWS
#undef STEP_FLOAT32
#undef STEP_BFLOAT16
#undef STEP_FLOAT16
#undef STEP_DENSE
