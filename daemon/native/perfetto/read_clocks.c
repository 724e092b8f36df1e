/* The clocks of a sequence of Perfetto packets. See reader_state.h.
 *
 * Threads: the caller's, without the GIL; a reader belongs to one thread at a time, and there is no global state.
 * Blocks: never.
 */
#include "perfetto/reader_state.h"

enum { FIRST_OWN_CLOCK = 64 };

static kc_packet_clock *clock_of(kc_packet_sequence *s, uint64_t id) {
    for (uint32_t i = 0; i < s->clock_count; i++) {
        if (s->clocks[i].id == id) {
            return s->clocks + i;
        }
    }
    return NULL;
}

void kc_packet_read_clocks(kc_packet_sequence *s, kc_packet_span message) {
    kc_packet_value v, w;
    kc_packet_clock found[CLOCKS];
    uint32_t count = 0;
    uint64_t boot = 0, has_boot = 0;
    while (kc_packet_next(&message, &v) > 0) {
        if (v.field != 1 || v.wire != 2) {
            continue;
        }
        uint64_t id = 0, time = 0, incremental = 0, multiplier = 1;
        while (kc_packet_next(&v.data, &w) > 0) {
            if (w.wire != 0) {
                continue;
            }
            if (w.field == 1) {
                id = w.number;
            } else if (w.field == 2) {
                time = w.number;
            } else if (w.field == 3) {
                incremental = w.number;
            } else if (w.field == 4 && w.number) {
                multiplier = w.number;
            }
        }
        if (id == BOOT_CLOCK) {
            boot = time;
            has_boot = 1;
        } else if (id >= FIRST_OWN_CLOCK && count < CLOCKS) {
            found[count++] = (kc_packet_clock){id, multiplier, (int64_t)(time * multiplier), incremental != 0};
        }
    }
    for (uint32_t i = 0; i < count; i++) {
        kc_packet_clock *c = clock_of(s, found[i].id);
        if (!c && s->clock_count < CLOCKS) {
            c = s->clocks + s->clock_count++;
        }
        if (!c) {
            continue;
        }
        *c = found[i];
        if (c->incremental) {
            c->time = has_boot ? (int64_t)boot : c->time;
        } else {
            c->time = has_boot ? (int64_t)(boot - (uint64_t)c->time) : 0;
        }
    }
}

int64_t kc_packet_time_of(kc_packet_reader *r, kc_packet_sequence *s, uint64_t clock_id, uint64_t time) {
    if (clock_id < FIRST_OWN_CLOCK) {
        return (int64_t)time;
    }
    kc_packet_clock *c = clock_of(s, clock_id);
    if (!c) {
        r->counts.lost_state++;
        return (int64_t)time;
    }
    uint64_t moved = (uint64_t)c->time + time * c->multiplier;
    if (c->incremental) {
        c->time = (int64_t)moved;
    }
    return (int64_t)moved;
}
