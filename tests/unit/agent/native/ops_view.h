/* A daemon's view of the observer's arena, for drive_ops.c: copies what is READY, looks texts up. */
#ifndef OPS_VIEW_H
#define OPS_VIEW_H

#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>

#include "common/arena.h"
#include "check.h"

#define SEEN_MOST 200000u

struct op {
    uint64_t start, end, name;
    int64_t sequence;
    uint64_t forward_thread, inputs;
    uint32_t thread, number;
    uint8_t kind, scope, flags, reserved[5];
};

static struct op *seen;
static uint32_t seen_count;

struct view {
    uint8_t *base;
    struct arena_fixed fixed;
};

static struct view map(int fd) {
    struct view view;
    view.base = mmap(NULL, ARENA_HEADER_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(view.base != MAP_FAILED);
    memcpy(&view.fixed, view.base, sizeof view.fixed);
    munmap(view.base, ARENA_HEADER_BYTES);
    view.base = mmap(NULL, view.fixed.total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(view.base != MAP_FAILED);
    return view;
}

static uint64_t *buffer_word(const struct view *view, uint32_t index, size_t offset) {
    return (uint64_t *)(void *)(view->base + view->fixed.descriptors_offset + index * ARENA_DESCRIPTOR_BYTES + offset);
}

/* Copies what is READY; gives the records. */
static uint64_t drain(const struct view *view) {
    uint64_t records = 0;
    for (uint32_t i = 0; i < view->fixed.buffer_count; i++) {
        uint32_t *state = (uint32_t *)(void *)buffer_word(view, i, ARENA_STATE);
        if (__atomic_load_n(state, __ATOMIC_ACQUIRE) != ARENA_READY) {
            continue;
        }
        const uint64_t bytes = *buffer_word(view, i, ARENA_BUFFER_VALID_BYTES);
        CHECK(bytes > 0 && bytes % sizeof(struct op) == 0);
        CHECK(*buffer_word(view, i, ARENA_BUFFER_RECORDS) == bytes / sizeof(struct op));
        const uint8_t *at = view->base + view->fixed.buffers_offset + i * view->fixed.buffer_bytes;
        for (uint64_t offset = 0; offset < bytes; offset += sizeof(struct op), records++) {
            if (seen_count < SEEN_MOST) {
                memcpy(&seen[seen_count++], at + offset, sizeof(struct op));
            }
        }
        __atomic_store_n(state, ARENA_FREE, __ATOMIC_RELEASE);
    }
    return records;
}

/* The text of `key`: NULL if it is not there. */
static const uint8_t *text_of(const struct view *view, uint64_t key, uint32_t space, uint32_t *length) {
    const uint64_t used = __atomic_load_n((uint64_t *)(void *)(view->base + ARENA_STRINGS_USED), __ATOMIC_ACQUIRE);
    const uint8_t *at = view->base + view->fixed.strings_offset;
    for (const uint8_t *end = at + used; at < end;) {
        struct arena_string head;
        memcpy(&head, at, sizeof head);
        if (head.key == key && head.space == space) {
            *length = head.length;
            return at + sizeof head;
        }
        at += sizeof head + (head.length + 7u) / 8u * 8u;
    }
    return NULL;
}

static bool is_named(const struct view *view, uint64_t key, const char *name) {
    uint32_t length = 0;
    const uint8_t *text = text_of(view, key, ARENA_SPACE_OP_NAME, &length);
    return text != NULL && length == strlen(name) && memcmp(text, name, length) == 0;
}

#endif
