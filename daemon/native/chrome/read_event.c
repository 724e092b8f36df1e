/* One event of a Chrome trace: its members, its kind, its row. See chrome.h.
 *
 * Threads: the caller's, without the GIL; a parser belongs to one thread at a time, and there is no global state.
 * Blocks: never; it allocates.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "chrome/parser_state.h"

#define FIRST_TRACKS 64
#define MAX_NS 9.2e18

/* ---- members ---- */

/* The number of the text at p (behind its opening quote). exact: whether the number says all of it. */
static const char *text_number(kc_chrome *c, kc_scan *s, const char *p, int64_t *number, int *exact) {
    uint32_t before = s->flags;
    s->flags = 0;
    const char *end = kc_scan_string(s, p, 0);
    *exact = 1;
    if (!end) {
        return NULL;
    }
    if (s->flags & KC_ESCAPES) {
        c->scratch.size = 0;
        int halves = kc_unescape(&c->scratch, p, end);
        *exact = !halves;
        *number = halves < 0 ? -1 : kc_strings_add(&c->strings, c->scratch.data, c->scratch.size);
    } else {
        *number = kc_strings_add(&c->strings, p, (uint64_t)(end - p));
    }
    s->flags |= before;
    return *number < 0 ? kc_no_memory(s) : end + 1;
}

/* Nanoseconds of a number of microseconds. 2: exact; 1: rounded; 0: out of range. */
static int nanoseconds(const kc_number *n, const char *begin, const char *end, int64_t *ns) {
    static const uint64_t powers[] = {1,
                                      10,
                                      100,
                                      1000,
                                      10000,
                                      100000,
                                      1000000,
                                      10000000,
                                      100000000,
                                      1000000000,
                                      10000000000,
                                      100000000000,
                                      1000000000000,
                                      10000000000000,
                                      100000000000000,
                                      1000000000000000};
    int exponent = n->exponent + 3;
    uint64_t value = n->mantissa;
    int exact = n->exact;
    if (!value || !exact || exponent < -15 || exponent > 15) {
        double us = kc_number_value(n, begin, end), whole = floor(us);
        if (!(fabs(us) < MAX_NS / 1000)) {
            return 0;
        }
        *ns = (int64_t)whole * 1000 + (int64_t)rint((us - whole) * 1000);
        return us == 0 && (n->integer || !n->negative) ? 2 : 1; /* -0.0 is no integer */
    }
    if (exponent < 0) {
        uint64_t divisor = powers[-exponent], rest = value % divisor;
        value = value / divisor + (rest * 2 >= divisor);
        exact = !rest;
    } else if (value > (uint64_t)MAX_NS / powers[exponent]) {
        return 0;
    } else {
        value *= powers[exponent];
    }
    if (value > (uint64_t)MAX_NS) {
        return 0;
    }
    *ns = n->negative ? -(int64_t)value : (int64_t)value;
    return exact ? 2 : 1;
}

/* ts or dur. kept: whether the columns say it exactly. */
static const char *time_member(kc_event *e, const char *p, uint32_t has, int *kept) {
    int is_ts = has == KC_HAS_TS, quoted = *p == '"';
    const char *begin = p + quoted;
    kc_number n;
    const char *end = kc_scan_number(begin, &n);
    *kept = 0;
    if (!end || (quoted && *end != '"')) {
        return NULL;
    }
    int found = nanoseconds(&n, begin, end, is_ts ? &e->start : &e->duration);
    if (!found) {
        return NULL;
    }
    e->seen |= has;
    if (quoted) {
        return NULL;
    }
    uint32_t integer = is_ts ? KC_TS_INTEGER : KC_DUR_INTEGER, real = is_ts ? KC_TS_REAL : KC_DUR_REAL;
    if (found == 2) {
        e->present |= has | (n.integer ? integer : 0);
    } else {
        *(is_ts ? &e->ts_real : &e->dur_real) = kc_number_value(&n, begin, end);
        e->present |= has | real;
    }
    *kept = 1;
    return end;
}

/* pid, tid or id. */
static const char *id_member(kc_chrome *c, kc_scan *s, kc_event *e, const char *p, uint32_t has, uint32_t is_text,
                             int64_t *value, int *kept) {
    *kept = 0;
    if (*p == '"') {
        int64_t number;
        const char *end = text_number(c, s, p + 1, &number, kept);
        if (!end) {
            return NULL;
        }
        *value = KC_TEXT_ID - number;
        if (*kept) {
            e->present |= has | is_text;
        }
        return end;
    }
    kc_number n;
    const char *end = kc_scan_number(p, &n);
    if (!end || !n.integer || !n.exact || n.mantissa > (uint64_t)INT64_MAX ||
        (n.negative && n.mantissa >= (uint64_t)1 << 62)) {
        return NULL;
    }
    *value = n.negative ? -(int64_t)n.mantissa : (int64_t)n.mantissa;
    e->present |= has;
    *kept = 1;
    return end;
}

/* The kind that a category belongs to; other_kind if it belongs to none. */
static uint32_t kind_of_category(kc_chrome *c, int32_t category) {
    const kc_chrome_plan *plan = &c->plan;
    uint8_t *mark = c->strings.marks + category;
    if (*mark) {
        return *mark - 1u;
    }
    const char *text = c->strings.bytes.data + c->strings.ends[category];
    uint64_t bytes = c->strings.ends[category + 1] - c->strings.ends[category];
    *mark = (uint8_t)(plan->other_kind + 1);
    for (uint32_t i = 0; i < plan->category_count; i++) {
        const kc_chrome_category *entry = plan->categories + i;
        if (bytes < entry->bytes || (!entry->suffix && bytes != entry->bytes)) {
            continue;
        }
        const char *at = text + bytes - entry->bytes;
        uint32_t n = 0;
        while (n < entry->bytes && (at[n] >= 'A' && at[n] <= 'Z' ? at[n] + 32 : at[n]) == entry->text[n]) {
            n++;
        }
        if (n == entry->bytes) {
            *mark = (uint8_t)(entry->kind + 1);
            break;
        }
    }
    return *mark - 1u;
}

static kc_rows *kind_of(kc_chrome *c, const kc_event *e) {
    const uint32_t timed = KC_HAS_TS | KC_HAS_DUR;
    const kc_chrome_plan *plan = &c->plan;
    if (e->phase == 'X' && e->category >= 0 && (e->seen & timed) == timed) {
        uint32_t kind = kind_of_category(c, e->category);
        return c->kinds + (kind == plan->counter_kind ? plan->other_kind : kind);
    }
    if (e->phase == 'C' && e->category >= 0 && e->seen & KC_HAS_TS &&
        kind_of_category(c, e->category) == plan->counter_kind) {
        return c->kinds + plan->counter_kind;
    }
    if (e->phase == 'i' && e->memory && e->seen & KC_HAS_TS) {
        return c->kinds + plan->memory_kind;
    }
    if ((e->phase == 's' || e->phase == 't' || e->phase == 'f') && e->seen & KC_HAS_TS) {
        return c->kinds + plan->flow_kind;
    }
    return c->kinds + plan->other_kind;
}

/* The member args at p. put_off: its kind is not known yet. */
static const char *args_member(kc_chrome *c, kc_scan *s, kc_event *e, const char *p) {
    uint32_t known = KC_HAS_PHASE | KC_HAS_CATEGORY | KC_HAS_NAME | KC_HAS_TS;
    if (e->phase == 'X') {
        known |= KC_HAS_DUR;
    }
    e->present |= KC_HAS_ARGS;
    if ((e->seen & known) != known) {
        e->args = p;
        e->args_end = kc_scan_value(s, p, NULL);
        return e->args_end;
    }
    e->kind = kind_of(c, e);
    if (kc_event_reserve(e->kind)) {
        return kc_no_memory(s);
    }
    return kc_event_args(c, s, e, p);
}

/* One member whose value is at p. kept: whether columns say it, so that its text is not needed. */
static const char *member(kc_chrome *c, kc_scan *s, kc_event *e, const char *key, uint64_t bytes, const char *p,
                          int *kept) {
    int64_t number;
    const char *end;
    *kept = 0;
    switch (bytes) {
    case 1:
        if (*key == 's' && !(e->present & (KC_S_T | KC_S_G)) &&
            (kc_is_word(p, "\"t\"", 3) || kc_is_word(p, "\"g\"", 3))) {
            e->present |= p[1] == 't' ? KC_S_T : KC_S_G;
            *kept = 1;
            return p + 3;
        }
        return NULL;
    case 2:
        if (kc_is_word(key, "ph", 2) && *p == '"' && p[1] >= 'A' && p[1] <= 'z' && p[1] != '\\' && p[2] == '"') {
            if (e->seen & KC_HAS_PHASE) {
                return NULL;
            }
            e->phase = (uint8_t)p[1];
            e->seen |= KC_HAS_PHASE;
            e->present |= KC_HAS_PHASE;
            *kept = 1;
            return p + 3;
        }
        if (kc_is_word(key, "ts", 2) && !(e->seen & KC_HAS_TS)) {
            return time_member(e, p, KC_HAS_TS, kept);
        }
        if (kc_is_word(key, "id", 2) && !(e->present & KC_HAS_ID)) {
            return id_member(c, s, e, p, KC_HAS_ID, KC_ID_TEXT, &e->id, kept);
        }
        if (kc_is_word(key, "bp", 2) && !(e->present & KC_BP_E) && kc_is_word(p, "\"e\"", 3)) {
            e->present |= KC_BP_E;
            *kept = 1;
            return p + 3;
        }
        return NULL;
    case 3:
        if (kc_is_word(key, "cat", 3) && *p == '"' && !(e->seen & KC_HAS_CATEGORY)) {
            end = text_number(c, s, p + 1, &number, kept);
            if (!end) {
                return NULL;
            }
            e->category = (int32_t)number;
            e->seen |= KC_HAS_CATEGORY;
            e->present |= *kept ? KC_HAS_CATEGORY : 0;
            return end;
        }
        if (kc_is_word(key, "pid", 3) && !(e->seen & KC_HAS_PID)) {
            e->seen |= KC_HAS_PID;
            return id_member(c, s, e, p, KC_HAS_PID, KC_PID_TEXT, &e->pid, kept);
        }
        if (kc_is_word(key, "tid", 3) && !(e->seen & KC_HAS_TID)) {
            e->seen |= KC_HAS_TID;
            return id_member(c, s, e, p, KC_HAS_TID, KC_TID_TEXT, &e->tid, kept);
        }
        if (kc_is_word(key, "dur", 3) && !(e->seen & KC_HAS_DUR)) {
            return time_member(e, p, KC_HAS_DUR, kept);
        }
        return NULL;
    case 4:
        if (kc_is_word(key, "name", 4) && *p == '"' && !(e->seen & KC_HAS_NAME)) {
            e->memory = kc_is_word(p + 1, "[memory]\"", 9);
            end = text_number(c, s, p + 1, &number, kept);
            if (!end) {
                return NULL;
            }
            e->name = (int32_t)number;
            e->seen |= KC_HAS_NAME;
            e->present |= *kept ? KC_HAS_NAME : 0;
            return end;
        }
        if (kc_is_word(key, "args", 4) && *p == '{' && !(e->seen & KC_HAS_ARGS)) {
            e->seen |= KC_HAS_ARGS;
            *kept = 1;
            return args_member(c, s, e, p);
        }
        return NULL;
    default: return NULL;
    }
}

/* ---- rows ---- */

static int64_t track_of(kc_chrome *c, int64_t pid, int64_t tid) {
    if (c->track_count && c->tracks[2 * c->last_track] == pid && c->tracks[2 * c->last_track + 1] == tid) {
        return c->last_track;
    }
    if (c->track_count == c->track_capacity) {
        uint64_t capacity = c->track_capacity ? c->track_capacity * 2 : FIRST_TRACKS;
        int64_t *tracks = realloc(c->tracks, capacity * 2 * sizeof *tracks);
        if (!tracks || capacity >= UINT32_MAX) {
            return -1;
        }
        c->tracks = tracks;
        uint32_t *slots = calloc(capacity * 2, sizeof *slots);
        if (!slots) {
            return -1;
        }
        free(c->track_slots);
        c->track_slots = slots;
        c->track_capacity = capacity;
        for (uint64_t n = 0; n < c->track_count; n++) {
            uint64_t slot = ((uint64_t)tracks[2 * n] * 0x9E3779B97F4A7C15ull + (uint64_t)tracks[2 * n + 1]) *
                                0xFF51AFD7ED558CCDull >>
                            20;
            for (slot &= capacity * 2 - 1; slots[slot]; slot = (slot + 1) & (capacity * 2 - 1))
                ;
            slots[slot] = (uint32_t)n + 1;
        }
    }
    uint64_t mask = c->track_capacity * 2 - 1;
    uint64_t slot = ((uint64_t)pid * 0x9E3779B97F4A7C15ull + (uint64_t)tid) * 0xFF51AFD7ED558CCDull >> 20 & mask;
    for (; c->track_slots[slot]; slot = (slot + 1) & mask) {
        uint32_t n = c->track_slots[slot] - 1;
        if (c->tracks[2 * n] == pid && c->tracks[2 * n + 1] == tid) {
            return c->last_track = n;
        }
    }
    c->tracks[2 * c->track_count] = pid;
    c->tracks[2 * c->track_count + 1] = tid;
    c->track_slots[slot] = (uint32_t)++c->track_count;
    c->last_track = (uint32_t)c->track_count - 1;
    return c->last_track;
}

static int interned(kc_chrome *c, const kc_text *text, int64_t *number) {
    *number = text->size ? kc_strings_add(&c->strings, text->data, text->size) : -1;
    return text->size && *number < 0 ? -1 : 0;
}

static int add_row(kc_chrome *c, kc_event *e) {
    kc_rows *k = e->kind;
    int64_t args, members, track = track_of(c, e->pid, e->tid);
    if (track < 0 || kc_event_reserve(k) || interned(c, &c->event_args, &args) ||
        interned(c, &c->event_members, &members)) {
        return -1;
    }
    if ((e->present & KC_HAS_ID || e->id) && kc_event_set(e, KC_COLUMN_ID, (uint64_t)e->id)) {
        return -1;
    }
    if (e->present & KC_TS_REAL && kc_event_set(e, KC_COLUMN_TS_REAL, kc_bits_of(e->ts_real))) {
        return -1;
    }
    if (e->present & KC_DUR_REAL && kc_event_set(e, KC_COLUMN_DUR_REAL, kc_bits_of(e->dur_real))) {
        return -1;
    }
    uint64_t row = k->rows;
    ((int64_t *)k->data[KC_COLUMN_START])[row] = e->start;
    ((int64_t *)k->data[KC_COLUMN_DURATION])[row] = e->duration;
    ((uint64_t *)k->data[KC_COLUMN_PRESENT])[row] = e->present;
    ((int32_t *)k->data[KC_COLUMN_NAME])[row] = e->name;
    ((int32_t *)k->data[KC_COLUMN_CATEGORY])[row] = e->category;
    ((int32_t *)k->data[KC_COLUMN_ARGS])[row] = (int32_t)args;
    ((int32_t *)k->data[KC_COLUMN_MEMBERS])[row] = (int32_t)members;
    ((uint32_t *)k->data[KC_COLUMN_TRACK])[row] = (uint32_t)track;
    ((uint32_t *)k->data[KC_COLUMN_PLACE])[row] = (uint32_t)c->counts.events;
    ((uint8_t *)k->data[KC_COLUMN_PHASE])[row] = e->phase;
    uint64_t unset = k->made & ~e->touched & ~(uint64_t)((1u << KC_COLUMN_ID) - 1);
    for (; unset; unset &= unset - 1) {
        int column = __builtin_ctzll(unset);
        kc_event_put(k, (uint32_t)column, row, (uint64_t)k->fallback[column]);
    }
    k->rows++;
    c->counts.events++;
    c->counts.phases += (e->seen & KC_HAS_PHASE) != 0;
    return 0;
}

/* The row of an event whose arguments cannot be read: all but these must be known. */
static int add_without_args(kc_chrome *c, kc_event *e) {
    const uint32_t needed = KC_HAS_PHASE | KC_HAS_NAME | KC_HAS_PID | KC_HAS_TS;
    if ((e->seen & needed) != needed) {
        return -1;
    }
    c->event_args.size = 0;
    e->present &= (1u << KC_FIRST_ARG_BIT) - 1;
    e->present &= ~(uint64_t)KC_HAS_ARGS;
    e->touched = 0;
    e->kind = kind_of(c, e);
    return add_row(c, e);
}

const char *kc_event_read(kc_chrome *c, kc_scan *s, const char *p, int keep_head, int need_phase,
                          const char **args_lost) {
    kc_event e = {.name = -1, .category = -1};
    c->event_args.size = c->event_members.size = 0;
    s->flags = 0;
    p = kc_space(p + 1);
    for (int first = 1; *p != '}' || !first; first = 0) {
        if (*p != '"') {
            return kc_stop(s, p, KC_WHY_NO_KEY);
        }
        const char *key = p;
        uint32_t lenient = s->lenient, flags = s->flags;
        s->flags = s->lenient = 0;
        const char *close = kc_scan_string(s, p + 1, 0);
        s->lenient = lenient;
        if (!close) {
            return NULL;
        }
        p = kc_space(close + 1);
        if (*p != ':') {
            return kc_stop(s, p, KC_WHY_NO_COLON);
        }
        p = kc_space(p + 1);
        int kept;
        uint32_t had_args = e.seen & KC_HAS_ARGS;
        s->why = 0;
        const char *end = member(c, s, &e, key + 1, (uint64_t)(close - key - 1), p, &kept);
        if (!end && s->why) {
            if (keep_head && !had_args && e.seen & KC_HAS_ARGS && !add_without_args(c, &e)) {
                *args_lost = p;
                return p + 1;
            }
            return NULL;
        }
        if (!end || !kept) {
            end = kc_scan_value(s, p, NULL);
            if (!end) {
                return NULL;
            }
            if (kc_event_keep(s, &c->event_members, key, end)) {
                return kc_no_memory(s);
            }
        }
        s->flags |= flags;
        p = kc_space(end);
        if (*p == '}') {
            break;
        }
        if (*p != ',') {
            return kc_stop(s, p, KC_WHY_NO_COMMA);
        }
        p = kc_space(p + 1);
    }
    if (need_phase && !(e.seen & KC_HAS_PHASE)) {
        return kc_stop(s, p, KC_WHY_NO_EVENT);
    }
    if (!e.kind) {
        e.kind = kind_of(c, &e);
        if (kc_event_reserve(e.kind)) {
            return kc_no_memory(s);
        }
        if (e.args && !kc_event_args(c, s, &e, e.args)) {
            return NULL;
        }
    }
    return add_row(c, &e) ? kc_no_memory(s) : p + 1;
}
