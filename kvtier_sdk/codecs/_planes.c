/* Codes and decodes payloads of floats, without the interpreter lock.
 * planes.py describes the formats, and _planes.pyi describes the functions. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000 /* one build for Python 3.11 and all later versions */
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __x86_64__
#include <immintrin.h>
#define VECTORS __attribute__((target("avx2,popcnt")))
#elif defined __aarch64__
#include <arm_neon.h>
#define VECTORS
#else
#error "compression is for x86-64 and ARM"
#endif

#define INLINE static inline __attribute__((always_inline))

#define BLOCK 16384
#define UNIT 128
#define LAYERS 4
#define SYMBOLS 3
#define SAMPLE_STEP 31
#define GROUP 64
#define ROW 16
#define HEAD_BYTES (LAYERS * 2 + LAYERS * SYMBOLS)
#define FORMAT 1
#define LEAST_GAIN 16 /* a coded payload is at least a sixteenth shorter */

#define EACH_BYTE 0x0101010101010101u

struct kind {
    unsigned bytes, exponent_bits, least_scale, most_scale; /* scales of rounded kinds only */
};
static const struct kind kinds[] = {{2, 8, 0, 0}, {2, 5, 0, 0},    {1, 4, 0, 0},
                                    {1, 5, 0, 0}, {2, 8, 19, 254}, {2, 5, 120, 142}};
#define FLOAT8 4 /* the first kind that is rounded to float8_e4m3fn */

/* An element of a payload, or a count in a head, which may begin at an odd address. */
typedef uint16_t __attribute__((aligned(1), may_alias)) element16;

/* The processors above are little-endian, like the format. */
struct footer {
    char magic[4];
    uint16_t format, number;
    uint64_t payload_bytes;
};

/* The memory for one call. Vectors may read and write up to 16 bytes after an array's elements. */
struct scratch {
    uint8_t exponents[BLOCK + GROUP];
    uint8_t rare[BLOCK + GROUP];
    uint8_t rest[BLOCK];
    uint8_t coded[HEAD_BYTES + LAYERS * BLOCK / 4 + BLOCK];
    uint32_t table[]; /* the lengths of the payload's blocks */
};

static size_t round_up(size_t size, size_t step)
{
    return (size + step - 1) / step * step;
}

/* Pack `width` bits of each value, from bit `shift` on, into a plane. Byte j of each 16 bytes of a
 * plane has the bits of the elements j, 16 + j, 32 + j and so on. The loop packs eight bytes as one
 * word, because no bit crosses a byte boundary. */
INLINE uint8_t *pack(const uint8_t *values, size_t count, unsigned shift, unsigned width,
                     uint8_t *restrict plane)
{
    const uint64_t mask = EACH_BYTE * ((1u << width) - 1);
    const unsigned parts = 8 / width;
    for (size_t first = 0; first < count; first += parts * ROW, plane += ROW)
        for (unsigned half = 0; half < ROW; half += 8) {
            uint64_t packed = 0, word;
            for (unsigned part = 0; part < parts; part++) {
                memcpy(&word, values + first + part * ROW + half, 8);
                packed |= (word >> shift & mask) << (part * width);
            }
            memcpy(plane + half, &packed, 8);
        }
    return plane;
}

/* Add a plane's bits to values. */
INLINE const uint8_t *unpack(uint8_t *restrict values, size_t count, unsigned shift,
                             unsigned width, const uint8_t *plane)
{
    const uint64_t mask = EACH_BYTE * ((1u << width) - 1);
    const unsigned parts = 8 / width;
    for (size_t first = 0; first < count; first += parts * ROW, plane += ROW)
        for (unsigned half = 0; half < ROW; half += 8) {
            uint64_t packed, word;
            memcpy(&packed, plane + half, 8);
            for (unsigned part = 0; part < parts; part++) {
                uint8_t *place = values + first + part * ROW + half;
                memcpy(&word, place, 8);
                word |= (packed >> (part * width) & mask) << shift;
                memcpy(place, &word, 8);
            }
        }
    return plane;
}

/* An element's rest is its sign and mantissa. The bits of a rest after the first eight, or all bits
 * of a shorter rest, are stored in planes. */
INLINE unsigned rest_bits(struct kind kind)
{
    return 8 * kind.bytes - kind.exponent_bits;
}

/* Write a block's rests to `coded`, and its exponents to the scratch. */
INLINE void split(struct kind kind, const uint8_t *plain, size_t count, uint8_t *restrict coded,
                  struct scratch *restrict scratch)
{
    const unsigned bits = rest_bits(kind), top = 8 * kind.bytes - 1;
    for (size_t at = 0; at < count; at++) {
        uint16_t element = kind.bytes == 2 ? ((const element16 *)plain)[at] : plain[at];
        /* Rotate the sign to the end, so that the exponent comes first. */
        uint16_t turned = (uint16_t)(element << 1 | element >> top);
        if (kind.bytes == 1)
            turned = (uint8_t)turned;
        scratch->exponents[at] = (uint8_t)(turned >> bits);
        if (kind.bytes == 2)
            coded[at] = (uint8_t)turned;
        if (bits % 8 != 0)
            scratch->rest[at] = (uint8_t)(turned >> (8 * kind.bytes - 8));
    }
    coded += count * (kind.bytes - 1);
    if (bits % 8 == 4)
        pack(scratch->rest, count, 0, 4, coded);
    if (bits % 8 == 3)
        pack(scratch->rest, count, 2, 1, pack(scratch->rest, count, 0, 2, coded));
}

INLINE void join(struct kind kind, uint8_t *restrict plain, size_t count, const uint8_t *coded,
                 struct scratch *restrict scratch)
{
    const unsigned bits = rest_bits(kind), top = 8 * kind.bytes - 1;
    const uint8_t *planes = coded + count * (kind.bytes - 1);
    if (bits % 8 != 0)
        memset(scratch->rest, 0, count);
    if (bits % 8 == 4)
        unpack(scratch->rest, count, 0, 4, planes);
    if (bits % 8 == 3)
        unpack(scratch->rest, count, 2, 1, unpack(scratch->rest, count, 0, 2, planes));
    for (size_t at = 0; at < count; at++) {
        uint16_t turned = (uint16_t)(scratch->exponents[at] << bits);
        if (kind.bytes == 1)
            turned = (uint8_t)turned;
        if (kind.bytes == 2)
            turned |= coded[at];
        if (bits % 8 != 0)
            turned |= (uint16_t)(scratch->rest[at] << (8 * kind.bytes - 8));
        uint16_t element = (uint16_t)(turned >> 1 | turned << top);
        if (kind.bytes == 2)
            ((element16 *)plain)[at] = element;
        else
            plain[at] = (uint8_t)element;
    }
}

typedef uint8_t row __attribute__((vector_size(ROW)));
typedef uint64_t halves __attribute__((vector_size(ROW)));

/* For each byte: the positions of its set bits, and for each set bit the number of set bits before
 * it. Unused entries are 0x80, for which pick returns 0. */
static uint8_t places[256][8], ranks[256][8];
VECTORS INLINE row load(const uint8_t *from)
{
    row loaded;
    memcpy(&loaded, from, ROW);
    return loaded;
}

/* bits_of returns one bit for each byte, which is 0 or 255. look_up replaces each byte by the
 * table's byte at that index. pick permutes the eight bytes at `low`, and the eight at `high`. */
#ifdef __x86_64__
VECTORS INLINE unsigned bits_of(row bytes)
{
    return (unsigned)_mm_movemask_epi8((__m128i)bytes);
}

VECTORS INLINE row look_up(row table, row bytes)
{
    return (row)_mm_shuffle_epi8((__m128i)table, (__m128i)bytes);
}

VECTORS INLINE row pick(const uint8_t *low, const uint8_t *from_low, const uint8_t *high,
                        const uint8_t *from_high)
{
    __m128i first = _mm_loadl_epi64((const __m128i *)low);
    __m128i second = _mm_loadl_epi64((const __m128i *)high);
    first = _mm_shuffle_epi8(first, _mm_loadl_epi64((const __m128i *)from_low));
    second = _mm_shuffle_epi8(second, _mm_loadl_epi64((const __m128i *)from_high));
    return (row)_mm_unpacklo_epi64(first, second);
}
#else
VECTORS INLINE unsigned bits_of(row bytes)
{
    const uint8x16_t weights = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    uint8x16_t bits = vandq_u8((uint8x16_t)bytes, weights);
    return vaddv_u8(vget_low_u8(bits)) | (unsigned)vaddv_u8(vget_high_u8(bits)) << 8;
}

VECTORS INLINE row look_up(row table, row bytes)
{
    return (row)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)bytes);
}

VECTORS INLINE row pick(const uint8_t *low, const uint8_t *from_low, const uint8_t *high,
                        const uint8_t *from_high)
{
    return (row)vcombine_u8(vtbl1_u8(vld1_u8(low), vld1_u8(from_low)),
                            vtbl1_u8(vld1_u8(high), vld1_u8(from_high)));
}
#endif

/* Code whole groups of values in two bits each. Move the values that are not among the symbols to
 * the array's beginning, and return their number. */
VECTORS static size_t narrow(uint8_t *values, size_t count, const uint8_t *symbols,
                             uint8_t *codes)
{
    uint8_t *rare = values;
    const row zero = {0}, one = zero + symbols[0], two = zero + symbols[1],
              three = zero + symbols[2];
    for (size_t first = 0; first < count; first += GROUP, codes += ROW) {
        row packed = zero;
        for (unsigned part = 0; part < 4; part++) {
            uint8_t *from = values + first + part * ROW;
            row value = load(from);
            /* A comparison yields 255 for true. */
            row is_one = (row)(value == one), is_two = (row)(value == two);
            row code = (row)(value == three) + SYMBOLS - (is_one & 3) - (is_two & 2);
            packed |= code << (2 * part);
            unsigned bits = bits_of((row)(code == SYMBOLS)), low = bits & 255, high = bits >> 8;
            row picked = pick(from, places[low], from + 8, places[high]);
            memcpy(rare, &(uint64_t){((halves)picked)[0]}, 8);
            rare += __builtin_popcount(low);
            memcpy(rare, &(uint64_t){((halves)picked)[1]}, 8);
            rare += __builtin_popcount(high);
        }
        memcpy(codes, &packed, ROW);
    }
    return (size_t)(rare - values);
}

/* Decode groups of values, and return the number of rare values that the codes use. */
VECTORS static size_t widen(uint8_t *restrict values, size_t count, const uint8_t *symbols,
                            const uint8_t *codes, const uint8_t *rare)
{
    const uint8_t *next = rare;
    const row table = {symbols[0], symbols[1], symbols[2]};
    for (size_t first = 0; first < count; first += GROUP, codes += ROW) {
        row packed = load(codes);
        for (unsigned part = 0; part < 4; part++) {
            row code = (packed >> (2 * part)) & SYMBOLS;
            unsigned bits = bits_of((row)(code == SYMBOLS)), low = bits & 255, high = bits >> 8;
            const uint8_t *middle = next + __builtin_popcount(low);
            row value = look_up(table, code) | pick(next, ranks[low], middle, ranks[high]);
            next = middle + __builtin_popcount(high);
            memcpy(values + first + part * ROW, &value, ROW);
        }
    }
    return (size_t)(next - rare);
}

/* Choose the commonest exponents of a sample. The smaller of two equally common ones wins. */
static void choose_symbols(const uint8_t *exponents, size_t count, uint8_t *symbols)
{
    unsigned counts[256] = {0}, ranked[LAYERS * SYMBOLS] = {0};
    for (size_t at = 0; at < count; at += SAMPLE_STEP)
        counts[exponents[at]]++;
    for (unsigned exponent = 0; exponent < 256; exponent++) {
        unsigned rank = counts[exponent] << 8 | (255 - exponent);
        unsigned at = LAYERS * SYMBOLS;
        if (rank <= ranked[at - 1])
            continue;
        for (; at > 1 && ranked[at - 2] < rank; at--)
            ranked[at - 1] = ranked[at - 2];
        ranked[at - 1] = rank;
    }
    for (unsigned at = 0; at < LAYERS * SYMBOLS; at++)
        symbols[at] = (uint8_t)(255 - (ranked[at] & 255));
}

INLINE float float_of(uint32_t bits)
{
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

INLINE uint32_t float_bits(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

/* Return a power of two, given its biased exponent. */
INLINE float power(unsigned exponent)
{
    return float_of(exponent << 23);
}

/* Select without a branch, so that the compiler can use vector instructions. */
INLINE uint32_t choose(bool is_first, uint32_t first, uint32_t second)
{
    return second ^ ((first ^ second) & (0u - is_first));
}

/* A processor may flush denormal floats to zero, so the arithmetic below avoids them. */
INLINE float from_element(struct kind kind, uint32_t magnitude)
{
    if (kind.exponent_bits == 8)
        return float_of(magnitude << 16);
    uint32_t normal = (magnitude << 13) + (112u << 23);
    float denormal = float_of((magnitude << 13) + (113u << 23)) - power(113);
    return float_of(choose(magnitude < 1u << 10, float_bits(denormal), normal));
}

INLINE uint16_t to_element(struct kind kind, float number)
{
    uint32_t bits = float_bits(number);
    if (kind.exponent_bits == 8)
        return (uint16_t)(bits >> 16);
    uint32_t normal = (bits >> 13) - (112u << 10);
    uint32_t denormal = float_bits(number + power(126)) - float_bits(power(126));
    return (uint16_t)choose(bits < 113u << 23, denormal, normal);
}

/* Round a unit; return false if an element is not finite. */
INLINE bool round_unit(struct kind kind, const element16 *plain, uint8_t *restrict coded)
{
    int16_t largest = 0;
    for (unsigned at = 0; at < UNIT; at++) {
        int16_t magnitude = (int16_t)(plain[at] & 0x7fff);
        largest = magnitude > largest ? magnitude : largest;
    }
    /* After scaling and rounding, the largest element is 256 to 448. */
    uint32_t scale = (float_bits(from_element(kind, (uint16_t)largest)) + 0x17ffff) >> 23;
    scale = scale < kind.least_scale ? kind.least_scale : scale;
    scale = scale > kind.most_scale ? kind.most_scale : scale;
    float factor = power(262 - scale);
    coded[0] = (uint8_t)scale;
    for (unsigned at = 0; at < UNIT; at++) {
        float number = from_element(kind, plain[at] & 0x7fff) * factor;
        uint32_t bits = float_bits(number);
        uint32_t normal = (bits - (120u << 23) + 0x7ffff + (bits >> 20 & 1)) >> 20;
        uint32_t denormal = float_bits(number + power(141)) - float_bits(power(141));
        uint32_t code = choose(bits < 121u << 23, denormal, normal);
        code = choose(code > 126, 126, code);
        coded[1 + at] = (uint8_t)(code | (plain[at] >> 8 & 0x80));
    }
    return largest >> (15 - kind.exponent_bits) != (1 << kind.exponent_bits) - 1;
}

INLINE bool restore_unit(struct kind kind, element16 *restrict plain, const uint8_t *coded)
{
    if (coded[0] < kind.least_scale || coded[0] > kind.most_scale)
        return false;
    float factor = power(coded[0] - 8u);
    for (unsigned at = 0; at < UNIT; at++) {
        uint32_t code = coded[1 + at] & 127;
        uint32_t normal = (code << 20) + (120u << 23);
        float denormal = float_of((code << 20) + (121u << 23)) - power(121);
        float number = float_of(choose(code < 8, float_bits(denormal), normal)) * factor;
        plain[at] = (uint16_t)(to_element(kind, number) | (coded[1 + at] & 128) << 8);
    }
    return true;
}

INLINE bool round_block(struct kind kind, const uint8_t *plain, size_t count, uint8_t *coded)
{
    for (size_t at = 0; at < count; at += UNIT, coded += 1 + UNIT)
        if (!round_unit(kind, (const element16 *)plain + at, coded))
            return false;
    return true;
}

INLINE bool restore_block(struct kind kind, uint8_t *plain, size_t count, const uint8_t *coded)
{
    for (size_t at = 0; at < count; at += UNIT, coded += 1 + UNIT)
        if (!restore_unit(kind, (element16 *)plain + at, coded))
            return false;
    return true;
}

/* Code a block, and return its coded length, or its plain length if it is stored unchanged. */
static size_t encode_block(unsigned number, const uint8_t *plain, size_t count, uint8_t *coded,
                           struct scratch *scratch)
{
    size_t plain_bytes = count * kinds[number].bytes, kept = count / 8 * rest_bits(kinds[number]);
    /* Constant kinds let the compiler use vector instructions. */
    if (number >= FLOAT8) {
        if (number == FLOAT8 ? round_block(kinds[FLOAT8], plain, count, coded)
                             : round_block(kinds[FLOAT8 + 1], plain, count, coded))
            return count / UNIT * (1 + UNIT);
        memcpy(coded, plain, plain_bytes);
        return plain_bytes;
    }
    uint8_t *exponents = scratch->exponents, *head = scratch->coded, *at = head + HEAD_BYTES;
    uint8_t *symbols = head + LAYERS * 2;
    switch (number) {
    case 0: split(kinds[0], plain, count, coded, scratch); break;
    case 1: split(kinds[1], plain, count, coded, scratch); break;
    case 2: split(kinds[2], plain, count, coded, scratch); break;
    default: split(kinds[3], plain, count, coded, scratch);
    }
    choose_symbols(exponents, count, symbols);
    for (unsigned layer = 0; layer < LAYERS; layer++, symbols += SYMBOLS) {
        size_t padded = round_up(count, GROUP);
        memset(exponents + count, symbols[0], padded - count);
        count = narrow(exponents, padded, symbols, at);
        ((element16 *)head)[layer] = (uint16_t)count;
        at += padded / 4;
    }
    memcpy(at, exponents, count);
    size_t length = (size_t)(at - head) + count;
    if (kept + length < plain_bytes) {
        memcpy(coded + kept, head, length);
        return kept + length;
    }
    memcpy(coded, plain, plain_bytes);
    return plain_bytes;
}

/* Decode a block; return false if it is malformed. */
static bool decode_block(unsigned number, uint8_t *plain, size_t count, const uint8_t *coded,
                         size_t length, struct scratch *scratch)
{
    if (number >= FLOAT8)
        return length == count / UNIT * (1 + UNIT)
               && (number == FLOAT8 ? restore_block(kinds[FLOAT8], plain, count, coded)
                                    : restore_block(kinds[FLOAT8 + 1], plain, count, coded));
    size_t kept = count / 8 * rest_bits(kinds[number]), counts[LAYERS + 1] = {count};
    if (length < kept + HEAD_BYTES)
        return false;
    const uint8_t *head = coded + kept, *symbols = head + HEAD_BYTES, *at = coded + length;
    size_t needed = kept + HEAD_BYTES;
    for (unsigned layer = 0; layer < LAYERS; layer++) {
        counts[layer + 1] = ((const element16 *)head)[layer];
        if (counts[layer + 1] > counts[layer])
            return false;
        needed += round_up(counts[layer], GROUP) / 4;
    }
    if (needed + counts[LAYERS] != length)
        return false;
    /* Widen from the last layer to the first, alternating between two arrays. Damaged codes may use
     * more rare values than there are, but never more than fit into an array. */
    uint8_t *values = scratch->rare, *rare = scratch->exponents;
    at -= counts[LAYERS];
    memcpy(rare, at, counts[LAYERS]);
    for (unsigned layer = LAYERS; layer-- > 0;) {
        size_t padded = round_up(counts[layer], GROUP);
        at -= padded / 4;
        symbols -= SYMBOLS;
        if (widen(values, padded, symbols, at, rare) != counts[layer + 1])
            return false;
        uint8_t *widened = values;
        values = rare;
        rare = widened;
    }
    switch (number) {
    case 0: join(kinds[0], plain, count, coded, scratch); break;
    case 1: join(kinds[1], plain, count, coded, scratch); break;
    case 2: join(kinds[2], plain, count, coded, scratch); break;
    default: join(kinds[3], plain, count, coded, scratch);
    }
    return true;
}

/* The division of a payload into blocks. The bytes after the blocks are stored unchanged. */
struct layout {
    unsigned bytes; /* of an element */
    size_t elements, blocks, table_bytes;
};

static struct layout layout_of(unsigned number, size_t payload_bytes)
{
    struct layout layout = {.bytes = kinds[number].bytes};
    layout.elements = payload_bytes / layout.bytes / UNIT * UNIT;
    layout.blocks = (layout.elements + BLOCK - 1) / BLOCK;
    layout.table_bytes = layout.blocks * sizeof(uint32_t);
    return layout;
}

static size_t block_count(const struct layout *layout, size_t block)
{
    size_t count = layout->elements - block * BLOCK;
    return count < BLOCK ? count : BLOCK;
}

/* Encode a payload, and return its coded length, or 0 if it gains too little. */
static size_t encode(unsigned number, const uint8_t *payload, size_t payload_bytes,
                     uint8_t *stored, size_t alignment, struct scratch *scratch)
{
    struct layout layout = layout_of(number, payload_bytes);
    struct footer footer = {"KVPL", FORMAT, (uint16_t)number, payload_bytes};
    size_t length = 0, at = 0, trailer = layout.table_bytes + sizeof footer;
    for (size_t block = 0; block < layout.blocks; block++) {
        size_t count = block_count(&layout, block);
        size_t coded = encode_block(number, payload + at, count, stored + length, scratch);
        scratch->table[block] = (uint32_t)coded;
        at += count * layout.bytes;
        length += coded;
    }
    size_t stored_bytes = round_up(length + (payload_bytes - at) + trailer, alignment);
    if (stored_bytes > payload_bytes - payload_bytes / LEAST_GAIN)
        return 0;
    memcpy(stored + length, payload + at, payload_bytes - at);
    length += payload_bytes - at;
    memset(stored + length, 0, stored_bytes - trailer - length);
    memcpy(stored + stored_bytes - trailer, scratch->table, layout.table_bytes);
    memcpy(stored + stored_bytes - sizeof footer, &footer, sizeof footer);
    return stored_bytes;
}

/* Decode a payload in place; return false if it is malformed.
 *
 * No coded block is longer than its plain block, so none begins after its place in the payload. If
 * the last block is decoded first, no block overwrites one that is not decoded yet. A coded block
 * that overlaps its own place is copied first. */
static bool decode(unsigned number, uint8_t *memory, size_t stored_bytes, size_t payload_bytes,
                   struct scratch *scratch)
{
    struct layout layout = layout_of(number, payload_bytes);
    struct footer footer = {"KVPL", FORMAT, (uint16_t)number, payload_bytes};
    size_t trailer = layout.table_bytes + sizeof footer, length = 0;
    if (stored_bytes < trailer
        || memcmp(&footer, memory + stored_bytes - sizeof footer, sizeof footer) != 0)
        return false;
    memcpy(scratch->table, memory + stored_bytes - trailer, layout.table_bytes);
    for (size_t block = 0; block < layout.blocks; block++) {
        size_t coded = scratch->table[block];
        if (coded > block_count(&layout, block) * layout.bytes)
            return false;
        length += coded;
    }
    size_t at = layout.elements * layout.bytes;
    if (length + (payload_bytes - at) + trailer > stored_bytes)
        return false;
    memmove(memory + at, memory + length, payload_bytes - at);
    for (size_t block = layout.blocks; block-- > 0;) {
        size_t count = block_count(&layout, block), plain_bytes = count * layout.bytes;
        size_t coded = scratch->table[block];
        length -= coded;
        at -= plain_bytes;
        const uint8_t *from = memory + length;
        if (coded == plain_bytes) {
            memmove(memory + at, from, coded);
            continue;
        }
        if (length + coded > at)
            from = memcpy(scratch->coded, from, coded);
        if (!decode_block(number, memory + at, count, from, coded, scratch))
            return false;
    }
    return true;
}

static struct scratch *make_scratch(unsigned number, bool is_usable, Py_ssize_t payload_bytes)
{
    if (number >= sizeof kinds / sizeof *kinds || !is_usable) {
        PyErr_SetString(PyExc_ValueError, "wrong kind, length or alignment");
        return NULL;
    }
    size_t table_bytes = layout_of(number, (size_t)payload_bytes).table_bytes;
    struct scratch *scratch = malloc(sizeof *scratch + table_bytes);
    if (scratch == NULL)
        PyErr_NoMemory();
    return scratch;
}

static PyObject *py_encode(PyObject *module, PyObject *arguments)
{
    Py_buffer payload, stored;
    Py_ssize_t alignment;
    unsigned number;
    if (!PyArg_ParseTuple(arguments, "Iy*w*n", &number, &payload, &stored, &alignment))
        return NULL;
    bool is_usable = alignment > 0 && stored.len >= payload.len;
    struct scratch *scratch = make_scratch(number, is_usable, payload.len);
    PyObject *result = NULL;
    if (scratch != NULL) {
        size_t stored_bytes;
        Py_BEGIN_ALLOW_THREADS
        stored_bytes = encode(number, payload.buf, (size_t)payload.len, stored.buf,
                              (size_t)alignment, scratch);
        Py_END_ALLOW_THREADS
        result = PyLong_FromSize_t(stored_bytes);
    }
    free(scratch);
    PyBuffer_Release(&payload);
    PyBuffer_Release(&stored);
    return result;
}

static PyObject *py_decode(PyObject *module, PyObject *arguments)
{
    Py_buffer memory;
    Py_ssize_t stored_bytes, payload_bytes;
    unsigned number;
    if (!PyArg_ParseTuple(arguments, "Iw*nn", &number, &memory, &stored_bytes, &payload_bytes))
        return NULL;
    bool is_usable = 0 <= stored_bytes && stored_bytes <= payload_bytes
                     && payload_bytes <= memory.len;
    struct scratch *scratch = make_scratch(number, is_usable, payload_bytes);
    PyObject *result = NULL;
    if (scratch != NULL) {
        bool is_good;
        Py_BEGIN_ALLOW_THREADS
        is_good = decode(number, memory.buf, (size_t)stored_bytes, (size_t)payload_bytes, scratch);
        Py_END_ALLOW_THREADS
        result = PyBool_FromLong(is_good);
    }
    free(scratch);
    PyBuffer_Release(&memory);
    return result;
}

static PyMethodDef methods[] = {
    {"encode", py_encode, METH_VARARGS, NULL},
    {"decode", py_decode, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

/* Fill the tables, unless this processor lacks the instructions for vectors. */
static int start(PyObject *module)
{
#ifdef __x86_64__
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("popcnt")) {
        PyErr_SetString(PyExc_ImportError, "this processor has no AVX2");
        return -1;
    }
#endif
    memset(places, 0x80, sizeof places);
    memset(ranks, 0x80, sizeof ranks);
    for (unsigned bits = 0; bits < 256; bits++)
        for (uint8_t at = 0, rank = 0; at < 8; at++)
            if (bits >> at & 1) {
                places[bits][rank] = at;
                ranks[bits][at] = rank++;
            }
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, start}, {0, NULL}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_planes",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__planes(void)
{
    return PyModuleDef_Init(&definition);
}
