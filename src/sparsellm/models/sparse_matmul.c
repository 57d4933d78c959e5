/* Products with pruned matrices that skip their zeros, for many tokens (sparse_matmul.py).

   Plain C without Python and torch, called through ctypes. Every token has its own lane of a vector, so that its result does not
   depend on the other tokens. SPARSELLM_PORTABLE leaves out what only some compilers know, SPARSELLM_NARROW leaves out
   AVX-512, for tests (dev/as_processor.sh). */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#if !defined(__x86_64__) || defined(SPARSELLM_PORTABLE)
#define FOR_EACH_PROCESSOR
#elif defined(SPARSELLM_NARROW)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif

enum {
    VERSION = 1, /* sparse_matmul.py has the same */
    LANES = 16,
    TOKENS = 4 * LANES, /* in one block: 4 sums of a row stay in registers */
    CHUNK = 96,         /* inputs of a block in the first cache: 24 KiB; below 256 */
};
typedef float Vector __attribute__((vector_size(4 * LANES)));

EXPORT int sparsellm_version(void) { return VERSION; }

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

/* Add the products of one chunk of inputs, (width, TOKENS), to the sums, (rows, TOKENS). */
FOR_EACH_PROCESSOR
static void add_chunk(const float *inputs, const int32_t *starts, const uint8_t *places, const float *values, int64_t rows, float *sums) {
    for (int64_t row = 0; row < rows; row++) {
        Vector *to = (Vector *)(sums + row * TOKENS), a = {0}, b = {0}, c = {0}, d = {0};
        for (int32_t entry = starts[row]; entry < starts[row + 1]; entry++) {
            const Vector *from = (const Vector *)(inputs + places[entry] * TOKENS);
            a += values[entry] * from[0], b += values[entry] * from[1], c += values[entry] * from[2], d += values[entry] * from[3];
        }
        to[0] += a, to[1] += b, to[2] += c, to[3] += d; /* sums of sums round less */
    }
}

/* out (tokens, rows) = x (tokens, columns) W' + bias (rows, or NULL). Returns 0, or -1 without memory. */
EXPORT int sparsellm_sparse_matmul(const float *x, int64_t tokens, int64_t columns, const int32_t *starts, const uint8_t *places,
                                   const float *values, int64_t rows, const float *bias, float *out) {
    float *memory = malloc((size_t)(CHUNK + rows) * TOKENS * sizeof(float) + 64);
    if (!memory) return -1;
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
            add_chunk(inputs, chunk_starts, places, values, rows, sums);
        }
        for (int64_t token = 0; token < count; token++)
            for (int64_t row = 0; row < rows; row++)
                out[(begin + token) * rows + row] = sums[row * TOKENS + token] + (bias ? bias[row] : 0);
    }
    free(memory);
    return 0;
}
