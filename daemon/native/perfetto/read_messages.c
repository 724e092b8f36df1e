/* The Perfetto reader: messages, memory, interned texts and annotations. See read_packets.h and reader_state.h.
 *
 * Threads: the caller's, without the GIL; a reader belongs to one thread at a time, and there is no global state.
 * Blocks: never; it allocates.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "perfetto/reader_state.h"

/* ---- messages */

int kc_packet_get_varint(kc_packet_span *s, uint64_t *number) {
    *number = 0;
    for (unsigned shift = 0; shift < 70 && s->at < s->end; shift += 7) {
        uint8_t byte = *s->at++;
        if (shift < 64) {
            *number |= (uint64_t)(byte & 127) << shift;
        }
        if (byte < 128) {
            return 1;
        }
    }
    return 0;
}

int kc_packet_next(kc_packet_span *s, kc_packet_value *v) {
    uint64_t tag, size;
    if (s->at == s->end) {
        return 0;
    }
    if (!kc_packet_get_varint(s, &tag) || tag >> 3 == 0 || tag > UINT32_MAX) {
        return -1;
    }
    v->field = (uint32_t)(tag >> 3);
    v->wire = tag & 7;
    v->number = 0;
    v->data = (kc_packet_span){NULL, NULL};
    switch (v->wire) {
    case 0: return kc_packet_get_varint(s, &v->number) ? 1 : -1;
    case 2:
        if (!kc_packet_get_varint(s, &size) || size > (uint64_t)(s->end - s->at)) {
            return -1;
        }
        v->data = (kc_packet_span){s->at, s->at + size};
        s->at += size;
        return 1;
    case 1:
    case 5:
        size = v->wire == 1 ? 8 : 4;
        if ((uint64_t)(s->end - s->at) < size) {
            return -1;
        }
        memcpy(&v->number, s->at, size);
        s->at += size;
        return 1;
    default: return -1;
    }
}

/* ---- memory */

void *kc_packet_grown(kc_packet_reader *r, void *items, uint64_t count, size_t size) {
    if (count & (count - 1)) {
        return items;
    }
    if (count >= UINT32_MAX / 2) {
        r->failed = 1;
        return NULL;
    }
    void *bigger = realloc(items, (count ? 2 * count : 1) * size);
    if (!bigger) {
        r->failed = 1;
    }
    return bigger;
}

void kc_packet_put(kc_packet_reader *r, kc_text *out, const char *bytes, uint64_t size) {
    if (kc_text_append(out, bytes, size)) {
        r->failed = 1;
    }
}

void kc_packet_put_literal(kc_packet_reader *r, kc_text *out, const char *literal) {
    kc_packet_put(r, out, literal, strlen(literal));
}

void kc_packet_put_number(kc_packet_reader *r, kc_text *out, int64_t number) {
    char digits[24], *p = digits + sizeof digits;
    uint64_t rest = number < 0 ? 0 - (uint64_t)number : (uint64_t)number;
    do {
        *--p = (char)('0' + rest % 10);
    } while (rest /= 10);
    if (number < 0) {
        *--p = '-';
    }
    kc_packet_put(r, out, p, (uint64_t)(digits + sizeof digits - p));
}

void kc_packet_put_escaped(kc_packet_reader *r, kc_text *out, kc_packet_span s) {
    kc_packet_put_literal(r, out, "\"");
    const uint8_t *from = s.at;
    for (; s.at < s.end; s.at++) {
        uint8_t c = *s.at;
        if (c >= 32 && c != '"' && c != '\\') {
            continue;
        }
        char code[8];
        kc_packet_put(r, out, (const char *)from, (uint64_t)(s.at - from));
        kc_packet_put(r, out, code, (uint64_t)(c >= 32 ? sprintf(code, "\\%c", c) : sprintf(code, "\\u%04x", c)));
        from = s.at + 1;
    }
    kc_packet_put(r, out, (const char *)from, (uint64_t)(s.end - from));
    kc_packet_put_literal(r, out, "\"");
}

static uint64_t hash(uint64_t a, uint64_t b) {
    uint64_t h = (a ^ b * 0x9E3779B97F4A7C15ull) * 0xD6E8FEB86659FD93ull;
    return h ^ h >> 32;
}

/* The slot of (a, b), maybe a free one. NULL: no memory. */
static kc_packet_slot *find_slot(kc_packet_reader *r, uint64_t a, uint64_t b) {
    if (2 * r->used >= r->slot_count) {
        uint64_t count = r->slot_count ? 2 * r->slot_count : 256;
        kc_packet_slot *slots = calloc(count, sizeof *slots);
        if (!slots) {
            r->failed = 1;
            return NULL;
        }
        for (uint64_t i = 0; i < r->slot_count; i++) {
            if (r->slots[i].place) {
                uint64_t at = hash(r->slots[i].a, r->slots[i].b) & (count - 1);
                while (slots[at].place) {
                    at = (at + 1) & (count - 1);
                }
                slots[at] = r->slots[i];
            }
        }
        free(r->slots);
        r->slots = slots;
        r->slot_count = count;
    }
    uint64_t at = hash(a, b) & (r->slot_count - 1);
    while (r->slots[at].place && (r->slots[at].a != a || r->slots[at].b != b)) {
        at = (at + 1) & (r->slot_count - 1);
    }
    return r->slots + at;
}

static void take_slot(kc_packet_reader *r, kc_packet_slot *s, uint64_t a, uint64_t b, uint64_t place) {
    *s = (kc_packet_slot){a, b, (uint32_t)place + 1};
    r->used++;
}

kc_packet_sequence *kc_packet_sequence_of(kc_packet_reader *r, uint64_t id) {
    kc_packet_slot *s = find_slot(r, 1, id);
    if (s && !s->place) {
        kc_packet_sequence *all = kc_packet_grown(r, r->sequences, r->sequence_count, sizeof *all);
        if (!all) {
            return NULL;
        }
        r->sequences = all;
        all[r->sequence_count] = (kc_packet_sequence){.default_clock = 6};
        take_slot(r, s, 1, id, r->sequence_count++);
    }
    return s ? r->sequences + (s->place - 1) : NULL;
}

uint32_t kc_packet_track_of(kc_packet_reader *r, uint64_t uuid) {
    kc_packet_slot *s = find_slot(r, 2, uuid);
    if (s && !s->place) {
        kc_packet_track_state *all = kc_packet_grown(r, r->tracks, r->track_count, sizeof *all);
        if (!all) {
            return UINT32_MAX;
        }
        r->tracks = all;
        memset(all + r->track_count, 0, sizeof *all);
        char members[64];
        int size = sprintf(members, "\"pid\":0,\"tid\":\"track %" PRIu64 "\"", r->track_count);
        kc_packet_put(r, &all[r->track_count].members, members, (uint64_t)size);
        take_slot(r, s, 2, uuid, r->track_count++);
    }
    return s ? s->place - 1 : UINT32_MAX;
}

/* ---- interned texts */

static void intern(kc_packet_reader *r, const kc_packet_sequence *s, uint64_t what, kc_packet_span message) {
    kc_packet_value v;
    kc_packet_span content = {NULL, NULL};
    uint64_t id = 0;
    while (kc_packet_next(&message, &v) > 0) {
        if (v.field == 1 && v.wire == 0) {
            id = v.number;
        } else if (v.field == 2 && v.wire == 2) {
            content = v.data;
        }
    }
    uint64_t key = s->generation << 3 | what;
    kc_packet_slot *found = find_slot(r, key, id);
    if (!found) {
        return;
    }
    if (!found->place) {
        kc_packet_text *all = kc_packet_grown(r, r->texts, r->text_count, sizeof *all);
        if (!all) {
            return;
        }
        r->texts = all;
        take_slot(r, found, key, id, r->text_count++);
    }
    kc_packet_text *t = r->texts + (found->place - 1);
    t->offset = r->arena.size;
    if (what == VALUES && r->ours && id & 1) {
        kc_packet_put(r, &r->arena, (const char *)content.at, (uint64_t)(content.end - content.at));
    } else {
        kc_packet_put_escaped(r, &r->arena, content);
    }
    t->size = r->arena.size - t->offset;
}

void kc_packet_put_interned(kc_packet_reader *r, kc_text *out, const kc_packet_sequence *s, uint64_t what,
                            uint64_t id) {
    kc_packet_slot *found = find_slot(r, s->generation << 3 | what, id);
    if (!found || !found->place) {
        r->counts.lost_state++;
        kc_packet_put_literal(r, out, "\"?\"");
        return;
    }
    const kc_packet_text *t = r->texts + (found->place - 1);
    kc_packet_put(r, out, r->arena.data + t->offset, t->size);
}

void kc_packet_read_interned(kc_packet_reader *r, const kc_packet_sequence *s, kc_packet_span message) {
    kc_packet_value v;
    while (kc_packet_next(&message, &v) > 0) {
        if (v.wire != 2) {
            continue;
        }
        if (v.field >= 1 && v.field <= 3) {
            intern(r, s, v.field, v.data);
        } else if (v.field == 29) {
            intern(r, s, VALUES, v.data);
        }
    }
}

/* ---- annotations */

void kc_packet_put_double(kc_packet_reader *r, kc_text *out, uint64_t bits) {
    double number;
    char digits[40];
    memcpy(&number, &bits, 8);
    if (number - number != 0) {
        kc_packet_put_literal(r, out, number != number ? "NaN" : number > 0 ? "Infinity" : "-Infinity");
    } else {
        kc_packet_put(r, out, digits, (uint64_t)sprintf(digits, "%.17g", number));
    }
}

static void put_value(kc_packet_reader *r, kc_text *out, const kc_packet_sequence *s, kc_packet_span message,
                      unsigned nesting);

int kc_packet_put_annotation(kc_packet_reader *r, kc_text *out, const kc_packet_sequence *s, kc_packet_span message,
                             unsigned nesting) {
    kc_packet_value v;
    kc_packet_span all = message;
    int named = 0;
    while (!named && kc_packet_next(&message, &v) > 0) {
        if (v.field == 1 && v.wire == 0) {
            kc_packet_put_interned(r, out, s, ANNOTATIONS, v.number);
            named = 1;
        } else if (v.field == 10 && v.wire == 2) {
            kc_packet_put_escaped(r, out, v.data);
            named = 1;
        }
    }
    if (!named) {
        return 0;
    }
    kc_packet_put_literal(r, out, ":");
    put_value(r, out, s, all, nesting);
    return 1;
}

/* An annotation's dictionary (field 11) or list (field 12). */
static void put_list(kc_packet_reader *r, kc_text *out, const kc_packet_sequence *s, kc_packet_span message,
                     unsigned nesting, uint32_t field) {
    kc_packet_value v;
    uint64_t count = 0;
    kc_packet_put_literal(r, out, field == 11 ? "{" : "[");
    while (kc_packet_next(&message, &v) > 0) {
        if (v.field != field || v.wire != 2) {
            continue;
        }
        uint64_t before = out->size;
        if (count) {
            kc_packet_put_literal(r, out, ",");
        }
        if (field == 12) {
            put_value(r, out, s, v.data, nesting + 1);
        } else if (!kc_packet_put_annotation(r, out, s, v.data, nesting + 1)) {
            out->size = before;
            continue;
        }
        count++;
    }
    kc_packet_put_literal(r, out, field == 11 ? "}" : "]");
}

static void put_value(kc_packet_reader *r, kc_text *out, const kc_packet_sequence *s, kc_packet_span message,
                      unsigned nesting) {
    kc_packet_value v;
    char digits[32];
    kc_packet_span all = message;
    while (kc_packet_next(&message, &v) > 0) {
        switch (v.field << 3 | v.wire) {
        case 2 << 3: kc_packet_put_literal(r, out, v.number ? "true" : "false"); return;
        case 3 << 3:
        case 7 << 3:
            if (v.number <= INT64_MAX) {
                kc_packet_put_number(r, out, (int64_t)v.number);
                return;
            }
            kc_packet_put(r, out, digits, (uint64_t)sprintf(digits, "%" PRIu64, v.number));
            return;
        case 4 << 3: kc_packet_put_number(r, out, (int64_t)v.number); return;
        case 5 << 3 | 1: kc_packet_put_double(r, out, v.number); return;
        case 6 << 3 | 2:
        case 9 << 3 | 2: kc_packet_put_escaped(r, out, v.data); return;
        case 17 << 3: kc_packet_put_interned(r, out, s, VALUES, v.number); return;
        case 11 << 3 | 2:
        case 12 << 3 | 2:
            if (nesting < MAX_NESTING) {
                put_list(r, out, s, all, nesting, v.field);
                return;
            }
        }
    }
    kc_packet_put_literal(r, out, "null");
}
