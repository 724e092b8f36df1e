/* The hash that identifies texts: 64 bits, so that in practice no two texts of one recording share it. */
#ifndef KINETO_TEXT_HASH_H
#define KINETO_TEXT_HASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

__extension__ typedef unsigned __int128 text_hash_wide;

static inline uint64_t text_hash_mix(uint64_t a, uint64_t b) {
    const text_hash_wide product = (text_hash_wide)(a ^ 0x9E3779B97F4A7C15u) * (b ^ 0xD1B54A32D192ED03u);
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Hashes `bytes` bytes of `data` in a string space; never 0. */
static inline uint64_t text_hash(const void *data, size_t bytes, uint32_t space) {
    const uint8_t *at = (const uint8_t *)data;
    uint64_t hash = text_hash_mix(bytes, space);
    uint64_t word = 0;
    size_t left = bytes;
    for (; left >= sizeof word; left -= sizeof word, at += sizeof word) {
        memcpy(&word, at, sizeof word);
        hash = text_hash_mix(hash, word);
    }
    word = 0;
    memcpy(&word, at, left);
    hash = text_hash_mix(hash, word);
    return hash == 0 ? 1 : hash;
}

#endif
