/* Perfetto's TrackEvent protobuf: columns to packets. Called through ctypes by kineto_trace.formats.perfetto_proto.
 *
 * Theory of operation
 *     As in codec.h, Python says in tables of plain numbers which columns become which fields of a packet; nothing
 *     here knows a kernel from a copy. The events of one track form a sequence of packets of their own: times are
 *     differences, and the end of a slice is a packet between the beginnings of later ones, from a stack.
 *     A row is written as a whole or not at all (output full): the track's state changes only with whole rows.
 */
#ifndef KINETO_PERFETTO_H
#define KINETO_PERFETTO_H

#include "codec/codec.h"

/* ---- lanes: events of one track that do not nest get further tracks ---- */

typedef struct {
    uint64_t count;        /* below 2^31 */
    const uint32_t *track; /* events are sorted by (track, start, end from late to early) */
    const int64_t *start;  /* ns */
    int64_t *end;          /* ns; shortened where even the last lane has no room */
    const uint8_t *leaf;   /* 1: no other event may stand inside it */
    int32_t *above;        /* scratch, one per event */
    uint16_t *lane;        /* out */
    uint32_t lane_limit;   /* 1 .. KC_PACKET_LANES */
    uint32_t deepest;      /* out: the most events inside each other on one lane */
    uint64_t shortened;    /* out: events whose end was moved */
} kc_packet_nesting;

#define KC_PACKET_LANES 1024

/* lane[i] = the first lane of the track on which the event is inside another one as a whole, or beside all. */
KC_EXPORT void kc_packet_lanes(kc_packet_nesting *nesting);

/* ---- writing ---- */

enum { /* kc_packet_field.operation: debug annotations */
       KC_PACKET_UNSIGNED = 0,
       KC_PACKET_SIGNED = 1,
       KC_PACKET_DOUBLE = 2,   /* 8 bytes */
       KC_PACKET_OPTIONAL = 3, /* signed; nothing where the value is `base` */
       KC_PACKET_READY = 4,    /* a number into a table of ready annotations; nothing where it is none of them */
};

typedef struct {
    uint32_t name; /* id of the annotation's interned name */
    uint32_t operation;
    const void *column;
    uint32_t width;          /* bytes of one value of the column */
    uint32_t bit;            /* with `present`: the row has the value only if this bit is set */
    const uint64_t *present; /* per row, or NULL */
    int64_t base;
    const uint8_t
        *ready; /* KC_PACKET_READY: text n is ready[ready_ends[n] .. ready_ends[n + 1]]; ready_count + 1 entries */
    const uint64_t *ready_ends;
    uint64_t ready_count;
} kc_packet_field;

enum { KC_PACKET_SLICE = 1, KC_PACKET_INSTANT = 3, KC_PACKET_COUNTER = 4, KC_PACKET_DOUBLE_COUNTER = 5 };

typedef struct {
    uint32_t type;
    uint32_t category;          /* id of the interned category; 0: none */
    const uint32_t *categories; /* per row, in place of it, or NULL */
    const int32_t *name;        /* per row: the id of the interned name is one more; NULL: no name */
    const void *value;          /* per row: counters, int64 or double */
    uint32_t first_field;       /* fields[first_field .. + field_count] */
    uint32_t field_count;
} kc_packet_kind;

typedef struct {
    const uint8_t *kind;  /* per event: which of the kinds */
    const uint32_t *row;  /* its row in the columns of the kind */
    const int64_t *start; /* ns */
    const int64_t *end;   /* ns */
    const kc_packet_kind *kinds;
    const kc_packet_field *fields;
    const uint64_t *flow_event; /* ascending: flow n is one of this event */
    const uint64_t *flow_id;
    uint64_t flow_count;
} kc_packet_events;

typedef struct {
    uint64_t next;  /* the event that comes next */
    uint64_t last;  /* the event after the track's last one */
    uint64_t flow;  /* the first flow that is not written */
    int64_t time;   /* ns of the last packet */
    int64_t *stack; /* ends of the slices that are open; room for all that are inside each other */
    uint32_t depth;
    uint32_t sequence; /* id of the packet sequence, below 2^28 */
} kc_packet_track;

/* Writes at most `count` further rows of the track, as many as fit. Row `last` closes what is still open. */
KC_EXPORT void kc_packet_write(const kc_packet_events *events, kc_packet_track *track, uint64_t count, uint8_t *out,
                               uint64_t capacity, kc_written *result);

#endif
