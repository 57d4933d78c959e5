/* Bits of numbers: masks, and the types that values have. */

static ALWAYS_INLINE uint64_t read_mask(const uint8_t *p) {
    uint64_t w;
    memcpy(&w, p, 8);
    return w;
}

static ALWAYS_INLINE float from_bits(uint32_t bits) {
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

static ALWAYS_INLINE uint32_t to_bits(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return bits;
}

static ALWAYS_INLINE float from_bfloat16(uint16_t bits) { return from_bits((uint32_t)bits << 16); }

static ALWAYS_INLINE float from_float16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff;
    if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | rest << 13);
    if (rest >= 0x400) return from_bits(sign | ((rest << 13) + (112u << 23)));
    float number = (float)rest * 0x1p-24f; /* subnormal or zero */
    return sign ? -number : number;
}

static ALWAYS_INLINE uint16_t to_bfloat16(float number) {
    uint32_t bits = to_bits(number);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40); /* NaN */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Without branches, so that compilers vectorize it: the sum with a power of two rounds to the bits that float16 has. */
static ALWAYS_INLINE uint16_t to_float16(float number) {
    uint32_t bits = to_bits(number), size = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    uint32_t power = size < 0x38800000 ? 0x38800000 : size & 0x7f800000; /* at least the smallest normal number */
    uint32_t rounded = to_bits(from_bits(size) + from_bits(power + (13u << 23))) - (power + (13u << 23));
    uint32_t half = rounded + ((power - 0x38800000) >> 13);
    if (half > 0x7c00 || size >= 0x47800000) half = 0x7c00;
    if (size > 0x7f800000) half = 0x7e00;
    return (uint16_t)(sign | half);
}

/* Divide numbers by 2^64 if one is as large or larger, so that sums of them times integers times UNIT (kernels_types.h) do not
   overflow. Returns what a product is to be multiplied by. */
static float shrink(float *x, int64_t columns) {
    int32_t largest = 0;
    for (int64_t c = 0; c < columns; c++) {
        int32_t size = (int32_t)(to_bits(x[c]) & 0x7fffffff);
        largest = size > largest ? size : largest;
    }
    if (largest < (int32_t)to_bits(0x1p64f)) return 1;
    for (int64_t c = 0; c < columns; c++) x[c] *= 0x1p-64f;
    return 0x1p64f;
}
