/* Threads that take chunks of a job's rows: those of the OpenMP library that torch uses, or else a pool.

   OpenMP's threads wait for work in a loop. Threads of our own beside them share the cores with these loops: two threads on two
   cores took up to a third longer. A forked child has none of OpenMP's threads and cannot start them; it uses the pool.

   `word` holds the job's number, its chunks and the next one to take, so that a thread takes a chunk by one compare-and-swap, and
   cannot take one of a job that has ended. The caller takes chunks too and waits for chunks, not for threads: a thread that the
   system has not woken costs nothing. */

typedef void Parallel(void (*function)(void *), void *argument, unsigned threads, unsigned flags);
static Parallel *openmp; /* its GOMP_parallel, or NULL */

enum { MAX_THREADS = 256, SPINS = 2000 /* about 50 microseconds, less than the time between two layers */ };

static struct {
    pthread_mutex_t lock;
    pthread_cond_t work;
    atomic_flag busy;                     /* a caller has the pool; another one works alone */
    _Atomic uint64_t word;                /* number << 32 | chunks << 16 | next chunk */
    atomic_int finished, sleeping, limit; /* chunks done, threads that wait, threads that may take chunks */
    int started;
    Job job;
    int64_t bounds[MAX_CHUNKS + 1];
    void *scratch;
    size_t scratch_bytes;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER, .busy = ATOMIC_FLAG_INIT};

static int take(void) {
    uint64_t word = atomic_load(&pool.word);
    do {
        if ((word & 0xffff) >= (word >> 16 & 0xffff)) return -1;
    } while (!atomic_compare_exchange_weak(&pool.word, &word, word + 1));
    return word & 0xffff;
}

static int work_on_job(void) {
    int chunk, count = 0;
    while ((chunk = take()) >= 0) {
        pool.job.function(&pool.job, pool.bounds[chunk], pool.bounds[chunk + 1]);
        atomic_fetch_add(&pool.finished, 1);
        count++;
    }
    return count;
}

static void work_in_parallel(void *unused) {
    (void)unused;
    work_on_job();
}

static int is_open(int index) {
    uint64_t word = atomic_load(&pool.word);
    return (word & 0xffff) < (word >> 16 & 0xffff) && index < atomic_load(&pool.limit);
}

static void *thread_main(void *argument) {
    int index = (int)(intptr_t)argument;
    for (;;) {
        int spins = 0;
        while (!is_open(index) && spins < SPINS) {
            pause_briefly();
            spins++;
        }
        if (!is_open(index)) {
            pthread_mutex_lock(&pool.lock);
            atomic_fetch_add(&pool.sleeping, 1);
            while (!is_open(index)) pthread_cond_wait(&pool.work, &pool.lock);
            atomic_fetch_sub(&pool.sleeping, 1);
            pthread_mutex_unlock(&pool.lock);
        }
        work_on_job();
    }
    return NULL;
}

/* A forked child has none of the threads, and locks in any state. */
static void reset_after_fork(void) {
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.work, NULL);
    atomic_store(&pool.word, 0);
    atomic_store(&pool.sleeping, 0);
    atomic_flag_clear(&pool.busy);
    pool.started = 0;
    openmp = NULL;
}

__attribute__((constructor)) static void register_reset(void) { pthread_atfork(NULL, NULL, reset_after_fork); }

/* Use the threads of an OpenMP library from now on. */
EXPORT void sparsellm_use_openmp(Parallel *parallel) { openmp = parallel; }

static void start_threads(int count) {
    sigset_t all, before; /* signals are for the threads of the program */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.started < count) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, thread_main, (void *)(intptr_t)pool.started)) break; /* fewer threads then */
        pthread_detach(thread);
        pool.started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Rows before which `part` of `parts` equal parts of the work lie. */
static int64_t split(const Job *job, int64_t part, int64_t parts) {
    int64_t low = 0, high = job->rows;
    if (part == parts) return high;
    if (!job->row_starts) return high / ROW_STEP * part / parts * ROW_STEP;
    int64_t first = job->row_starts[0];
    int64_t work = (job->row_starts[job->rows] - first + job->rows * job->columns / 4) / parts * part;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (job->row_starts[middle] - first + middle * job->columns / 4 < work) low = middle + 1;
        else high = middle;
    }
    return low / ROW_STEP * ROW_STEP;
}

/* Run a job whose caller has `busy`. */
static void run_with_pool(const Job *job, int threads) {
    int64_t chunks = (int64_t)threads * 6;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (chunks > job->rows / ROW_STEP) chunks = job->rows / ROW_STEP;
    if (chunks > MAX_CHUNKS) chunks = MAX_CHUNKS;
    if (threads == 1 || chunks < 2) {
        job->function(job, 0, job->rows);
        return;
    }
    if (!openmp && pool.started < threads - 1) start_threads(threads - 1);
    pool.job = *job;
    for (int64_t i = 0; i <= chunks; i++) pool.bounds[i] = split(job, i, chunks);
    atomic_store(&pool.finished, 0);
    atomic_store(&pool.limit, threads - 1);
    uint64_t number = (atomic_load(&pool.word) >> 32) + 1;
    atomic_store(&pool.word, number << 32 | (uint64_t)chunks << 16);
    if (openmp) {
        openmp(work_in_parallel, NULL, (unsigned)threads, 0);
        return;
    }
    if (atomic_load(&pool.sleeping)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.work);
        pthread_mutex_unlock(&pool.lock);
    }
    work_on_job();
    for (int spins = 0; atomic_load(&pool.finished) < chunks; spins++) {
        if (spins < SPINS) pause_briefly();
        else sched_yield(); /* the thread with the last chunk may need this core */
    }
}
