/* What the parts of the Perfetto reader share. */
#ifndef KINETO_PERFETTO_STATE_H
#define KINETO_PERFETTO_STATE_H

#include "perfetto/read_packets.h"

#define MAX_NESTING 16 /* of annotations inside annotations */
#define CLOCKS 4       /* of one sequence that count in a way of their own */

enum { CATEGORIES = 1, NAMES = 2, ANNOTATIONS = 3, VALUES = 4 }; /* interned texts */

typedef struct {
    const uint8_t *at, *end;
} kp_span;

typedef struct {
    uint64_t number; /* wire types 0, 1 and 5 */
    kp_span data;    /* wire type 2 */
    uint32_t field, wire;
} kp_value;

typedef struct {
    uint64_t a, b;  /* what it is, and its id */
    uint32_t place; /* + 1; 0: free */
} kp_slot;

typedef struct {
    uint64_t offset, size;
} kp_text;

typedef struct {
    uint64_t id, multiplier;
    int64_t time;
    uint32_t incremental;
} kp_clock;

typedef struct {
    uint64_t generation; /* of its interned texts; 0: nothing is known yet */
    uint64_t default_clock, default_track;
    kp_clock clocks[CLOCKS];
    uint32_t clock_count;
} kp_sequence;

typedef struct {
    kc_text members, key, open; /* open: texts of the open slices, one after the other */
    int64_t *begins;
    uint64_t *texts; /* of each open slice the place in `open` */
    uint32_t depth, capacity, hidden;
} kp_track_state;

typedef struct {
    uint64_t id;
    int64_t time;
    uint32_t track;
    uint32_t after; /* 0: begins at it, if it is one of two; 1: other */
    uint32_t op;
} kp_flow;

struct kp_reader {
    kc_text out, arena, scratch;
    kp_slot *slots;
    uint64_t slot_count, used;
    kp_sequence *sequences;
    kp_track_state *tracks;
    kp_text *texts;
    kp_flow *flows;
    uint64_t sequence_count, track_count, text_count, flow_count; /* room: the next power of two */
    uint64_t generations;
    int64_t base;
    uint32_t ours, started, failed;
    kp_read_counts counts;
};

/* ---- messages ---- */

int kp_get_varint(kp_span *s, uint64_t *number); /* 0: the span ends before it does */
int kp_next(kp_span *s, kp_value *v);            /* 1: a field; 0: the end; -1: no valid message */

/* ---- memory: what fails sets `failed` ---- */

/* Room for one more of `count` items whose room is the next power of two; NULL: no memory. */
void *kp_grown(kp_reader *r, void *items, uint64_t count, size_t size);
void kp_put(kp_reader *r, kc_text *out, const char *bytes, uint64_t size);
void kp_put_literal(kp_reader *r, kc_text *out, const char *literal);
void kp_put_number(kp_reader *r, kc_text *out, int64_t number);
void kp_put_escaped(kp_reader *r, kc_text *out, kp_span s); /* as a JSON string */
kp_sequence *kp_sequence_of(kp_reader *r, uint64_t id);     /* NULL: no memory; valid until the next one */
uint32_t kp_track_of(kp_reader *r, uint64_t uuid);          /* its number; UINT32_MAX: no memory */

/* ---- clocks ---- */

enum { BOOT_CLOCK = 6 };

/* Clocks from 64 on belong to the sequence: each one with its distance from the boot clock, or its last time. */
void kp_read_clocks(kp_sequence *s, kp_span message);
int64_t kp_time_of(kp_reader *r, kp_sequence *s, uint64_t clock_id, uint64_t time); /* ns */

/* ---- interned texts, annotations ---- */

void kp_read_interned(kp_reader *r, const kp_sequence *s, kp_span message);
void kp_put_interned(kp_reader *r, kc_text *out, const kp_sequence *s, uint64_t what, uint64_t id);
void kp_put_double(kp_reader *r, kc_text *out, uint64_t bits);
/* "name":value. 0: nothing, it has no name. */
int kp_put_annotation(kp_reader *r, kc_text *out, const kp_sequence *s, kp_span message, unsigned nesting);

#endif
