/* What the parts of the Perfetto reader share. */
#ifndef KINETO_PERFETTO_STATE_H
#define KINETO_PERFETTO_STATE_H

#include "perfetto/read_packets.h"

#define MAX_NESTING 16 /* of annotations inside annotations */
#define CLOCKS 4       /* of one sequence that count in a way of their own */

enum { CATEGORIES = 1, NAMES = 2, ANNOTATIONS = 3, VALUES = 4 }; /* interned texts */

typedef struct {
    const uint8_t *at, *end;
} kc_packet_span;

typedef struct {
    uint64_t number;     /* wire types 0, 1 and 5 */
    kc_packet_span data; /* wire type 2 */
    uint32_t field, wire;
} kc_packet_value;

typedef struct {
    uint64_t a, b;  /* what it is, and its id */
    uint32_t place; /* + 1; 0: free */
} kc_packet_slot;

typedef struct {
    uint64_t offset, size;
} kc_packet_text;

typedef struct {
    uint64_t id, multiplier;
    int64_t time;
    uint32_t incremental;
} kc_packet_clock;

typedef struct {
    uint64_t generation; /* of its interned texts; 0: nothing is known yet */
    uint64_t default_clock, default_track;
    kc_packet_clock clocks[CLOCKS];
    uint32_t clock_count;
} kc_packet_sequence;

typedef struct {
    kc_text members, key, open; /* open: texts of the open slices, one after the other */
    int64_t *begins;
    uint64_t *texts; /* of each open slice the place in `open` */
    uint32_t depth, capacity, hidden;
} kc_packet_track_state;

typedef struct {
    uint64_t id;
    int64_t time;
    uint32_t track;
    uint32_t after; /* 0: begins at it, if it is one of two; 1: other */
    uint32_t op;
} kc_packet_flow;

struct kc_packet_reader {
    kc_text out, arena, scratch;
    kc_packet_slot *slots;
    uint64_t slot_count, used;
    kc_packet_sequence *sequences;
    kc_packet_track_state *tracks;
    kc_packet_text *texts;
    kc_packet_flow *flows;
    uint64_t sequence_count, track_count, text_count, flow_count; /* room: the next power of two */
    uint64_t generations;
    int64_t base;
    uint32_t ours, no_flows, started, failed;
    kc_packet_read_counts counts;
};

/* ---- messages ---- */

int kc_packet_get_varint(kc_packet_span *s, uint64_t *number); /* 0: the span ends before it does */
int kc_packet_next(kc_packet_span *s, kc_packet_value *v);     /* 1: a field; 0: the end; -1: no valid message */

/* ---- memory: what fails sets `failed` ---- */

/* Room for one more of `count` items whose room is the next power of two; NULL: no memory. */
void *kc_packet_grown(kc_packet_reader *r, void *items, uint64_t count, size_t size);
void kc_packet_put(kc_packet_reader *r, kc_text *out, const char *bytes, uint64_t size);
void kc_packet_put_literal(kc_packet_reader *r, kc_text *out, const char *literal);
void kc_packet_put_number(kc_packet_reader *r, kc_text *out, int64_t number);
void kc_packet_put_escaped(kc_packet_reader *r, kc_text *out, kc_packet_span s); /* as a JSON string */
kc_packet_sequence *kc_packet_sequence_of(kc_packet_reader *r,
                                          uint64_t id);          /* NULL: no memory; valid until the next one */
uint32_t kc_packet_track_of(kc_packet_reader *r, uint64_t uuid); /* its number; UINT32_MAX: no memory */

/* ---- clocks ---- */

enum { BOOT_CLOCK = 6 };

/* Clocks from 64 on belong to the sequence: each one with its distance from the boot clock, or its last time. */
void kc_packet_read_clocks(kc_packet_sequence *s, kc_packet_span message);
int64_t kc_packet_time_of(kc_packet_reader *r, kc_packet_sequence *s, uint64_t clock_id, uint64_t time); /* ns */

/* ---- interned texts, annotations ---- */

void kc_packet_read_interned(kc_packet_reader *r, const kc_packet_sequence *s, kc_packet_span message);
void kc_packet_put_interned(kc_packet_reader *r, kc_text *out, const kc_packet_sequence *s, uint64_t what, uint64_t id);
void kc_packet_put_double(kc_packet_reader *r, kc_text *out, uint64_t bits);
/* "name":value. 0: nothing, it has no name. */
int kc_packet_put_annotation(kc_packet_reader *r, kc_text *out, const kc_packet_sequence *s, kc_packet_span message,
                             unsigned nesting);

#endif
