/* The rows of a matrix, as many at once as ROWS says for the number of tokens: the end of kernels_tile.h and kernels_integers.h. */

#define TAKE(tokens)                                                                                   \
    for (; row + ROWS(tokens) <= stop; row += ROWS(tokens)) GLUE(tile_, NAME)(job, row, ROWS(tokens), tokens); \
    for (; row < stop; row++) GLUE(tile_, NAME)(job, row, 1, tokens)

static TARGET void GLUE(rows_, NAME)(const Job *job, int64_t row, int64_t stop) {
    switch (padded_tokens(job->tokens)) {
    case 1: TAKE(1); break;
    case 2: TAKE(2); break;
    case 4: TAKE(4); break;
    default: TAKE(8);
    }
}

#undef TAKE
