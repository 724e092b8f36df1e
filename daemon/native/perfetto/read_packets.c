/* Perfetto's TrackEvent packets to Chrome-trace JSON. See read_packets.h; field numbers are those of Perfetto's protos.
 *
 * Threads: the caller's, without the GIL; a reader belongs to one thread at a time, and there is no global state.
 * Blocks: never; it allocates.
 */
#include <stdlib.h>
#include <string.h>

#include "perfetto/reader_state.h"

#define OUT_BYTES (1u << 20) /* of text, after which the caller gets it */
#define MAX_OPEN (1u << 20)  /* slices inside each other */

enum { PACKET = 1 << 3 | 2 };
enum { BEGIN = 1, END = 2, INSTANT = 3, COUNTER = 4 };

/* ---- events */

typedef struct {
    uint64_t type, track, counter, name, category;
    kc_packet_span name_text, category_text, message;
    uint32_t has_track, has_name, has_category, has_double, flows;
} event;

static void put_time(kc_packet_reader *r, kc_text *out, const char *name, int64_t ns) {
    uint64_t size = ns < 0 ? 0 - (uint64_t)ns : (uint64_t)ns;
    unsigned rest = (unsigned)(size % 1000);
    char fraction[] = {'.', (char)('0' + rest / 100), (char)('0' + rest / 10 % 10), (char)('0' + rest % 10)};
    kc_packet_put_literal(r, out, name);
    if (ns < 0) {
        kc_packet_put_literal(r, out, "-");
    }
    kc_packet_put_number(r, out, (int64_t)(size / 1000));
    kc_packet_put(r, out, fraction, sizeof fraction);
}

static void put_start(kc_packet_reader *r, const char *phase, const kc_packet_track_state *t, int64_t time) {
    kc_packet_put_literal(r, &r->out, r->started ? ",\n{\"ph\":\"" : "{\"ph\":\"");
    r->started = 1;
    kc_packet_put_literal(r, &r->out, phase);
    kc_packet_put_literal(r, &r->out, "\",");
    kc_packet_put(r, &r->out, t->members.data, t->members.size);
    put_time(r, &r->out, ",\"ts\":", (int64_t)((uint64_t)time - (uint64_t)r->base));
}

static void put_category(kc_packet_reader *r, kc_text *out, const kc_packet_sequence *s, const event *e) {
    if (!e->has_category) {
        return;
    }
    kc_packet_put_literal(r, out, ",\"cat\":");
    if (e->has_category == 2) {
        kc_packet_put_escaped(r, out, e->category_text);
    } else {
        kc_packet_put_interned(r, out, s, CATEGORIES, e->category);
    }
}

/* What an event has beside its place and time, each with a comma before it. */
static void put_rest(kc_packet_reader *r, kc_text *out, const kc_packet_sequence *s, const event *e) {
    put_category(r, out, s, e);
    if (e->has_name) {
        kc_packet_put_literal(r, out, ",\"name\":");
        if (e->has_name == 2) {
            kc_packet_put_escaped(r, out, e->name_text);
        } else {
            kc_packet_put_interned(r, out, s, NAMES, e->name);
        }
    }
    kc_packet_value v;
    kc_packet_span message = e->message;
    uint64_t count = 0;
    while (kc_packet_next(&message, &v) > 0) {
        if (v.field != 4 || v.wire != 2) {
            continue;
        }
        uint64_t before = out->size;
        kc_packet_put_literal(r, out, count ? "," : ",\"args\":{");
        if (kc_packet_put_annotation(r, out, s, v.data, 0)) {
            count++;
        } else {
            out->size = before;
        }
    }
    if (count) {
        kc_packet_put_literal(r, out, "}");
    }
}

static void push(kc_packet_reader *r, uint32_t number, const kc_packet_sequence *s, const event *e, int64_t time) {
    kc_packet_track_state *t = r->tracks + number;
    if (t->depth == t->capacity) {
        uint32_t capacity = t->capacity ? 2 * t->capacity : 8;
        int64_t *begins = realloc(t->begins, capacity * sizeof *begins);
        t->begins = begins ? begins : t->begins;
        uint64_t *texts = realloc(t->texts, capacity * sizeof *texts);
        t->texts = texts ? texts : t->texts;
        if (!begins || !texts) {
            r->failed = 1;
            return;
        }
        t->capacity = capacity;
    }
    t->begins[t->depth] = time;
    t->texts[t->depth++] = t->open.size;
    put_rest(r, &t->open, s, e);
}

static void pop(kc_packet_reader *r, kc_packet_track_state *t, int64_t time) {
    int64_t begin = t->begins[--t->depth];
    uint64_t offset = t->texts[t->depth];
    put_start(r, "X", t, begin);
    put_time(r, &r->out, ",\"dur\":", time < begin ? 0 : (int64_t)((uint64_t)time - (uint64_t)begin));
    kc_packet_put(r, &r->out, t->open.size > offset ? t->open.data + offset : "", t->open.size - offset);
    kc_packet_put_literal(r, &r->out, "}");
    t->open.size = offset;
}

static void put_counter(kc_packet_reader *r, const kc_packet_track_state *t, const kc_packet_sequence *s,
                        const event *e, int64_t time) {
    put_start(r, "C", t, time);
    put_category(r, &r->out, s, e);
    kc_packet_put_literal(r, &r->out, ",\"args\":{");
    if (t->key.size) {
        kc_packet_put(r, &r->out, t->key.data, t->key.size);
    } else {
        kc_packet_put_literal(r, &r->out, "\"value\"");
    }
    kc_packet_put_literal(r, &r->out, ":");
    if (e->has_double) {
        uint64_t at = r->out.size;
        kc_packet_put_double(r, &r->out, e->counter);
        while (at < r->out.size && (r->out.data[at] == '-' || (r->out.data[at] >= '0' && r->out.data[at] <= '9'))) {
            at++;
        }
        if (at == r->out.size) {
            kc_packet_put_literal(r, &r->out, ".0"); /* it stays a real number */
        }
    } else {
        kc_packet_put_number(r, &r->out, (int64_t)e->counter);
    }
    kc_packet_put_literal(r, &r->out, "}}");
}

static int contains(const kc_text *t, uint64_t from, const char *word) {
    uint64_t size = strlen(word);
    for (uint64_t at = from; at + size <= t->size; at++) {
        if (!memcmp(t->data + at, word, size)) {
            return 1;
        }
    }
    return 0;
}

/* Keeps the flows of an event; its category says which end it is. */
static void add_flows(kc_packet_reader *r, const kc_packet_sequence *s, const event *e, uint32_t number, int64_t time) {
    kc_packet_value v;
    kc_packet_span message = e->message;
    r->scratch.size = 0;
    event only = {.category = e->category, .category_text = e->category_text, .has_category = e->has_category};
    put_rest(r, &r->scratch, s, &only);
    uint32_t call = contains(&r->scratch, 0, "runtime") || contains(&r->scratch, 0, "driver");
    uint32_t op = contains(&r->scratch, 0, "\"cpu_op\"") || contains(&r->scratch, 0, "\"Operator\"");
    while (kc_packet_next(&message, &v) > 0) {
        if (!((v.field == 47 || v.field == 48) && v.wire == 1) && !((v.field == 36 || v.field == 42) && v.wire == 0)) {
            continue;
        }
        kc_packet_flow *all = kc_packet_grown(r, r->flows, r->flow_count, sizeof *all);
        if (!all) {
            return;
        }
        r->flows = all;
        all[r->flow_count++] = (kc_packet_flow){v.number, time, number, !call, op};
    }
}

static int read_event(kc_packet_span message, event *e) {
    kc_packet_value v;
    int more;
    *e = (event){.message = message};
    while ((more = kc_packet_next(&message, &v)) > 0) {
        switch (v.field << 3 | v.wire) {
        case 9 << 3: e->type = v.number; break;
        case 11 << 3:
            e->track = v.number;
            e->has_track = 1;
            break;
        case 10 << 3:
            e->name = v.number;
            e->has_name = 1;
            break;
        case 23 << 3 | 2:
            e->name_text = v.data;
            e->has_name = 2;
            break;
        case 3 << 3:
            if (!e->has_category) {
                e->category = v.number;
                e->has_category = 1;
            }
            break;
        case 22 << 3 | 2:
            e->category_text = v.data;
            e->has_category = 2;
            break;
        case 30 << 3: e->counter = v.number; break;
        case 44 << 3 | 1:
            e->counter = v.number;
            e->has_double = 1;
            break;
        case 47 << 3 | 1:
        case 48 << 3 | 1:
        case 36 << 3:
        case 42 << 3: e->flows = 1; break;
        default: break;
        }
    }
    return more == 0;
}

static void take_event(kc_packet_reader *r, kc_packet_sequence *s, uint64_t sequence_id, const event *e, int64_t time) {
    if (e->type < BEGIN || e->type > COUNTER) {
        r->counts.legacy++;
        return;
    }
    uint64_t uuid = e->has_track ? e->track : s->default_track ? s->default_track : UINT64_MAX - sequence_id;
    uint32_t number = kc_packet_track_of(r, uuid);
    if (number == UINT32_MAX || r->tracks[number].hidden) {
        return;
    }
    kc_packet_track_state *t = r->tracks + number;
    r->counts.events++;
    if (time > r->counts.last || r->counts.events == 1) {
        r->counts.last = time;
    }
    if (e->type == END) {
        if (t->depth) {
            pop(r, t, time);
        } else {
            r->counts.unbegun++;
        }
        return;
    }
    if (e->flows && !r->no_flows) {
        add_flows(r, s, e, number, time);
    }
    if (e->type == COUNTER) {
        put_counter(r, t, s, e, time);
    } else if (e->type == INSTANT || t->depth >= MAX_OPEN) {
        put_start(r, "i", t, time);
        kc_packet_put_literal(r, &r->out, ",\"s\":\"t\"");
        put_rest(r, &r->out, s, e);
        kc_packet_put_literal(r, &r->out, "}");
    } else {
        push(r, number, s, e, time);
    }
}

/* ---- packets */

static void read_defaults(kc_packet_sequence *s, kc_packet_span message) {
    kc_packet_value v, w;
    while (kc_packet_next(&message, &v) > 0) {
        if (v.field == 58 && v.wire == 0) {
            s->default_clock = v.number;
        } else if (v.field == 11 && v.wire == 2) {
            while (kc_packet_next(&v.data, &w) > 0) {
                if (w.field == 11 && w.wire == 0) {
                    s->default_track = w.number;
                }
            }
        }
    }
}

/* 1: the caller should see it; 0: done; -1: no valid message. */
static int read_packet(kc_packet_reader *r, kc_packet_span message) {
    kc_packet_value v;
    kc_packet_span clocks = {0}, interned = {0}, defaults = {0}, track_event = {0};
    uint64_t time = 0, sequence_id = 0, clock_id = 0, cleared = 0;
    int has_time = 0, shown = 0, more;
    while ((more = kc_packet_next(&message, &v)) > 0) {
        switch (v.field << 3 | v.wire) {
        case 8 << 3:
            time = v.number;
            has_time = 1;
            break;
        case 10 << 3: sequence_id = v.number; break;
        case 13 << 3: cleared |= v.number & 1; break;
        case 41 << 3: cleared |= v.number != 0; break;
        case 58 << 3: clock_id = v.number; break;
        case 6 << 3 | 2: clocks = v.data; break;
        case 11 << 3 | 2: track_event = v.data; break;
        case 12 << 3 | 2: interned = v.data; break;
        case 59 << 3 | 2: defaults = v.data; break;
        case 5 << 3 | 2:
        case 60 << 3 | 2: shown = 1; break;
        default: break;
        }
    }
    kc_packet_sequence *s = kc_packet_sequence_of(r, sequence_id);
    if (more < 0 || !s) {
        return -1;
    }
    if (cleared || !s->generation) {
        *s = (kc_packet_sequence){.generation = ++r->generations, .default_clock = BOOT_CLOCK};
    }
    if (clocks.at) {
        kc_packet_read_clocks(s, clocks);
    }
    if (defaults.at) {
        read_defaults(s, defaults);
    }
    if (interned.at) {
        kc_packet_read_interned(r, s, interned);
    }
    int64_t now = has_time ? kc_packet_time_of(r, s, clock_id ? clock_id : s->default_clock, time) : 0;
    event e;
    if (track_event.at) {
        if (!read_event(track_event, &e)) {
            return -1;
        }
        take_event(r, s, sequence_id, &e, now);
    }
    return shown;
}

void kc_packet_reader_feed(kc_packet_reader *r, const uint8_t *data, uint64_t size, kc_packet_fed *result) {
    kc_packet_span all = {data, data + size};
    *result = (kc_packet_fed){.status = KC_PACKET_MORE};
    while (all.at < all.end && !r->failed) {
        const uint8_t *begin = all.at;
        uint64_t length;
        all.at++;
        if (*begin != PACKET) {
            result->status = KC_PACKET_DAMAGED;
            return;
        }
        if (!kc_packet_get_varint(&all, &length)) {
            if (all.at < all.end) {
                result->status = KC_PACKET_DAMAGED;
            }
            return;
        }
        if (length > (uint64_t)(all.end - all.at)) {
            return;
        }
        kc_packet_span message = {all.at, all.at + length};
        all.at += length;
        r->counts.packets++;
        int found = read_packet(r, message);
        r->counts.undecoded += found < 0;
        result->consumed = (uint64_t)(all.at - data);
        if (found > 0) {
            result->status = KC_PACKET_WHOLE;
            result->begin = (uint64_t)(message.at - data);
            result->end = (uint64_t)(message.end - data);
            return;
        }
        if (r->out.size >= OUT_BYTES) {
            return;
        }
    }
    if (r->failed) {
        result->status = KC_PACKET_NO_MEMORY;
    }
}

/* ---- the end */

static int compare(const void *left, const void *right) {
    const kc_packet_flow *a = left, *b = right;
    if (a->id != b->id) {
        return a->id < b->id ? -1 : 1;
    }
    if (a->after != b->after) {
        return a->after < b->after ? -1 : 1;
    }
    if (a->time != b->time) {
        return a->time < b->time ? -1 : 1;
    }
    return (a->track > b->track) - (a->track < b->track);
}

static void put_flow(kc_packet_reader *r, const kc_packet_flow *f, int first, int is_op) {
    const char *category = is_op ? "fwdbwd" : "ac2g";
    put_start(r, first ? "s" : "f", r->tracks + f->track, f->time);
    kc_packet_put_literal(r, &r->out, ",\"id\":");
    kc_packet_put_number(r, &r->out, (int64_t)(r->ours ? f->id & UINT32_MAX : f->id & INT64_MAX));
    kc_packet_put_literal(r, &r->out, ",\"cat\":\"");
    kc_packet_put_literal(r, &r->out, category);
    kc_packet_put_literal(r, &r->out, "\",\"name\":\"");
    kc_packet_put_literal(r, &r->out, category);
    kc_packet_put_literal(r, &r->out, first ? "\"}" : "\",\"bp\":\"e\"}");
}

int kc_packet_reader_finish(kc_packet_reader *r) {
    for (uint64_t i = 0; i < r->track_count; i++) {
        while (r->tracks[i].depth) {
            r->counts.open++;
            pop(r, r->tracks + i, r->counts.last);
        }
    }
    if (r->flow_count) {
        qsort(r->flows, r->flow_count, sizeof *r->flows, compare);
    }
    for (uint64_t i = 0, first = 0; i < r->flow_count; i++) {
        if (r->flows[i].id != r->flows[first].id) {
            first = i;
        }
        uint64_t second = first + 1 < r->flow_count && r->flows[first + 1].id == r->flows[first].id ? first + 1 : first;
        put_flow(r, r->flows + i, i == first, r->flows[first].op && r->flows[second].op);
    }
    r->flow_count = 0;
    return r->failed ? -1 : 0;
}

kc_packet_reader *kc_packet_reader_new(void) { return calloc(1, sizeof(kc_packet_reader)); }

void kc_packet_reader_free(kc_packet_reader *r) {
    if (!r) {
        return;
    }
    for (uint64_t i = 0; i < r->track_count; i++) {
        kc_packet_track_state *t = r->tracks + i;
        free(t->members.data);
        free(t->key.data);
        free(t->open.data);
        free(t->begins);
        free(t->texts);
    }
    free(r->out.data);
    free(r->arena.data);
    free(r->scratch.data);
    free(r->slots);
    free(r->sequences);
    free(r->tracks);
    free(r->texts);
    free(r->flows);
    free(r);
}

void kc_packet_reader_set(kc_packet_reader *r, int64_t base, uint32_t ours, uint32_t flows) {
    r->base = base;
    r->ours = ours;
    r->no_flows = !flows;
}

int kc_packet_reader_track(kc_packet_reader *r, uint64_t uuid, const char *members, uint64_t size, const char *key,
                           uint64_t key_size, uint32_t hidden) {
    uint32_t number = kc_packet_track_of(r, uuid);
    if (number == UINT32_MAX) {
        return -1;
    }
    kc_packet_track_state *t = r->tracks + number;
    t->members.size = t->key.size = 0;
    kc_packet_put(r, &t->members, members, size);
    kc_packet_put(r, &t->key, key, key_size);
    t->hidden = hidden;
    return r->failed ? -1 : 0;
}

const char *kc_packet_reader_text(const kc_packet_reader *r, uint64_t *size) {
    *size = r->out.size;
    return r->out.data;
}

void kc_packet_reader_drop(kc_packet_reader *r) { r->out.size = 0; }

void kc_packet_reader_count(const kc_packet_reader *r, kc_packet_read_counts *counts) { *counts = r->counts; }
