// A copy and the CRC32C (polynomial 0x1EDC6F41, reflected) of what was copied, in one pass over memory.
//
// The instruction takes three cycles and can be begun in each of them, so three neighbouring lanes of a block run at
// once; their checksums are joined by the remainder that as many zero bytes leave. Every byte is read once: what is
// written is what was checked, whatever another process does to the source meanwhile. Stores go past the cache where the
// target is aligned to a word: nobody reads there soon, or another processor does, which would have to take the lines
// out of this one's cache.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace k3 {

#if defined(__x86_64__)

constexpr uint32_t CRC32C_REFLECTED = 0x82F63B78u;
constexpr int64_t LANE_BYTES = 256;
// Lanes end before the processor sees that they run on, so what comes next is asked for here.
constexpr int64_t AHEAD_BYTES = 1536;

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

inline uint64_t read_once(const uint8_t* source) { return *reinterpret_cast<const volatile Word*>(source); }

template <bool STREAMS>
inline void write(uint8_t* target, uint64_t word) {
    if (STREAMS)
        _mm_stream_si64(reinterpret_cast<long long*>(target), static_cast<long long>(word));
    else
        *reinterpret_cast<Word*>(target) = word;
}

template <bool STREAMS>
__attribute__((target("sse4.2"))) uint32_t copy_crc32c(uint8_t* target, const uint8_t* source, int64_t count,
                                                       uint32_t checksum) {
    uint64_t a = static_cast<uint32_t>(~checksum);
    for (; count >= 3 * LANE_BYTES; count -= 3 * LANE_BYTES) {
        uint64_t b = 0, c = 0;
        for (int64_t i = 0; i < LANE_BYTES; i += 8) {
            if (i % 64 == 0)
                for (int64_t lane = 0; lane < 3; ++lane)
                    _mm_prefetch(reinterpret_cast<const char*>(source) + lane * LANE_BYTES + i + AHEAD_BYTES, _MM_HINT_T0);
            const uint64_t x = read_once(source + i);
            const uint64_t y = read_once(source + LANE_BYTES + i);
            const uint64_t z = read_once(source + 2 * LANE_BYTES + i);
            a = _mm_crc32_u64(a, x);
            b = _mm_crc32_u64(b, y);
            c = _mm_crc32_u64(c, z);
            write<STREAMS>(target + i, x);
            write<STREAMS>(target + LANE_BYTES + i, y);
            write<STREAMS>(target + 2 * LANE_BYTES + i, z);
        }
        a = TWO_LANES.follow(a) ^ ONE_LANE.follow(b) ^ c;
        source += 3 * LANE_BYTES;
        target += 3 * LANE_BYTES;
    }
    for (; count >= 8; count -= 8, source += 8, target += 8) {
        const uint64_t word = read_once(source);
        a = _mm_crc32_u64(a, word);
        write<STREAMS>(target, word);
    }
    for (; count > 0; --count, ++source, ++target) {
        const uint8_t byte = *const_cast<const volatile uint8_t*>(source);
        a = _mm_crc32_u8(static_cast<uint32_t>(a), byte);
        *target = byte;
    }
    if (STREAMS) _mm_sfence();
    return ~static_cast<uint32_t>(a);
}

inline bool has_crc32c() { return __builtin_cpu_supports("sse4.2"); }

inline uint32_t copy_crc32c(uint8_t* target, const uint8_t* source, int64_t count, uint32_t checksum) {
    if (reinterpret_cast<uintptr_t>(target) % 8 == 0) return copy_crc32c<true>(target, source, count, checksum);
    return copy_crc32c<false>(target, source, count, checksum);
}

#else

inline bool has_crc32c() { return false; }
inline uint32_t copy_crc32c(uint8_t*, const uint8_t*, int64_t, uint32_t) { return 0; }

#endif

}  // namespace k3
