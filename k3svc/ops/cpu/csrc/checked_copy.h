// A copy and the CRC32C (polynomial 0x1EDC6F41, reflected) of what was copied, in one pass over memory.
//
// A block goes through registers to the target and to a scratch in the first-level cache, and the checksum is taken of the
// scratch: every byte of the source is read once, so what is written is what was checked, whatever another process does to
// the source meanwhile. The instruction takes three cycles and can be begun in each of them, so three lanes of a block run
// at once; their checksums are joined by the remainder that as many zero bytes leave. Stores go past the cache: nobody
// reads there soon, or another processor does, which would have to take the lines out of this one's cache. They fill one
// line of the target after the other: stores of a word, or lines left half full from block to block, cost some processors
// half of their bandwidth.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace k3 {

#if defined(__x86_64__)

constexpr uint32_t CRC32C_REFLECTED = 0x82F63B78u;
constexpr int64_t LANE_BYTES = 256, BLOCK_BYTES = 3 * LANE_BYTES;
constexpr int64_t LINE_BYTES = 64, AHEAD_BYTES = 1536;

// Product of two polynomials modulo that of CRC32C; bit 31 is the constant term.
constexpr uint32_t crc32c_product(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (int bit = 31; bit >= 0; --bit) {
        if (a >> bit & 1u) product ^= b;
        b = (b & 1u) ? (b >> 1) ^ CRC32C_REFLECTED : b >> 1;
    }
    return product;
}

// What a checksum becomes when `count` zero bytes follow.
struct ZeroBytes {
    uint32_t table[4][256] = {};

    explicit constexpr ZeroBytes(int64_t count) {
        uint32_t factor = 0x80000000u, power = 0x00800000u;  // 1 and x^8
        for (; count; count >>= 1) {
            if (count & 1) factor = crc32c_product(power, factor);
            power = crc32c_product(power, power);
        }
        for (int byte = 0; byte < 4; ++byte)
            for (uint32_t value = 0; value < 256; ++value) table[byte][value] = crc32c_product(factor, value << 8 * byte);
    }

    uint32_t follow(uint64_t crc) const {
        return table[0][crc & 255] ^ table[1][crc >> 8 & 255] ^ table[2][crc >> 16 & 255] ^ table[3][crc >> 24 & 255];
    }
};

constexpr ZeroBytes ONE_LANE(LANE_BYTES), TWO_LANES(2 * LANE_BYTES);

typedef uint64_t __attribute__((may_alias, aligned(1))) Word;

inline uint64_t word_at(const uint8_t* address) { return *reinterpret_cast<const Word*>(address); }

inline void copy_vector(uint8_t* target, uint8_t* scratch, const uint8_t* source) {
    __m128i vector = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    asm volatile("" : "+x"(vector));  // keeps the compiler from reading the source again for the second store
    _mm_store_si128(reinterpret_cast<__m128i*>(scratch), vector);
    _mm_stream_si128(reinterpret_cast<__m128i*>(target), vector);
}

// Copies at most as many bytes as are left, one by one.
__attribute__((target("sse4.2"))) inline uint32_t copy_bytes(uint8_t*& target, const uint8_t*& source, int64_t& left,
                                                              int64_t count, uint32_t crc) {
    for (; count > 0 && left > 0; --count, --left) {
        const uint8_t byte = *static_cast<const volatile uint8_t*>(source++);
        crc = _mm_crc32_u8(crc, byte);
        *target++ = byte;
    }
    return crc;
}

__attribute__((target("sse4.2"))) inline uint32_t copy_crc32c(uint8_t* target, const uint8_t* source, int64_t left,
                                                               uint32_t checksum) {
    alignas(LINE_BYTES) uint8_t scratch[BLOCK_BYTES];
    const int64_t to_line = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(target) % LINE_BYTES);
    uint32_t crc = copy_bytes(target, source, left, to_line, ~checksum);
    for (; left >= BLOCK_BYTES; left -= BLOCK_BYTES, source += BLOCK_BYTES, target += BLOCK_BYTES) {
        for (int64_t line = 0; line < BLOCK_BYTES; line += LINE_BYTES) {
            _mm_prefetch(reinterpret_cast<const char*>(source) + line + AHEAD_BYTES, _MM_HINT_T0);
            for (int64_t i = line; i < line + LINE_BYTES; i += 16) copy_vector(target + i, scratch + i, source + i);
        }
        uint64_t a = crc, b = 0, c = 0;
        for (const uint8_t* word = scratch; word < scratch + LANE_BYTES; word += 8) {
            a = _mm_crc32_u64(a, word_at(word));
            b = _mm_crc32_u64(b, word_at(word + LANE_BYTES));
            c = _mm_crc32_u64(c, word_at(word + 2 * LANE_BYTES));
        }
        crc = TWO_LANES.follow(a) ^ ONE_LANE.follow(b) ^ static_cast<uint32_t>(c);
    }
    _mm_sfence();
    for (; left >= 8; left -= 8, source += 8, target += 8) {
        const uint64_t word = *reinterpret_cast<const volatile Word*>(source);
        crc = static_cast<uint32_t>(_mm_crc32_u64(crc, word));
        *reinterpret_cast<Word*>(target) = word;
    }
    return ~copy_bytes(target, source, left, left, crc);
}

inline bool has_crc32c() { return __builtin_cpu_supports("sse4.2"); }

#else

inline bool has_crc32c() { return false; }
inline uint32_t copy_crc32c(uint8_t*, const uint8_t*, int64_t, uint32_t) { return 0; }

#endif

}  // namespace k3
