/* The product of a few rows of integers, each group of columns with a scale, with a few tokens. Included once for each instruction
   set and each form of integers, with
     NAME, TARGET   suffix of the functions, and the attribute that compiles them for an instruction set
     X_BYTES        bytes of 64 prepared columns of a token
     SUMS, RESULT   types of the sums of a group and of what the groups add up to
     PARTS          equal parts of 64 columns that are taken one after the other
     VECTOR         type of the integers of a part
     PART(v, p, w, n)  a VECTOR of the n-th part of 64 columns, whose mask is w, from the values at p; moves p
     SPLIT(to, p)   where defined: PART's values are the 64 bytes at `to`, split from pairs of numbers of 4 bits at p. This is done one
                    word ahead: a load of bytes that two stores have just written waits for both, which took half of the time
     COLUMNS, LOAD(x, n)   type of a token's columns of a part, and the n-th part of 64 prepared columns at x
     KEEP_PART(columns)    as KEEP in kernels_tile.h
     START(job, t, group)           SUMS at the beginning of a group
     MULTIPLY_PART(sums, v, x, chain)   adds v * x of a part to sums, of which `chain` is 0, or alternates for few tokens
     SCALE(result, sums, scale)     result + scale * sums
     ROWS(tokens)   rows that are taken at once, 1, 2 or 4: they share the loads of x
     NOTHING, TOTAL_OF(result)    a RESULT of zero, and its sum in float32
   A row's sum is made in the same order whatever rows are beside it, so that results do not depend on the number of threads. */

static ALWAYS_INLINE TARGET void GLUE(tile_, NAME)(const Job *job, int64_t row, const int rows, const int tokens) {
    const int chains = tokens <= 2 ? 2 : 1; /* as in kernels_tile.h: more sums of more tokens do not fit into registers */
    const uint8_t *mask[4] = {0}, *p[4] = {0};
    const uint16_t *scales[4] = {0};
    RESULT results[4][PASS_TOKENS];
#ifdef SPLIT
    _Alignas(GROUP) uint8_t bytes[4][2][GROUP];
#endif
    UNROLL
    for (int i = 0; i < rows; i++) {
        mask[i] = job->mask + (row + i) * job->groups * 8;
        p[i] = (const uint8_t *)job->values + job->row_starts[row + i];
        scales[i] = job->scales + (row + i) * job->scale_groups;
#ifdef SPLIT
        if (job->groups) SPLIT(bytes[i][0], p[i]);
#endif
        UNROLL
        for (int t = 0; t < tokens; t++) results[i][t] = NOTHING;
    }
    for (int64_t group = 0, word = 0; group < job->scale_groups; group++) {
        int64_t end = job->groups - word < job->scale_words ? job->groups : word + job->scale_words;
        SUMS sums[4][PASS_TOKENS];
        UNROLL
        for (int i = 0; i < rows; i++) {
            if (group % 32 == 0) PREFETCH(scales[i] + group);
            UNROLL
            for (int t = 0; t < tokens; t++) sums[i][t] = START(job, t, group);
        }
        for (; word < end; word++) {
            const char *x = (const char *)job->x + word * X_BYTES;
            MASK w[4] = {0};
#ifdef SPLIT
            const uint8_t *q[4] = {0};
#else
            const uint8_t **q = p;
#endif
            UNROLL
            for (int i = 0; i < rows; i++) {
                w[i] = READ_MASK(mask[i] + word * 8);
                if (word % 8 == 0) __builtin_prefetch(mask[i] + (word + rows * job->groups) * 8, 0, 2);
                PREFETCH(p[i]); /* 64 columns move p by 64 bytes at most, so that every line is asked for */
#ifdef SPLIT
                q[i] = bytes[i][word & 1];
                p[i] += PAIRS(w[i]);
                SPLIT(bytes[i][~word & 1], p[i]); /* behind the last word, too, and not used */
#endif
            }
            UNROLL
            for (int n = 0; n < PARTS; n++) {
                VECTOR v[4];
                UNROLL
                for (int i = 0; i < rows; i++) PART(v[i], q[i], w[i], n);
                UNROLL
                for (int t = 0; t < tokens; t++) {
                    COLUMNS columns = LOAD(x + t * job->stride * X_BYTES / GROUP, n);
                    if (rows > 1) KEEP_PART(columns);
                    UNROLL
                    for (int i = 0; i < rows; i++) MULTIPLY_PART(sums[i][t], v[i], columns, n % chains);
                }
            }
        }
        UNROLL
        for (int i = 0; i < rows; i++) {
            float scale = from_bfloat16(scales[i][group]);
            UNROLL
            for (int t = 0; t < tokens; t++) results[i][t] = SCALE(results[i][t], sums[i][t], scale);
        }
    }
    UNROLL
    for (int i = 0; i < rows; i++)
        UNROLL
        for (int t = 0; t < tokens; t++)
            if (t < job->tokens) store(job, t, row + i, TOTAL_OF(results[i][t]) * job->factors[t]);
}

#include "kernels_rows.h"
