/* Products with matrices of which only the kept values are stored (extensions/packed/formats/bitmask.py), for few tokens.

   Plain C without Python and torch; kernels.py calls it through ctypes. hatch_build.py compiles it.
   Every function of an instruction set is compiled for it by an attribute and chosen at run time, so that one library serves all
   processors of an architecture. SPARSELLM_PORTABLE leaves them out, for compilers that do not know them, SPARSELLM_NARROW
   leaves out AVX-512, for tests (dev/as_processor.sh). */

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "masks are little-endian"
#endif
#if defined(__x86_64__) && !defined(SPARSELLM_PORTABLE)
#define X86 1
#include <immintrin.h>

#include "processor.h"
#elif defined(__aarch64__) && !defined(SPARSELLM_PORTABLE)
#define ARM 1
#include <arm_neon.h>
#ifdef __linux__
#include <sys/auxv.h>
#ifndef HWCAP_ASIMDDP
#define HWCAP_ASIMDDP (1 << 20)
#endif
#endif
#ifndef __clang__
/* GCC moves the loads of all 64 columns to their beginning and, without registers for them, keeps the sums in memory. */
#pragma GCC optimize("no-schedule-insns")
#endif
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define GLUE_(a, b) a##b
#define GLUE(a, b) GLUE_(a, b)
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 64")
#endif

enum {
    VERSION = 6, /* native.py has the same; a library of another version is not used */
    GROUP = 64,
    PAGE = 4096,
    PASS_TOKENS = 8,
    MAX_CHUNKS = 2048,
    MAX_SCALE_WORDS = 1 << 10, /* words of 64 columns with one scale, for each sum in a vector: kernels_planes.h */
    ROW_STEP = 4,     /* chunks are multiples of the rows that are taken at once */
};
enum { FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, DTYPES };
enum { PORTABLE, NEON, NEON_DOTPROD, AVX2, AVX512, AVX512_BF16, INSTRUCTION_SETS };

/* Ask for memory that is read soon, into the second cache: into the first one, or less far ahead, it is slower by up to a half
   (4096 x 11008 at 70 % on Zen 4, one thread: 1.44 ms; 8 KiB ahead into the first cache 2.34; without 2.24). An address
   behind the end does no harm. */
#define PREFETCH(p) __builtin_prefetch((const char *)(p) + 32768, 0, 2)

#include "kernels_numbers.h"

typedef struct Job Job;
typedef void Function(const Job *, int64_t row, int64_t stop);
struct Job {
    Function *function, *other; /* the other one for x that is not finite, if it makes a difference */
    const void *x;     /* (padded tokens, stride) float, or bfloat16 for the kernels that multiply it */
    int64_t stride;    /* columns, padded to groups */
    int64_t tokens;
    const uint8_t *mask;
    const void *values;
    const int64_t *row_starts;
    int64_t rows, columns, groups;
    const uint16_t *scales;            /* of integers: (rows, scale_groups) bfloat16 */
    int64_t scale_groups, scale_words; /* scales of a row, and groups of 64 columns that have one */
    int value_dtype;
    const char *starts;                /* what the sums of each token and each scale begin with: kernels_planes.h */
    float factors[PASS_TOKENS];         /* of each prepared token */
    const void *bias;  /* of x's type, or NULL */
    void *out;         /* (tokens, rows) of x's type; (rows, columns) of a decoded matrix */
    int dtype;         /* of x, bias and out: FLOAT32 or BFLOAT16 */
};

static ALWAYS_INLINE int padded_tokens(int64_t tokens) { return tokens <= 2 ? (int)tokens : tokens <= 4 ? 4 : PASS_TOKENS; }

static ALWAYS_INLINE void store(const Job *job, int64_t token, int64_t row, float sum) {
    if (job->dtype == BFLOAT16) {
        if (job->bias) sum += from_bfloat16(((const uint16_t *)job->bias)[row]);
        ((uint16_t *)job->out)[token * job->rows + row] = to_bfloat16(sum);
    } else {
        if (job->bias) sum += ((const float *)job->bias)[row];
        ((float *)job->out)[token * job->rows + row] = sum;
    }
}

/* Write 64 integers of a row, times their scale, as out's type; fewer if the row ends before. */
static ALWAYS_INLINE void write_scaled(const Job *job, int64_t row, int64_t group, const float *integers) {
    float numbers[GROUP], scale = from_bfloat16(job->scales[row * job->scale_groups + group / job->scale_words]);
    uint16_t words[GROUP];
    int64_t count = job->columns - group * GROUP < GROUP ? job->columns - group * GROUP : GROUP, first = row * job->columns + group * GROUP;
    for (int i = 0; i < GROUP; i++) numbers[i] = integers[i] * scale + 0.0f; /* no -0.0 of a negative scale */
    if (job->dtype == FLOAT32) {
        memcpy((float *)job->out + first, numbers, (size_t)count * 4);
        return;
    }
    if (job->dtype == BFLOAT16)
        for (int i = 0; i < GROUP; i++) words[i] = to_bfloat16(numbers[i]);
    else
        for (int i = 0; i < GROUP; i++) words[i] = to_float16(numbers[i]);
    memcpy((uint16_t *)job->out + first, words, (size_t)count * 2);
}

static ALWAYS_INLINE void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* `yield` returns at once on most processors */
#endif
}

/* Byte indices that move the kept ones of 8 words, or 4 numbers, to their columns; 0x80 makes a zero. `high_bytes` and
   `high_words` move 8 of them to the upper end of numbers of 32 bits each: for words, which are bfloat16, that makes them float32. */
static uint8_t word_places[256][16], number_places[16][16];
static _Alignas(64) uint8_t high_bytes[256][32], high_words[256][32];

__attribute__((constructor)) static void fill_tables(void) {
    memset(word_places, 0x80, sizeof word_places);
    memset(number_places, 0x80, sizeof number_places);
    memset(high_bytes, 0x80, sizeof high_bytes);
    memset(high_words, 0x80, sizeof high_words);
    for (int mask = 0; mask < 256; mask++)
        for (int column = 0, kept = 0; column < 8; column++) {
            if (!(mask >> column & 1)) continue;
            high_bytes[mask][4 * column + 3] = (uint8_t)kept;
            for (int byte = 0; byte < 2; byte++) high_words[mask][4 * column + 2 + byte] = (uint8_t)(2 * kept + byte);
            for (int byte = 0; byte < 2; byte++) word_places[mask][2 * column + byte] = (uint8_t)(2 * kept + byte);
            if (mask < 16)
                for (int byte = 0; byte < 4; byte++) number_places[mask][4 * column + byte] = (uint8_t)(4 * kept + byte);
            kept++;
        }
}

#include "kernels_sets.h"
#include "kernels_threads.h"

/* Bit i is set if this processor has instruction set i, and the library code for it. */
EXPORT int sparsellm_instruction_sets(void) {
    int sets = 1 << PORTABLE;
#ifdef ARM
    sets |= 1 << NEON;
#if defined(__ARM_FEATURE_DOTPROD) /* the whole library is compiled for it, as on Apple's processors */
    sets |= 1 << NEON_DOTPROD;
#elif defined(__linux__)
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) sets |= 1 << NEON_DOTPROD;
#endif
#elif defined(X86)
    int found = processor_sets();
    if (found & HAS_AVX2) sets |= 1 << AVX2;
#ifndef SPARSELLM_NARROW
    if (found & HAS_VNNI) sets |= 1 << AVX512;
    if (found & HAS_VNNI && found & HAS_BF16) sets |= 1 << AVX512_BF16;
#endif
#endif
    return sets;
}

EXPORT int sparsellm_version(void) { return VERSION; }

/* Copy x (tokens, columns) to rows of `stride` numbers of a type, padded by zeros. */
static void prepare(Job *job, char *to, const void *x, int to_dtype) {
#if defined(X86) || defined(ARM)
    if (to_dtype == INT8 && prepare_planes(job, to, x)) return;
#endif
    if (to_dtype == INT8) job->function = job->other, to_dtype = FLOAT32;
    size_t width = to_dtype == BFLOAT16 ? 2 : 4;
    memset(to, 0, (size_t)padded_tokens(job->tokens) * (size_t)job->stride * width);
    job->x = to;
    for (int64_t t = 0; t < job->tokens; t++) {
        char *row = to + (size_t)(t * job->stride) * width;
        job->factors[t] = 1;
        if (job->dtype == to_dtype) {
            memcpy(row, (const char *)x + (size_t)(t * job->columns) * width, (size_t)job->columns * width);
        } else {
            const uint16_t *words = (const uint16_t *)x + t * job->columns;
            for (int64_t c = 0; c < job->columns; c++) ((float *)row)[c] = from_bfloat16(words[c]);
        }
        if (job->scales) job->factors[t] = shrink((float *)row, job->columns);
    }
}

/* Bytes of prepared x: float32 or bfloat16, or bytes and what their sums begin with. */
static size_t scratch_bytes(const Job *job, int x_dtype) {
    int64_t width = x_dtype == INT8 ? (job->groups + job->scale_groups) * 3 * GROUP : job->stride * 4;
    return (size_t)(padded_tokens(job->tokens) * width) + 64;
}

/* Prepare x, if any, and run a job. x_dtype INT8 is three bytes for a number, or float32 and the job's other function if a number
   is not finite. Returns 0, or -1 if there is no memory. */
static int run(Job *job, const void *x, int x_dtype, int threads) {
    int pooled = !atomic_flag_test_and_set(&pool.busy);
    size_t bytes = !x ? 0 : scratch_bytes(job, x_dtype) > scratch_bytes(job, FLOAT32) ? scratch_bytes(job, x_dtype) : scratch_bytes(job, FLOAT32);
    void *own = NULL, *scratch = NULL;
    if (x && pooled) {
        if (pool.scratch_bytes < bytes) {
            free(pool.scratch);
            pool.scratch = malloc(bytes);
            pool.scratch_bytes = pool.scratch ? bytes : 0;
        }
        scratch = pool.scratch;
    } else if (x) {
        scratch = own = malloc(bytes);
    }
    if (x && !scratch) {
        if (pooled) atomic_flag_clear(&pool.busy);
        return -1;
    }
    if (x) prepare(job, (char *)(((uintptr_t)scratch + 63) & ~(uintptr_t)63), x, x_dtype);
    if (pooled) {
        run_with_pool(job, threads);
        atomic_flag_clear(&pool.busy);
    } else {
        job->function(job, 0, job->rows);
    }
    free(own);
    return 0;
}

/* Take the scales of integers, one for each group_size columns; 0 for whole rows. */
static void add_scales(Job *job, const uint16_t *scales, int64_t group_size) {
    job->scales = scales;
    job->scale_words = group_size && group_size < job->columns ? group_size / GROUP : job->groups;
    job->scale_groups = job->groups ? (job->groups + job->scale_words - 1) / job->scale_words : 0;
}

/* out = x W' + bias, for x (tokens, columns), PASS_TOKENS at a time at most. Without a mask, W is dense bfloat16. `set` is one that
   sparsellm_instruction_sets names. Integers have bfloat16 scales (rows, groups of group_size columns; 0 for whole rows). x, bias
   and out are of x_dtype, FLOAT32 or BFLOAT16. Returns 0, or -1 without memory. */
EXPORT int sparsellm_matmul(int set, int threads, const void *x, int x_dtype, int64_t tokens, const uint8_t *mask,
                            const void *values, int value_dtype, const int64_t *row_starts, const uint16_t *scales,
                            int64_t group_size, int64_t rows, int64_t columns, const void *bias, void *out) {
    if (tokens == 0 || rows == 0) return 0;
    int64_t groups = (columns + GROUP - 1) / GROUP;
    Job job = {.stride = groups * GROUP, .tokens = tokens, .mask = mask, .values = values, .row_starts = row_starts,
               .rows = rows, .columns = columns, .groups = groups, .bias = bias, .out = out, .dtype = x_dtype,
               .value_dtype = value_dtype};
    int kernel = value_dtype, other = DECODE_WORDS, dtype = FLOAT32;
    if (scales) {
        add_scales(&job, scales, group_size);
        kernel = other = value_dtype == INT8 ? INT8_FLOATS : INT4_FLOATS;
        if (functions[set][INT8_PLANES] && job.scale_words <= MAX_SCALE_WORDS * (set == NEON_DOTPROD ? 4 : 16)) {
            kernel = value_dtype == INT8 ? INT8_PLANES : INT4_PLANES;
            dtype = INT8;
        }
    } else if (mask == NULL) {
        kernel = DENSE_VALUES;
    }
    if (set == AVX512_BF16 && value_dtype == BFLOAT16 && x_dtype == BFLOAT16) {
        kernel = mask ? BFLOAT16_PAIRS : DENSE_PAIRS;
        dtype = BFLOAT16;
    }
    size_t width = x_dtype == BFLOAT16 ? 2 : 4;
    /* 16 registers hold the sums of 8 tokens of one row, and the first cache not the 8 tokens: 4 at a time are faster. */
    int64_t most = set == AVX2 ? PASS_TOKENS / 2 : PASS_TOKENS;
    for (int64_t t = 0; t < tokens; t += most) {
        job.tokens = tokens - t < most ? tokens - t : most;
        job.out = (char *)out + (size_t)(t * rows) * width;
        job.function = functions[set][kernel], job.other = functions[set][other];
        if (run(&job, (const char *)x + (size_t)(t * columns) * width, dtype, threads)) return -1;
    }
    return 0;
}

/* Decode rows start to stop into out (stop - start, columns): values as they are, and integers times their scales as out_dtype. */
EXPORT void sparsellm_decode(int set, int threads, const uint8_t *mask, const void *values, int value_dtype,
                             const int64_t *row_starts, const uint16_t *scales, int64_t group_size, int64_t start, int64_t stop,
                             int64_t columns, int out_dtype, void *out) {
    static const int kernels[] = {DECODE_NUMBERS, DECODE_WORDS, DECODE_WORDS, DECODE_INT8, DECODE_INT4};
    int64_t groups = (columns + GROUP - 1) / GROUP;
    Job job = {.mask = mask + start * groups * 8, .values = values, .row_starts = row_starts + start,
               .rows = stop - start, .columns = columns, .groups = groups, .out = out, .dtype = out_dtype};
    if (scales) {
        add_scales(&job, scales, group_size);
        job.scales += start * job.scale_groups;
    }
    job.function = functions[set][kernels[value_dtype]];
    run(&job, NULL, FLOAT32, threads);
}

/* Read whole pages of memory with all threads. */
EXPORT void sparsellm_read(int set, int threads, const char *data, int64_t pages) {
    Job job = {.function = functions[set][READ], .values = data, .rows = pages, .columns = PAGE};
    run(&job, NULL, FLOAT32, threads);
}
