/* The product of a few rows of a matrix with a few tokens. kernels_types.h and kernels_x86.h include this file once for each
   instruction set and type of value, with
     NAME, TARGET   suffix of the functions, and the attribute that compiles them for an instruction set
     VALUE, X       types of the matrix's values and of the prepared tokens
     LANES          columns that one step covers; it divides 64
     SUM, VECTOR    types of a vector of sums and of a vector of values
     STEP(v, p, w, n)  v, a VECTOR of columns n * LANES to (n + 1) * LANES of 64, whose mask is w, from the values at p; moves p, or
                    all of the 64 columns' steps together do
     LOAD_X(p)      a vector of LANES prepared columns; KEEP(x) keeps it in a register, where compilers would load it for each row
     MULTIPLY(s, v, x)  s + v * x; ZERO, TOTAL(s), ADD(s, s)
     ROWS(tokens)   rows that are taken at once, 1, 2 or 4, as many as registers hold sums: they share the loads of x
     DENSE          1 if the values are a whole matrix without a mask, otherwise 0
   A row's sum is made in the same order whatever rows are beside it, so that results do not depend on the number of threads. */

static ALWAYS_INLINE TARGET void GLUE(tile_, NAME)(const Job *job, int64_t row, const int rows, const int tokens) {
    const int chains = tokens <= 2 ? 2 : 1; /* independent sums, since one addition waits for the one before */
    const uint8_t *mask[4] = {0};
    const VALUE *p[4] = {0};
    VALUE last[DENSE ? 4 : 1][GROUP] = {{0}}; /* a dense matrix's last columns, if they do not fill a group */
    SUM sums[4][PASS_TOKENS][2];
    UNROLL
    for (int i = 0; i < rows; i++) {
        if (!DENSE) mask[i] = job->mask + (row + i) * job->groups * 8;
        p[i] = (const VALUE *)job->values + (DENSE ? (row + i) * job->columns : job->row_starts[row + i]);
        UNROLL
        for (int t = 0; t < tokens; t++)
            for (int c = 0; c < 2; c++) sums[i][t][c] = ZERO;
    }
    for (int64_t group = 0; group < job->groups; group++) {
        const X *x = (const X *)job->x + group * GROUP;
        MASK w[4] = {0};
        UNROLL
        for (int i = 0; i < rows; i++) {
            if (!DENSE) w[i] = READ_MASK(mask[i] + group * 8);
            if (DENSE && group == job->columns / GROUP) {
                memcpy(last[DENSE * i], p[i], job->columns % GROUP * sizeof(VALUE));
                p[i] = last[DENSE * i];
            }
            if (!DENSE && group % 8 == 0) /* the mask's lines of the next rows */
                __builtin_prefetch(mask[i] + (group + rows * job->groups) * 8, 0, 2);
            /* All that a group can hold: kept values do not spread evenly, and a line that nobody asked for is waited for. */
            for (size_t byte = 0; byte < GROUP * sizeof(VALUE); byte += 64)
                PREFETCH((const char *)p[i] + byte);
        }
        UNROLL
        for (int n = 0; n < GROUP / LANES; n++) {
            VECTOR v[4];
            UNROLL
            for (int i = 0; i < rows; i++) STEP(v[i], p[i], w[i], n);
            UNROLL
            for (int t = 0; t < tokens; t++) {
                VECTOR columns = LOAD_X(x + t * job->stride + n * LANES);
                if (rows > 1) KEEP(columns);
                UNROLL
                for (int i = 0; i < rows; i++) sums[i][t][n % chains] = MULTIPLY(sums[i][t][n % chains], v[i], columns);
            }
        }
    }
    UNROLL
    for (int i = 0; i < rows; i++)
        UNROLL
        for (int t = 0; t < tokens; t++)
            if (t < job->tokens)
                store(job, t, row + i, TOTAL((chains == 1 ? sums[i][t][0] : ADD(sums[i][t][0], sums[i][t][1]))));
}

#include "kernels_rows.h"
