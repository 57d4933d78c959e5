/* The functions of each instruction set: for kernels_tile.h one step of a row, and functions that decode rows and read memory. */

enum {
    FLOAT32_VALUES,  /* values of each type, numbered as the types are, times float32 x */
    BFLOAT16_VALUES,
    FLOAT16_VALUES,
    DENSE_VALUES,    /* a dense bfloat16 matrix times float32 x */
    BFLOAT16_PAIRS,  /* values and x in bfloat16, multiplied in pairs */
    DENSE_PAIRS,
    INT8_FLOATS,     /* integers times float32 x */
    INT4_FLOATS,
    INT8_PLANES,     /* integers times x as three bytes */
    INT4_PLANES,
    DECODE_WORDS,
    DECODE_NUMBERS,
    DECODE_INT8,
    DECODE_INT4,
    READ,
    FUNCTIONS
};

/* The mask of 64 columns as steps take it, how it is read, and the number of its bits. NEON has others. */
#define MASK uint64_t
#define READ_MASK read_mask
#define COUNT_BITS __builtin_popcountll

/* A function that decodes rows; PLACE(to, p, w) writes LANES values whose mask is the low bits of w, and moves p. */
#define DECODE(NAME, TARGET, VALUE, LANES, PLACE)                                                      \
    static TARGET void NAME(const Job *job, int64_t row, int64_t stop) {                               \
        for (; row < stop; row++) {                                                                    \
            const VALUE *p = (const VALUE *)job->values + job->row_starts[row];                        \
            VALUE *to = (VALUE *)job->out + row * job->columns;                                        \
            for (int64_t group = 0; group < job->groups; group++, to += GROUP) {                       \
                uint64_t w = read_mask(job->mask + (row * job->groups + group) * 8);                   \
                VALUE last[GROUP];                                                                     \
                int full = (group + 1) * GROUP <= job->columns;                                        \
                VALUE *block = full ? to : last;                                                       \
                PREFETCH(p);                                                                           \
                for (int n = 0; n < GROUP; n += LANES) PLACE(block + n, p, w >> n);                    \
                if (!full) memcpy(to, last, (size_t)(job->columns % GROUP) * sizeof(VALUE));           \
            }                                                                                          \
        }                                                                                              \
    }

/* Bytes of a word's numbers of 4 bits. */
#define PAIRS(w) ((COUNT_BITS(w) + 1) >> 1)

/* Split pairs of numbers of 4 bits into bytes, and take these for a word. */
#define WORD_OF_HALVES(v, p, w)                                                                        \
    do {                                                                                               \
        _Alignas(GROUP) uint8_t bytes[GROUP];                                                          \
        const uint8_t *q = bytes;                                                                      \
        SPLIT_INT4(bytes, p);                                                                          \
        WORD_INT8(v, q, w);                                                                            \
        p += PAIRS(w);                                                                                 \
    } while (0)

/* A function that decodes rows of integers, with what kernels_integers.h takes. */
#define DECODE_INTEGERS                                                                                \
    static TARGET void GLUE(decode_, NAME)(const Job *job, int64_t row, int64_t stop) {                \
        for (; row < stop; row++) {                                                                    \
            const uint8_t *p = (const uint8_t *)job->values + job->row_starts[row];                    \
            for (int64_t group = 0; group < job->groups; group++) {                                    \
                MASK w = READ_MASK(job->mask + (row * job->groups + group) * 8);                       \
                float numbers[GROUP];                                                                  \
                SUM v[GROUP / LANES];                                                                  \
                PREFETCH(p);                                                                           \
                WORD(v, p, w);                                                                         \
                UNROLL for (int n = 0; n < GROUP / LANES; n++) v[n] = INTEGERS(v[n]);                  \
                memcpy(numbers, &v, sizeof numbers);                                                   \
                write_scaled(job, row, group, numbers);                                                \
            }                                                                                          \
        }                                                                                              \
    }

/* A function that reads rows of PAGE bytes. */
#define READ_ROWS(NAME, TARGET, VECTOR, LOAD, OR)                                                      \
    static TARGET void NAME(const Job *job, int64_t row, int64_t stop) {                               \
        const char *p = (const char *)job->values + row * PAGE;                                        \
        const char *end = (const char *)job->values + stop * PAGE;                                     \
        const size_t size = sizeof(VECTOR);                                                            \
        VECTOR a = LOAD(p), b = a, c = a, d = a;                                                       \
        for (; p < end; p += 4 * size) {                                                               \
            for (size_t byte = 0; byte < 4 * size; byte += 64) PREFETCH(p + byte);                     \
            a = OR(a, LOAD(p)), b = OR(b, LOAD(p + size));                                             \
            c = OR(c, LOAD(p + 2 * size)), d = OR(d, LOAD(p + 3 * size));                              \
        }                                                                                              \
        a = OR(OR(a, b), OR(c, d));                                                                    \
        __asm__ volatile("" : : "m"(a)); /* the reads must happen */                                   \
    }

/* Portable: 8 columns a step, which compilers vectorize as far as the architecture's basic instructions go. */

typedef struct { float lane[8]; } Eight;

static ALWAYS_INLINE Eight eight_add(Eight a, Eight b) {
    for (int i = 0; i < 8; i++) a.lane[i] += b.lane[i];
    return a;
}

static ALWAYS_INLINE Eight eight_load(const float *p) {
    Eight x;
    memcpy(&x, p, sizeof x);
    return x;
}

static ALWAYS_INLINE Eight eight_multiply(Eight sum, Eight v, Eight x) {
    for (int i = 0; i < 8; i++) sum.lane[i] += v.lane[i] * x.lane[i];
    return sum;
}

static ALWAYS_INLINE Eight eight_add_scaled(Eight sum, Eight v, float factor) {
    for (int i = 0; i < 8; i++) sum.lane[i] += v.lane[i] * factor;
    return sum;
}

static ALWAYS_INLINE float eight_total(Eight a) {
    return ((a.lane[0] + a.lane[4]) + (a.lane[2] + a.lane[6])) + ((a.lane[1] + a.lane[5]) + (a.lane[3] + a.lane[7]));
}

/* Without branches, which a processor would mispredict for every other weight. */
#define EIGHT_STEP(v, p, w, n, CONVERT)                                                                \
    for (int lane = 0; lane < 8; lane++) {                                                             \
        uint32_t kept = (uint32_t)((w) >> (8 * (n) + lane) & 1);                                       \
        v.lane[lane] = from_bits(to_bits(CONVERT(*(p))) & -kept);                                      \
        p += kept;                                                                                     \
    }
#define SAME(number) (number)
#define EIGHT_FLOAT32(v, p, w, n) EIGHT_STEP(v, p, w, n, SAME)
#define EIGHT_BFLOAT16(v, p, w, n) EIGHT_STEP(v, p, w, n, from_bfloat16)
#define EIGHT_FLOAT16(v, p, w, n) EIGHT_STEP(v, p, w, n, from_float16)
#define EIGHT_DENSE(v, p, w, n) EIGHT_STEP(v, p, ~(w), n, from_bfloat16) /* a dense matrix has w = 0 */
#define PLACE_ONE(to, p, w) (*(to) = *(p) * ((w) & 1), p += (w) & 1)
#define EIGHT_WORD_INT8(v, p, w)                                                                       \
    for (int n = 0; n < GROUP; n++) {                                                                  \
        int kept = (w) >> n & 1;                                                                       \
        v[n / 8].lane[n % 8] = (float)((int8_t)*(p) * kept);                                           \
        p += kept;                                                                                     \
    }
static ALWAYS_INLINE void portable_split(uint8_t *to, const uint8_t *p) {
    for (int i = 0; i < GROUP / 2; i++) to[2 * i] = (uint8_t)(p[i] << 4), to[2 * i + 1] = p[i] & 0xf0;
}
#define LOAD_WORD(p) (*(const uint64_t *)(const void *)(p))
#define OR_WORD(a, b) ((a) | (b))

#define SET portable
#define TARGET
#define LANES 8
#define SUM Eight
#define ZERO ((Eight){{0}})
#define LOAD_X eight_load
#define KEEP(x) (void)(x)
#define MULTIPLY eight_multiply
#define TOTAL eight_total
#define ADD eight_add
#define ADD_SCALED eight_add_scaled
#define ROWS(tokens) 1
#define INTEGER_ROWS(tokens) 1
#define STEP_FLOAT32 EIGHT_FLOAT32
#define STEP_BFLOAT16 EIGHT_BFLOAT16
#define STEP_FLOAT16 EIGHT_FLOAT16
#define STEP_DENSE EIGHT_DENSE
#define WORD_INT8 EIGHT_WORD_INT8
#define UNIT_INT8 1.0f
#define SPLIT_INT4 portable_split
#include "kernels_types.h"
DECODE(decode_words_portable, , uint16_t, 1, PLACE_ONE)
DECODE(decode_numbers_portable, , uint32_t, 1, PLACE_ONE)
READ_ROWS(read_portable, , uint64_t, LOAD_WORD, OR_WORD)

#ifdef ARM
#include "kernels_neon.h"
#endif
#ifdef X86
#include "kernels_x86.h"
#endif

#define NUMBERED(SET)                                                                                                          \
    [FLOAT32_VALUES] = rows_float32_##SET, [BFLOAT16_VALUES] = rows_bfloat16_##SET, [FLOAT16_VALUES] = rows_float16_##SET,      \
    [DENSE_VALUES] = rows_dense_##SET, [DECODE_WORDS] = decode_words_##SET, [DECODE_NUMBERS] = decode_numbers_##SET,           \
    [INT8_FLOATS] = rows_int8_##SET, [INT4_FLOATS] = rows_int4_##SET,                                                          \
    [DECODE_INT8] = decode_int8_##SET, [DECODE_INT4] = decode_int4_##SET, [READ] = read_##SET

#define PLANES [INT8_PLANES] = rows_int8_planes, [INT4_PLANES] = rows_int4_planes

static Function *const functions[INSTRUCTION_SETS][FUNCTIONS] = {
    [PORTABLE] = {NUMBERED(portable)},
#ifdef ARM
    [NEON] = {NUMBERED(neon)},
    [NEON_DOTPROD] = {NUMBERED(neon), PLANES},
#endif
#ifdef X86
    [AVX2] = {NUMBERED(avx2)},
    [AVX512] = {NUMBERED(avx512), PLANES},
    [AVX512_BF16] = {NUMBERED(avx512), PLANES, [BFLOAT16_PAIRS] = rows_pairs, [DENSE_PAIRS] = rows_dense_pairs},
#endif
};
