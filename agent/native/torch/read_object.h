/* Reading torch's objects at the offsets of the layout table. */
#ifndef KINETO_OPS_READ_H
#define KINETO_OPS_READ_H

#include <stdint.h>
#include <string.h>

static inline uint64_t ops_word(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline const uint8_t *ops_pointer(const uint8_t *at) {
    const uint8_t *value;
    memcpy(&value, at, sizeof value);
    return value;
}

#endif
