/* Compares every instruction set of kernels.c with a loop, without Python: for processors that are emulated. Prints their names. */
#include <math.h>
#include <stdio.h>

#include "kernels.c"

static uint64_t state = 1;
static double uniform(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 40) / (1 << 24) - 0.5;
}

static float value(const void *values, int dtype, int64_t i) {
    if (dtype == FLOAT32) return ((const float *)values)[i];
    uint16_t bits = ((const uint16_t *)values)[i];
    return dtype == BFLOAT16 ? from_bfloat16(bits) : from_float16(bits);
}

static int check(int set, int dtype, int64_t rows, int64_t columns, int64_t tokens, int x_dtype) {
    int64_t groups = (columns + 63) / 64, kept = 0;
    uint8_t *mask = calloc(1, (size_t)(rows * groups * 8 + 8));
    int64_t *starts = malloc((size_t)(rows + 1) * 8);
    void *values = calloc((size_t)(rows * columns + 64), 4), *x = calloc((size_t)(tokens * columns), 4);
    void *out = calloc((size_t)(tokens * rows), 4), *dense = calloc((size_t)(rows * columns), 4);
    double *exact = calloc((size_t)(tokens * rows), 8), *terms = calloc((size_t)(tokens * rows), 8);
    for (int64_t i = 0; i < tokens * columns; i++) {
        float number = (float)uniform();
        if (x_dtype == BFLOAT16) ((uint16_t *)x)[i] = to_bfloat16(number);
        else ((float *)x)[i] = number;
    }
    for (int64_t row = 0; row < rows; row++) {
        starts[row] = kept;
        for (int64_t c = 0; c < columns; c++) {
            if (row == 1 || (row != 2 && uniform() > 0)) continue;
            mask[(row * groups + c / 64) * 8 + c % 64 / 8] |= (uint8_t)(1 << c % 8);
            if (dtype == FLOAT32) ((float *)values)[kept] = (float)uniform();
            else ((uint16_t *)values)[kept] = (uint16_t)(0x3800 + (state >> 50) % 0x400 + (state >> 63) * 0x8000);
            for (int64_t t = 0; t < tokens; t++) {
                double product = (double)value(values, dtype, kept) * (double)value(x, x_dtype, t * columns + c);
                exact[t * rows + row] += product;
                terms[t * rows + row] += fabs(product);
            }
            size_t width = dtype == FLOAT32 ? 4 : 2;
            memcpy((char *)dense + (size_t)(row * columns + c) * width, (char *)values + (size_t)kept * width, width);
            kept++;
        }
    }
    starts[rows] = kept;
    values = realloc(values, (size_t)(kept + 64) * (dtype == FLOAT32 ? 4 : 2)); /* no more than PADDING behind the last one */
    sparsellm_matmul(set, 2, x, x_dtype, tokens, mask, values, dtype, starts, rows, columns, NULL, out);
    int wrong = 0;
    for (int64_t i = 0; i < tokens * rows; i++) {
        double error = fabs((double)value(out, x_dtype, i) - exact[i]);
        wrong += !(error <= terms[i] * 0x1p-18 + fabs(exact[i]) * (x_dtype == BFLOAT16 ? 0x1p-7 : 0x1p-22) + 1e-30);
    }
    if (dtype == BFLOAT16) {
        sparsellm_matmul(set, 2, x, x_dtype, tokens, NULL, dense, dtype, NULL, rows, columns, NULL, out);
        for (int64_t i = 0; i < tokens * rows; i++) {
            double error = fabs((double)value(out, x_dtype, i) - exact[i]);
            wrong += !(error <= terms[i] * 0x1p-18 + fabs(exact[i]) * (x_dtype == BFLOAT16 ? 0x1p-7 : 0x1p-22) + 1e-30);
        }
    }
    void *decoded = malloc((size_t)(rows * columns) * 4);
    sparsellm_decode(set, 2, mask, values, dtype == FLOAT32 ? 4 : 2, starts, 0, rows, columns, decoded);
    wrong += memcmp(decoded, dense, (size_t)(rows * columns) * (dtype == FLOAT32 ? 4 : 2)) != 0;
    free(mask), free(starts), free(values), free(x), free(out), free(dense), free(exact), free(terms), free(decoded);
    if (wrong) printf("set %d, type %d, %d x %d, %d tokens: wrong\n", set, dtype, (int)rows, (int)columns, (int)tokens);
    return wrong;
}

int main(void) {
    static const char *const names[] = {"portable", "neon", "avx2", "avx512", "avx512_bf16"};
    static const int shapes[][2] = {{1, 1}, {3, 7}, {5, 64}, {9, 200}, {70, 1030}};
    int wrong = 0, sets = sparsellm_instruction_sets();
    for (int set = 0; set < INSTRUCTION_SETS; set++) {
        if (!(sets >> set & 1)) continue;
        for (int dtype = 0; dtype < DTYPES; dtype++)
            for (int tokens = 1; tokens <= MAX_TOKENS; tokens++)
                for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
                    for (int x_dtype = FLOAT32; x_dtype <= BFLOAT16; x_dtype++)
                        wrong += check(set, dtype, shapes[s][0], shapes[s][1], tokens, x_dtype);
        printf("%s\n", names[set]);
    }
    return wrong != 0;
}
