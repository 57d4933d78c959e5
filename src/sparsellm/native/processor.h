/* The instruction sets of an x86 processor that its operating system saves too, as the processor itself tells them.

   __builtin_cpu_supports is not used: the library that comes with a compiler answers it, and Zig 0.17's finds no set at all. */

#if defined(__x86_64__) && !defined(SPARSELLM_PORTABLE)
#include <cpuid.h>
#include <stdatomic.h>

enum {
    HAS_AVX2 = 1,   /* with fma popcnt f16c */
    HAS_AVX512 = 2, /* f dq bw vl */
    HAS_VNNI = 4,   /* avx512 with vbmi vbmi2 vnni */
    HAS_BF16 = 8,   /* avx512 with bf16 */
    IS_KNOWN = 16,
};

static inline int ask_processor(void) {
    unsigned a, b, c, d, a1, b1, c1, d1, low, high;
    if (!__get_cpuid(1, &a1, &b1, &c1, &d1) || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    const unsigned basic = 1u << 12 | 1u << 23 | 1u << 27 | 1u << 28 | 1u << 29; /* fma popcnt osxsave avx f16c */
    if ((c1 & basic) != basic) return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    int sets = (low & 6) == 6 && b >> 5 & 1 ? HAS_AVX2 : 0;
#ifndef SPARSELLM_NARROW
    const unsigned wide = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* avx512 f dq bw vl */
    const unsigned bytes = 1u << 1 | 1u << 6 | 1u << 11;              /* vbmi vbmi2 vnni */
    if ((low & 0xe6) != 0xe6 || (b & wide) != wide) return sets;
    sets |= HAS_AVX512;
    if ((c & bytes) == bytes) sets |= HAS_VNNI;
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 5 & 1) sets |= HAS_BF16;
#endif
    return sets;
}

/* Asked once: in a virtual machine the answer can take longer than a small product. */
static inline int processor_sets(void) {
    static atomic_int known;
    int sets = atomic_load_explicit(&known, memory_order_relaxed);
    if (!sets) atomic_store_explicit(&known, sets = ask_processor() | IS_KNOWN, memory_order_relaxed);
    return sets;
}
#endif
