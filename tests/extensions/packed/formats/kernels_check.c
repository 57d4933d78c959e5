/* Compares every instruction set of kernels.c with a loop, without Python: for processors that are emulated. Prints their names.
   Pages that must not be read lie around what the functions take, beside its first byte or beside its last one. */
#include <math.h>
#include <stdio.h>

#include "kernels.c"

#include <sys/mman.h>
#include <unistd.h>

static int at_end, maps;
static struct { char *start; size_t size; } map[16];

/* Zeros until `release`. */
static void *buffer(size_t size) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), inner = (size + page - 1) / page * page;
    char *start = mmap(NULL, inner + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED || mprotect(start + page, inner, PROT_READ | PROT_WRITE)) abort();
    map[maps].start = start, map[maps++].size = inner + 2 * page;
    return start + page + (at_end ? inner - size : 0);
}

static void *copy(const void *from, size_t size) { return memcpy(buffer(size), from, size); }

static void release(void) {
    while (maps) maps--, munmap(map[maps].start, map[maps].size);
}

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
    size_t width = dtype == FLOAT32 ? 4 : 2, x_width = x_dtype == BFLOAT16 ? 2 : 4;
    uint8_t *mask = buffer((size_t)(rows * groups * 8));
    int64_t *starts = buffer((size_t)(rows + 1) * 8);
    void *values = calloc((size_t)(rows * columns + 64), 4), *x = buffer((size_t)(tokens * columns) * x_width), *packed;
    void *out = buffer((size_t)(tokens * rows) * x_width), *dense = buffer((size_t)(rows * columns) * width);
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
            memcpy((char *)dense + (size_t)(row * columns + c) * width, (char *)values + (size_t)kept * width, width);
            kept++;
        }
    }
    starts[rows] = kept;
    packed = copy(values, (size_t)(kept + 64) * width); /* no more than PADDING behind the last one */
    sparsellm_matmul(set, 2, x, x_dtype, tokens, mask, packed, dtype, starts, NULL, 0, rows, columns, NULL, out);
    int wrong = 0;
    for (int64_t i = 0; i < tokens * rows; i++) {
        double error = fabs((double)value(out, x_dtype, i) - exact[i]);
        wrong += !(error <= terms[i] * 0x1p-18 + fabs(exact[i]) * (x_dtype == BFLOAT16 ? 0x1p-7 : 0x1p-22) + 1e-30);
    }
    if (dtype == BFLOAT16) {
        sparsellm_matmul(set, 2, x, x_dtype, tokens, NULL, dense, dtype, NULL, NULL, 0, rows, columns, NULL, out);
        for (int64_t i = 0; i < tokens * rows; i++) {
            double error = fabs((double)value(out, x_dtype, i) - exact[i]);
            wrong += !(error <= terms[i] * 0x1p-18 + fabs(exact[i]) * (x_dtype == BFLOAT16 ? 0x1p-7 : 0x1p-22) + 1e-30);
        }
    }
    void *decoded = buffer((size_t)(rows * columns) * width);
    sparsellm_decode(set, 2, mask, packed, dtype, starts, NULL, 0, 0, rows, columns, dtype, decoded);
    wrong += memcmp(decoded, dense, (size_t)(rows * columns) * width) != 0;
    free(values), free(exact), free(terms), release();
    if (wrong) printf("set %d, type %d, %d x %d, %d tokens: wrong\n", set, dtype, (int)rows, (int)columns, (int)tokens);
    return wrong;
}

/* Integers of a type with a scale for each group_size columns; x has one large number. */
static int check_integers(int set, int dtype, int64_t group_size, int64_t rows, int64_t columns, int64_t tokens, int x_dtype) {
    int64_t groups = (columns + 63) / 64, scale_groups = group_size ? (columns + group_size - 1) / group_size : 1, bytes = 0;
    size_t x_width = x_dtype == BFLOAT16 ? 2 : 4;
    uint8_t *mask = buffer((size_t)(rows * groups * 8)), *values = calloc(1, (size_t)(rows * (columns + groups) + 64)), *packed;
    int64_t *starts = buffer((size_t)(rows + 1) * 8);
    uint16_t *scales = buffer((size_t)(rows * scale_groups) * 2);
    void *x = buffer((size_t)(tokens * columns) * x_width), *out = buffer((size_t)(tokens * rows) * x_width);
    float *dense = calloc((size_t)(rows * columns), 4), *decoded = buffer((size_t)(rows * columns) * 4);
    for (int64_t i = 0; i < tokens * columns; i++) {
        float number = (float)uniform() * (i % columns ? 1 : 64);
        if (x_dtype == BFLOAT16) ((uint16_t *)x)[i] = to_bfloat16(number);
        else ((float *)x)[i] = number;
    }
    for (int64_t i = 0; i < rows * scale_groups; i++) scales[i] = to_bfloat16((float)uniform() + 1);
    for (int64_t row = 0; row < rows; row++) {
        starts[row] = bytes;
        for (int64_t c = 0, halves = 0; c < columns; c++) {
            int largest = dtype == INT8 ? 127 : 7, q = (int)((uniform() + 0.5) * (2 * largest + 1)) - largest;
            if (c % 64 == 0) bytes += halves & 1, halves = 0; /* words begin with a byte */
            if (row == 1 || (row != 2 && uniform() > 0)) continue;
            mask[(row * groups + c / 64) * 8 + c % 64 / 8] |= (uint8_t)(1 << c % 8);
            dense[row * columns + c] = (float)q * from_bfloat16(scales[row * scale_groups + (group_size ? c / group_size : 0)]);
            if (dtype == INT8) values[bytes++] = (uint8_t)q;
            else values[bytes] |= (uint8_t)((q & 15) << 4 * (halves & 1)), bytes += halves & 1, halves++;
        }
        int count = __builtin_popcountll(read_mask(mask + (row * groups + groups - 1) * 8));
        if (dtype == INT4) bytes += count & 1; /* the last word's byte that is half full */
    }
    starts[rows] = bytes;
    packed = copy(values, (size_t)bytes + 64); /* no more than PADDING behind the last one */
    sparsellm_matmul(set, 2, x, x_dtype, tokens, mask, packed, dtype, starts, scales, group_size, rows, columns, NULL, out);
    sparsellm_decode(set, 2, mask, packed, dtype, starts, scales, group_size, 0, rows, columns, FLOAT32, decoded);
    int wrong = memcmp(decoded, dense, (size_t)(rows * columns) * 4) != 0;
    for (int64_t i = 0; i < tokens * rows; i++) {
        double exact = 0, terms = 0, sum = 0;
        for (int64_t c = 0; c < columns; c++) {
            double w = (double)dense[i % rows * columns + c], product = w * (double)value(x, x_dtype, i / rows * columns + c);
            exact += product, terms += fabs(product), sum += fabs(w);
        }
        double error = fabs((double)value(out, x_dtype, i) - exact);
        wrong += !(error <= terms * 0x1p-18 + sum * 0x1p-16 + fabs(exact) * (x_dtype == BFLOAT16 ? 0x1p-7 : 0x1p-22) + 1e-30);
    }
    free(values), free(dense), release();
    if (wrong) printf("set %d, type %d, %d x %d, %d tokens: wrong\n", set, dtype, (int)rows, (int)columns, (int)tokens);
    return wrong;
}

/* A row of the largest integers times the largest x: no sum of 32 bits overflows at any length, and one infinite x makes it infinite. */
static int check_long_row(int set, int dtype, int64_t columns, float number) {
    int64_t starts[] = {0, dtype == INT8 ? columns : columns / 2};
    uint16_t scale = to_bfloat16(1);
    float *x = calloc((size_t)columns, 4), out = 0;
    uint8_t *mask = malloc((size_t)columns / 8), *values = calloc(1, (size_t)starts[1] + 64);
    memset(mask, 0xff, (size_t)columns / 8), memset(values, dtype == INT8 ? 0x80 : 0x88, (size_t)starts[1]); /* -128 or -8 */
    for (int64_t c = 0; c < columns; c++) x[c] = c ? (float)(1 - 0x1p-20) : number;
    sparsellm_matmul(set, 1, x, FLOAT32, 1, mask, values, dtype, starts, &scale, 0, 1, columns, NULL, &out);
    double exact = (dtype == INT8 ? -128 : -8) * ((double)columns * (1 - 0x1p-20) + (double)number - 1);
    int wrong = isinf(exact) ? (double)out != exact : !(fabs((double)out - exact) <= fabs(exact) * 0x1p-10);
    if (wrong) printf("set %d, type %d, %d columns: %g for %g\n", set, dtype, (int)columns, (double)out, exact);
    free(x), free(mask), free(values);
    return wrong;
}

int main(void) {
    static const char *const names[] = {"portable", "neon", "neon_dotprod", "avx2", "avx512", "avx512_bf16"};
    static const int shapes[][2] = {{1, 1}, {3, 7}, {5, 64}, {9, 200}, {70, 1030}};
    int wrong = 0, sets = sparsellm_instruction_sets();
    for (int set = 0; set < INSTRUCTION_SETS; set++) {
        if (!(sets >> set & 1)) continue;
        for (at_end = 0; at_end < 2; at_end++)
            for (int tokens = 1; tokens <= PASS_TOKENS; tokens++)
                for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
                    for (int x_dtype = FLOAT32; x_dtype <= BFLOAT16; x_dtype++) {
                        for (int dtype = FLOAT32; dtype <= FLOAT16; dtype++)
                            wrong += check(set, dtype, shapes[s][0], shapes[s][1], tokens, x_dtype);
                        if (tokens > 3 && tokens < 8) continue; /* as 3, or as 8 */
                        for (int dtype = INT8; dtype <= INT4; dtype++)
                            for (int64_t size = 0; size <= 192; size += 192)
                                wrong += check_integers(set, dtype, size, shapes[s][0], shapes[s][1], tokens, x_dtype);
                    }
        for (int dtype = INT8; dtype <= INT4; dtype++)
            for (int64_t words = 1 << 10; words <= 1 << 14; words *= 4) /* and with 64 columns more than sums of 32 bits may take */
                for (int more = 0; more < 2; more++)
                    wrong += check_long_row(set, dtype, (words + more) * 64, more ? INFINITY : (float)(1 - 0x1p-20));
        printf("%s\n", names[set]);
    }
    return wrong != 0;
}
