/* Products with pruned matrices that skip their zeros, for many tokens (sparse_matmul.py).

   Plain C without Python and torch, called through ctypes. Every token has its own lane of a vector, so that its result does not
   depend on the other tokens. SPARSELLM_PORTABLE leaves out what only some compilers know, SPARSELLM_NARROW leaves out
   AVX-512, for tests (dev/as_processor.sh). */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "processor.h"

#define EXPORT __attribute__((visibility("default")))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 64")
#endif

enum {
    TOKENS = 64, /* in one block: all sums of a row stay in registers, as 4 vectors of 64 bytes, 8 of 32 or 16 of 16 */
    LANES = 16,  /* tokens that are gathered at a time, so that few rows of x are read at once */
    CHUNK = 96,  /* inputs of a block in the first cache: 24 KiB; below 256 */
};
typedef float Vector64 __attribute__((vector_size(64)));
typedef float Vector32 __attribute__((vector_size(32)));
typedef float Vector16 __attribute__((vector_size(16)));

/* Inputs that share one list of row starts. */
EXPORT int sparsellm_chunk(void) { return CHUNK; }

/* List the nonzero entries of weight (rows, columns) by chunk of columns, then by row: starts (chunks * rows + 1), and for each
   entry its column within the chunk and its value. Both have room for one entry more. */
EXPORT void sparsellm_encode(const float *weight, int64_t rows, int64_t columns, int32_t *starts, uint8_t *places, float *values) {
    int32_t count = 0;
    for (int64_t first = 0; first < columns; first += CHUNK) {
        int64_t width = columns - first < CHUNK ? columns - first : CHUNK;
        for (int64_t row = 0; row < rows; row++) {
            *starts++ = count;
            for (int64_t column = 0; column < width; column++) { /* without a branch, which could not be foreseen */
                float value = weight[row * columns + first + column];
                places[count] = (uint8_t)column;
                values[count] = value;
                count += value != 0;
            }
        }
    }
    *starts = count;
}

/* Functions that add the products of one chunk of inputs, (width, TOKENS), to the sums, (rows, TOKENS), in vectors as wide as
   the registers of an instruction set: compilers keep wider ones in memory. */
typedef void AddChunk(const float *inputs, const int32_t *starts, const uint8_t *places, const float *values, int64_t rows, float *sums);

#define ADD_CHUNK(name, attributes, Vector)                                                                                      \
    attributes static void name(const float *inputs, const int32_t *starts, const uint8_t *places, const float *values,          \
                                int64_t rows, float *sums) {                                                                     \
        enum { COUNT = TOKENS * sizeof(float) / sizeof(Vector) };                                                                \
        for (int64_t row = 0; row < rows; row++) {                                                                               \
            Vector *to = (Vector *)(sums + row * TOKENS), partial[COUNT];                                                        \
            UNROLL for (int i = 0; i < COUNT; i++) partial[i] = (Vector){0};                                                     \
            for (int32_t entry = starts[row]; entry < starts[row + 1]; entry++) {                                                \
                const Vector *from = (const Vector *)(inputs + places[entry] * TOKENS);                                          \
                UNROLL for (int i = 0; i < COUNT; i++) partial[i] += values[entry] * from[i];                                    \
            }                                                                                                                    \
            UNROLL for (int i = 0; i < COUNT; i++) to[i] += partial[i]; /* sums of sums round less */                            \
        }                                                                                                                        \
    }

ADD_CHUNK(add_chunk, , Vector16)
#if defined(__x86_64__) && !defined(SPARSELLM_PORTABLE)
ADD_CHUNK(add_chunk_avx2, __attribute__((target("avx2,fma"))), Vector32)
#ifndef SPARSELLM_NARROW
ADD_CHUNK(add_chunk_avx512, __attribute__((target("avx512f"))), Vector64)
#endif
#endif

/* The one for this processor. */
static AddChunk *add_chunk_here(void) {
#if defined(__x86_64__) && !defined(SPARSELLM_PORTABLE)
#ifndef SPARSELLM_NARROW
    if (processor_sets() & HAS_AVX512) return add_chunk_avx512;
#endif
    if (processor_sets() & HAS_AVX2) return add_chunk_avx2;
#endif
    return add_chunk;
}

/* out (tokens, rows) = x (tokens, columns) W' + bias (rows, or NULL). Returns 0, or -1 without memory. */
EXPORT int sparsellm_sparse_matmul(const float *x, int64_t tokens, int64_t columns, const int32_t *starts, const uint8_t *places,
                                   const float *values, int64_t rows, const float *bias, float *out) {
    float *memory = malloc((size_t)(CHUNK + rows) * TOKENS * sizeof(float) + 64);
    if (!memory) return -1;
    AddChunk *add = add_chunk_here();
    float *inputs = (float *)(((uintptr_t)memory + 63) & ~(uintptr_t)63), *sums = inputs + CHUNK * TOKENS;
    for (int64_t begin = 0; begin < tokens; begin += TOKENS) {
        int64_t count = tokens - begin < TOKENS ? tokens - begin : TOKENS;
        memset(sums, 0, (size_t)rows * TOKENS * sizeof(float));
        if (count < TOKENS) memset(inputs, 0, CHUNK * TOKENS * sizeof(float));
        const int32_t *chunk_starts = starts;
        for (int64_t first = 0; first < columns; first += CHUNK, chunk_starts += rows) {
            int64_t width = columns - first < CHUNK ? columns - first : CHUNK;
            for (int64_t group = 0; group < count; group += LANES) { /* few rows of x at a time */
                int64_t stop = group + LANES < count ? group + LANES : count;
                for (int64_t column = 0; column < width; column++)
                    for (int64_t token = group; token < stop; token++)
                        inputs[column * TOKENS + token] = x[(begin + token) * columns + first + column];
            }
            add(inputs, chunk_starts, places, values, rows, sums);
        }
        for (int64_t token = 0; token < count; token++)
            for (int64_t row = 0; row < rows; row++)
                out[(begin + token) * rows + row] = sums[row * TOKENS + token] + (bias ? bias[row] : 0);
    }
    free(memory);
    return 0;
}
