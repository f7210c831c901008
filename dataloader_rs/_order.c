/* The shuffled order, in two ways chosen by length alone. It knows nothing of threads, Python or batches.
 *
 * Up to DLRS_ORDER_TABLE_MAX the order is a table shuffled by Fisher-Yates: exactly uniform as far as its random
 * numbers are, which is what a user with ten items and a chi-square test expects.
 *
 * Above, a table would cost 8 bytes an item and a pause at the start of every epoch, so the order is computed. The
 * position is cut into a left and a right half, and each half-round XORs onto one half a keyed hash of the other:
 *
 *     left ^= hash(right, key 0);  right ^= hash(left, key 1);  left ^= hash(right, key 2);  ...
 *
 * A half-round undoes itself, since the half it hashes is still there, so whatever the hash is, any number of them
 * is a permutation of the block of 2^(left_bits + right_bits) numbers, and it runs backwards with the keys
 * reversed. The block may be larger than the order: a number that falls outside goes through again until one falls
 * inside ("cycle walking"). That ends, because the walk follows a cycle of the block's permutation and the cycle
 * returns to the position it left from, which is inside; and it is one to one, because walking the same cycle
 * backwards finds the way home. The block is the smallest power of two that holds the order, more than half of it
 * is inside, and so the mean walk is below two steps.
 *
 * Nothing here is secret: the order has to look shuffled to statistics, not withstand an adversary. */
#include "_order.h"

#include <assert.h>
#include <stdlib.h>

_Static_assert(DLRS_ORDER_TABLE_MAX <= UINT32_C(65536), "an index of a table has 16 bits");
/* A hash of few bits repeats itself too often to shuffle well: with blocks below 2^8 the permutations of a small
 * order are visibly uneven at any sensible number of rounds. The table takes those lengths away. */
_Static_assert(DLRS_ORDER_TABLE_MAX >= UINT32_C(32768), "a computed order has halves of at least 8 bits");
/* Why eight: four can be told from chance (test_halves_hide_a_difference), and more than six is the advice of
 * Patarin ("Generic attacks on Feistel schemes", 2001) where many permutations are made of few bits, as here, one
 * an epoch. */
_Static_assert(DLRS_ORDER_ROUNDS % 2 == 0, "half-rounds go in pairs, one for each half");

/* ---- random numbers: splitmix64 ---- */

#define GOLDEN_GAMMA UINT64_C(0x9e3779b97f4a7c15)

/* One to one, and every bit of the result depends on every bit of x (Stafford's variant 13). */
static uint64_t mix64(uint64_t x)
{
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static uint32_t next32(uint64_t *state)
{
    *state += GOLDEN_GAMMA;
    return (uint32_t)(mix64(*state) >> 32);
}

/* The state the random numbers of an epoch start from. Epochs of one seed never share it, nor do seeds at one
 * epoch, as each step is one to one. The seed is mixed before the epoch is added, so that the pairs (1, 0) and
 * (0, 1) have no more in common than any two. The sum is mixed again because otherwise the next epoch would start
 * one gamma on, and draw the numbers of this one shifted by one. */
static uint64_t epoch_state(uint64_t seed, uint64_t epoch)
{
    return mix64(mix64(seed + GOLDEN_GAMMA) + epoch * GOLDEN_GAMMA);
}

/* ---- the table ---- */

/* A number below `bound`, each equally likely (Lemire, arXiv 1805.10941). The high word of the product is the
 * number; 2^32 mod bound of the low words at the bottom would make some numbers likelier and are drawn again. */
static uint32_t draw_below(uint64_t *state, uint32_t bound)
{
    uint64_t product = (uint64_t)next32(state) * bound;
    if ((uint32_t)product < bound) {
        uint32_t surplus = (UINT32_MAX - bound + 1) % bound; /* 2^32 mod bound */
        while ((uint32_t)product < surplus)
            product = (uint64_t)next32(state) * bound;
    }
    return (uint32_t)(product >> 32);
}

/* Knuth, TAOCP vol. 2, section 3.4.2, algorithm P. */
static void shuffle(uint16_t *table, uint32_t length, uint64_t state)
{
    for (uint32_t i = 0; i < length; i++)
        table[i] = (uint16_t)i;
    for (uint32_t left = length; left > 1; left--) {
        uint32_t chosen = draw_below(&state, left);
        uint16_t index = table[chosen];
        table[chosen] = table[left - 1];
        table[left - 1] = index;
    }
}

/* ---- the computed order ---- */

/* The hash of one half, cut to the 32 - shift bits of the other. Its top bits are used, because those are the ones
 * all lower bits have reached. One multiplication less would be a quarter faster, and fails most of the tests. */
static inline uint32_t hash_half(uint32_t half, uint32_t key, unsigned shift)
{
    uint32_t x = (half ^ key) * UINT32_C(0x7feb352d);
    x = (x ^ (x >> 15)) * UINT32_C(0x846ca68b);
    return x >> shift;
}

static inline uint64_t permute_block(const dlrs_order *order, uint64_t number)
{
    unsigned left_shift = 32 - order->left_bits;
    unsigned right_shift = 32 - order->right_bits;
    uint32_t left = (uint32_t)(number >> order->right_bits);
    uint32_t right = (uint32_t)number & (UINT32_MAX >> right_shift);

    for (unsigned i = 0; i < DLRS_ORDER_ROUNDS; i += 2) {
        left ^= hash_half(right, order->keys[i], left_shift);
        right ^= hash_half(left, order->keys[i + 1], right_shift);
    }
    return (uint64_t)left << order->right_bits | right;
}

/* Numbers that go through the block together. */
enum { LANES = 32 };

/* The compiler makes vectors of the loops over lanes, with the instructions that they may use. Those that every x86-64
 * has cannot multiply 32-bit lanes, and are slower than one number after the other. */
#if defined(__x86_64__) && defined(__GNUC__)
#define DLRS_AVX2 __attribute__((target("avx2")))

DLRS_AVX2 static void hash_lanes_avx2(uint32_t *halves, const uint32_t *others, uint32_t key, unsigned shift)
{
    for (unsigned i = 0; i < LANES; i++)
        halves[i] ^= hash_half(others[i], key, shift);
}

/* permute_block for LANES numbers. */
DLRS_AVX2 static void permute_lanes_avx2(const dlrs_order *order, uint64_t *numbers)
{
    uint32_t left[LANES], right[LANES];
    unsigned left_shift = 32 - order->left_bits;
    unsigned right_shift = 32 - order->right_bits;

    for (unsigned i = 0; i < LANES; i++) {
        left[i] = (uint32_t)(numbers[i] >> order->right_bits);
        right[i] = (uint32_t)numbers[i] & (UINT32_MAX >> right_shift);
    }
    for (unsigned i = 0; i < DLRS_ORDER_ROUNDS; i += 2) {
        hash_lanes_avx2(left, right, order->keys[i], left_shift);
        hash_lanes_avx2(right, left, order->keys[i + 1], right_shift);
    }
    for (unsigned i = 0; i < LANES; i++)
        numbers[i] = (uint64_t)left[i] << order->right_bits | right[i];
}
#endif

static inline uint64_t unpermute_block(const dlrs_order *order, uint64_t number)
{
    unsigned left_shift = 32 - order->left_bits;
    unsigned right_shift = 32 - order->right_bits;
    uint32_t left = (uint32_t)(number >> order->right_bits);
    uint32_t right = (uint32_t)number & (UINT32_MAX >> right_shift);

    for (unsigned i = DLRS_ORDER_ROUNDS; i > 0; i -= 2) {
        right ^= hash_half(left, order->keys[i - 1], right_shift);
        left ^= hash_half(right, order->keys[i - 2], left_shift);
    }
    return (uint64_t)left << order->right_bits | right;
}

static unsigned bit_length(uint64_t x)
{
    unsigned bits = 0;
    for (; x > 0; x >>= 1)
        bits++;
    return bits;
}

/* ---- the order ---- */

bool dlrs_order_init(dlrs_order *order, uint64_t length, uint64_t seed, uint64_t epoch)
{
    uint64_t state = epoch_state(seed, epoch);

    *order = (dlrs_order){.length = length};
    if (length == 0)
        return true;
    if (length <= DLRS_ORDER_TABLE_MAX) {
        order->table = malloc((size_t)length * sizeof *order->table);
        if (order->table == NULL)
            return false;
        shuffle(order->table, (uint32_t)length, state);
        return true;
    }
    /* Halves of at most 32 bits, as length - 1 has at most 64. */
    unsigned bits = bit_length(length - 1);
    order->left_bits = bits / 2;
    order->right_bits = bits - bits / 2;
    for (unsigned i = 0; i < DLRS_ORDER_ROUNDS; i++)
        order->keys[i] = next32(&state);
    return true;
}

uint64_t dlrs_order_at(const dlrs_order *order, uint64_t position)
{
    assert(position < order->length);
    if (order->table != NULL)
        return order->table[position];

    uint64_t number = position;
    do
        number = permute_block(order, number);
    while (number >= order->length);
    return number;
}

/* Send the first `count` of LANES numbers through the block; what becomes of the others does not matter. */
static void permute_lanes(const dlrs_order *order, uint64_t *numbers, unsigned count)
{
#ifdef DLRS_AVX2
    if (count >= LANES / 4 && __builtin_cpu_supports("avx2")) {
        permute_lanes_avx2(order, numbers);
        return;
    }
#endif
    for (unsigned i = 0; i < count; i++)
        numbers[i] = permute_block(order, numbers[i]);
}

/* Those that fall outside are collected, and go through again together. */
static void fill_lanes(const dlrs_order *order, uint64_t first, unsigned count, uint64_t *indices)
{
    uint64_t numbers[LANES];
    unsigned places[LANES], num_left = count;
    for (unsigned i = 0; i < LANES; i++) {
        numbers[i] = first + i;
        places[i] = i;
    }
    while (num_left > 0) {
        unsigned num_outside = 0;
        permute_lanes(order, numbers, num_left);
        for (unsigned i = 0; i < num_left; i++) {
            indices[places[i]] = numbers[i];
            numbers[num_outside] = numbers[i];
            places[num_outside] = places[i];
            num_outside += numbers[i] >= order->length;
        }
        num_left = num_outside;
    }
}

void dlrs_order_fill(const dlrs_order *order, uint64_t first, size_t count, uint64_t *indices)
{
    assert(first <= order->length && count <= order->length - first);
    if (order->table != NULL) {
        for (size_t i = 0; i < count; i++)
            indices[i] = order->table[first + i];
        return;
    }
    for (size_t done = 0; done < count; done += LANES) {
        unsigned piece = count - done < LANES ? (unsigned)(count - done) : LANES;
        fill_lanes(order, first + done, piece, indices + done);
    }
}

uint64_t dlrs_order_find(const dlrs_order *order, uint64_t index)
{
    assert(index < order->length);
    if (order->table != NULL) {
        uint64_t position = 0;
        while (order->table[position] != index)
            position++;
        return position;
    }

    uint64_t number = index;
    do
        number = unpermute_block(order, number);
    while (number >= order->length);
    return number;
}

void dlrs_order_free(dlrs_order *order)
{
    free(order->table);
    order->table = NULL;
    order->length = 0; /* so that no position is valid any more */
}
