/* Columns to Perfetto's TrackEvent packets. See write_packets.h; field numbers are those of Perfetto's public protos.
 *
 * Threads: the caller's, without the GIL; it works on the caller's arrays alone.
 * Blocks: never.
 */
#include <string.h>

#include "perfetto/write_packets.h"

#define TAG(field, wire) ((field) << 3 | (wire)) /* wire: 0 varint, 1 eight bytes, 2 bytes with a length */

enum {
    PACKET = TAG(1, 2), /* Trace.packet */
    PACKET_TIMESTAMP = TAG(8, 0),
    PACKET_SEQUENCE = TAG(10, 0),
    PACKET_TRACK_EVENT = TAG(11, 2),
    PACKET_FLAGS = TAG(13, 0),
    NEEDS_INCREMENTAL_STATE = 2,

    EVENT_CATEGORY = TAG(3, 0),
    EVENT_ANNOTATION = TAG(4, 2),
    EVENT_TYPE = TAG(9, 0),
    EVENT_NAME = TAG(10, 0),
    EVENT_COUNTER = TAG(30, 0),
    EVENT_DOUBLE_COUNTER = TAG(44, 1),
    EVENT_FLOW = TAG(47, 1),

    ANNOTATION_NAME = TAG(1, 0),
    ANNOTATION_UNSIGNED = TAG(3, 0),
    ANNOTATION_SIGNED = TAG(4, 0),
    ANNOTATION_DOUBLE = TAG(5, 1),

    SLICE_END = 2,
    HEAD_BYTES = 64,  /* room for a packet without annotations and flows */
    FIELD_BYTES = 40, /* for one annotation */
    FLOW_BYTES = 10,
};

static uint8_t *put_varint(uint8_t *p, uint64_t value) {
    while (value > 127) {
        *p++ = (uint8_t)(value | 128);
        value >>= 7;
    }
    *p++ = (uint8_t)value;
    return p;
}

static uint8_t *put_fixed(uint8_t *p, const void *value) {
    memcpy(p, value, 8);
    return p + 8;
}

/* Two-byte tags of fields from 16 on. */
static uint8_t *put_tag(uint8_t *p, uint32_t tag) { return put_varint(p, tag); }

/* ---- packets ---- */

/* A message whose length is not known yet: two bytes are kept free for it. */
static uint8_t *open_message(uint8_t *p, uint8_t tag, uint8_t **body) {
    *p = tag;
    *body = p + 3;
    return *body;
}

/* Sets the length; long messages are moved by two bytes. Returns the end of the message. */
static uint8_t *close_message(uint8_t *p, uint8_t *body) {
    uint64_t size = (uint64_t)(p - body);
    if (size < 1u << 14) {
        body[-2] = (uint8_t)(size | 128);
        body[-1] = (uint8_t)(size >> 7);
        return p;
    }
    memmove(body + 2, body, size);
    body[-2] = (uint8_t)(size | 128);
    body[-1] = (uint8_t)(size >> 7 | 128);
    body[0] = (uint8_t)(size >> 14 | 128);
    body[1] = (uint8_t)(size >> 21);
    return p + 2;
}

/* A packet up to its track event's type. */
static uint8_t *open_packet(uint8_t *p, uint32_t sequence, uint64_t elapsed, uint32_t type, uint8_t **packet,
                            uint8_t **event) {
    p = open_message(p, PACKET, packet);
    *p++ = PACKET_TIMESTAMP;
    p = put_varint(p, elapsed);
    *p++ = PACKET_SEQUENCE;
    p = put_varint(p, sequence);
    *p++ = PACKET_FLAGS;
    *p++ = NEEDS_INCREMENTAL_STATE;
    p = open_message(p, PACKET_TRACK_EVENT, event);
    *p++ = EVENT_TYPE;
    *p++ = (uint8_t)type;
    return p;
}

/* Nothing but the end of the innermost slice: all lengths are known and short. */
static uint8_t *put_end(uint8_t *p, uint32_t sequence, uint64_t elapsed) {
    uint8_t *size = p + 1;
    *p = PACKET;
    p += 2;
    *p++ = PACKET_TIMESTAMP;
    p = put_varint(p, elapsed);
    *p++ = PACKET_SEQUENCE;
    p = put_varint(p, sequence);
    *p++ = PACKET_FLAGS;
    *p++ = NEEDS_INCREMENTAL_STATE;
    *p++ = PACKET_TRACK_EVENT;
    *p++ = 2;
    *p++ = EVENT_TYPE;
    *p++ = SLICE_END;
    *size = (uint8_t)(p - size - 1);
    return p;
}

/* ---- annotations ---- */

static uint64_t get_unsigned(const kc_packet_field *f, uint64_t row) {
    switch (f->width) {
    case 1: return ((const uint8_t *)f->column)[row];
    case 2: return ((const uint16_t *)f->column)[row];
    case 4: return ((const uint32_t *)f->column)[row];
    default: return ((const uint64_t *)f->column)[row];
    }
}

static int64_t get_signed(const kc_packet_field *f, uint64_t row) {
    switch (f->width) {
    case 1: return ((const int8_t *)f->column)[row];
    case 2: return ((const int16_t *)f->column)[row];
    case 4: return ((const int32_t *)f->column)[row];
    default: return ((const int64_t *)f->column)[row];
    }
}

static uint8_t *put_ready(const kc_packet_field *f, uint64_t row, uint8_t *p, const uint8_t *end) {
    uint64_t n = get_unsigned(f, row);
    if (n >= f->ready_count) {
        return p;
    }
    uint64_t size = f->ready_ends[n + 1] - f->ready_ends[n];
    if ((uint64_t)(end - p) < size) {
        return NULL;
    }
    memcpy(p, f->ready + f->ready_ends[n], size);
    return p + size;
}

/* Writes one annotation; NULL if it does not fit. */
static uint8_t *put_field(const kc_packet_field *f, uint64_t row, uint8_t *p, const uint8_t *end) {
    if (f->present && !(f->present[row] >> f->bit & 1)) {
        return p;
    }
    if (f->operation == KC_PACKET_OPTIONAL && get_signed(f, row) == f->base) {
        return p;
    }
    if (f->operation == KC_PACKET_READY) {
        return put_ready(f, row, p, end);
    }
    if (end - p < FIELD_BYTES) {
        return NULL;
    }
    uint8_t *size = p + 1;
    *p = EVENT_ANNOTATION;
    p += 2;
    *p++ = ANNOTATION_NAME;
    p = put_varint(p, f->name);
    switch (f->operation) {
    case KC_PACKET_UNSIGNED:
        *p++ = ANNOTATION_UNSIGNED;
        p = put_varint(p, get_unsigned(f, row));
        break;
    case KC_PACKET_DOUBLE:
        *p++ = ANNOTATION_DOUBLE;
        p = put_fixed(p, (const double *)f->column + row);
        break;
    default: *p++ = ANNOTATION_SIGNED; p = put_varint(p, (uint64_t)get_signed(f, row));
    }
    *size = (uint8_t)(p - size - 1);
    return p;
}

/* ---- rows ---- */

static uint8_t *put_value(const kc_packet_kind *kind, uint64_t row, uint8_t *p) {
    if (kind->type == KC_PACKET_DOUBLE_COUNTER) {
        p = put_tag(p, EVENT_DOUBLE_COUNTER);
        return put_fixed(p, (const double *)kind->value + row);
    }
    p = put_tag(p, EVENT_COUNTER);
    return put_varint(p, ((const uint64_t *)kind->value)[row]);
}

/* From one time to a later one; the two may be further apart than an int64_t can say. */
static uint64_t elapsed(int64_t from, int64_t to) { return (uint64_t)to - (uint64_t)from; }

/* Writes the event that is next, without the ends before it; NULL if it does not fit. `flow` moves past its flows. */
static uint8_t *put_event(const kc_packet_events *e, const kc_packet_track *track, int64_t time, uint64_t *flow,
                          uint8_t *p, const uint8_t *end) {
    uint64_t i = track->next, row = e->row[i];
    const kc_packet_kind *kind = e->kinds + e->kind[i];
    uint8_t *packet, *event;
    if (end - p < HEAD_BYTES) {
        return NULL;
    }
    uint32_t type = kind->type == KC_PACKET_DOUBLE_COUNTER ? KC_PACKET_COUNTER : kind->type;
    p = open_packet(p, track->sequence, elapsed(time, e->start[i]), type, &packet, &event);
    uint32_t category = kind->categories ? kind->categories[row] : kind->category;
    if (category) {
        *p++ = EVENT_CATEGORY;
        p = put_varint(p, category);
    }
    if (kind->name) {
        *p++ = EVENT_NAME;
        p = put_varint(p, (uint32_t)kind->name[row] + 1u);
    }
    if (kind->value) {
        p = put_value(kind, row, p);
    }
    for (uint32_t n = 0; n < kind->field_count && p; n++) {
        p = put_field(e->fields + kind->first_field + n, row, p, end);
    }
    if (!p) {
        return NULL;
    }
    for (; *flow < e->flow_count && e->flow_event[*flow] == i; ++*flow) {
        if (end - p < FLOW_BYTES) {
            return NULL;
        }
        p = put_fixed(put_tag(p, EVENT_FLOW), e->flow_id + *flow);
    }
    if (end - p < 4) { /* lengths may grow */
        return NULL;
    }
    return close_message(close_message(p, event), packet);
}

void kc_packet_write(const kc_packet_events *e, kc_packet_track *track, uint64_t count, uint8_t *out, uint64_t capacity,
                     kc_written *result) {
    uint8_t *p = out, *at = out;
    const uint8_t *end = out + capacity;
    uint64_t done = 0;
    for (; done < count && track->next <= track->last; done++, p = at) {
        int64_t now = track->next < track->last ? e->start[track->next] : INT64_MAX, time = track->time;
        uint32_t depth = track->depth;
        uint64_t flow = track->flow;
        for (; depth && track->stack[depth - 1] <= now && end - at >= HEAD_BYTES; depth--) {
            int64_t closed = track->stack[depth - 1];
            at = put_end(at, track->sequence, elapsed(time, closed));
            time = closed;
        }
        if (depth && track->stack[depth - 1] <= now) {
            break;
        }
        if (track->next < track->last) {
            at = put_event(e, track, time, &flow, at, end);
            if (!at) {
                break;
            }
            time = now;
            if (e->kinds[e->kind[track->next]].type == KC_PACKET_SLICE) {
                int64_t close = e->end[track->next] > now ? e->end[track->next] : now;
                track->stack[depth] = depth && track->stack[depth - 1] < close ? track->stack[depth - 1] : close;
                depth++;
            }
        }
        track->next++;
        track->time = time;
        track->depth = depth;
        track->flow = flow;
    }
    result->rows = done;
    result->bytes = (uint64_t)(p - out);
}

/* ---- lanes ---- */

static int fits(const kc_packet_nesting *n, int32_t top, uint64_t i) {
    return top < 0 || (!n->leaf[top] && n->end[i] <= n->end[top]);
}

void kc_packet_lanes(kc_packet_nesting *n) {
    int32_t top[KC_PACKET_LANES];
    uint32_t depth[KC_PACKET_LANES], used = 0,
                                     limit = n->lane_limit < KC_PACKET_LANES ? n->lane_limit : KC_PACKET_LANES;
    n->deepest = 0;
    n->shortened = 0;
    for (uint64_t i = 0; i < n->count; i++) {
        if (i == 0 || n->track[i] != n->track[i - 1]) {
            used = 0;
        }
        uint32_t lane = 0;
        for (; lane < used; lane++) {
            for (; top[lane] >= 0 && n->end[top[lane]] <= n->start[i]; depth[lane]--) {
                top[lane] = n->above[top[lane]];
            }
            if (fits(n, top[lane], i)) {
                break;
            }
        }
        if (lane == used && used < limit) {
            top[lane] = -1;
            depth[lane] = 0;
            used++;
        } else if (lane == used) {
            lane = limit - 1;
            if (n->end[i] > n->end[top[lane]]) {
                n->end[i] = n->end[top[lane]];
                n->shortened++;
            }
        }
        n->above[i] = top[lane];
        top[lane] = (int32_t)i;
        n->lane[i] = (uint16_t)lane;
        if (++depth[lane] > n->deepest) {
            n->deepest = depth[lane];
        }
    }
}
