/* Arguments of events: numbers into the columns of the event's kind, the rest into one text. See chrome.h.
 *
 * Threads: the caller's, without the GIL; a parser belongs to one thread at a time, and there is no global state.
 * Blocks: never; it allocates.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "chrome/parser_state.h"

#define FIRST_ROWS 256

static const uint8_t FIXED_WIDTH[KC_FIXED_COLUMNS] = {8, 8, 8, 4, 4, 4, 4, 4, 4, 1, 8, 8, 8};
static const uint8_t TYPE_WIDTH[] = {8, 8, 4, 4, 2, 8, 1, 4, 4};

/* ---- columns ---- */

static uint32_t key_slot(const char *key, uint64_t bytes) {
    uint64_t word = 0, last = 0;
    memcpy(&word, key, 8); /* keys have padding behind them */
    if (bytes < 8) {
        word &= (1ull << (8 * bytes)) - 1;
    } else {
        memcpy(&last, key + bytes - 8, 8);
    }
    return (uint32_t)(((word ^ last * 0x9E3779B97F4A7C15ull) + bytes) * 0xFF51AFD7ED558CCDull >> 56);
}

void kc_event_plan(kc_rows *kind) {
    for (uint32_t i = 0; i < KC_FIXED_COLUMNS; i++) {
        kind->width[i] = FIXED_WIDTH[i];
    }
    for (uint32_t i = 0; i < kind->arg_count; i++) {
        const kc_chrome_arg *arg = kind->args + i;
        for (uint32_t n = 0; n < (arg->type == KC_T_I32X3 ? 3u : 1u); n++) {
            kind->width[arg->column + n] = TYPE_WIDTH[arg->type];
            kind->fallback[arg->column + n] = arg->default_value;
        }
        uint32_t slot = key_slot(arg->key, arg->key_bytes);
        while (kind->slots[slot]) {
            slot = (slot + 1) % KC_KEY_SLOTS;
        }
        kind->slots[slot] = (uint8_t)(i + 1);
    }
}

int kc_event_reserve(kc_rows *k) {
    if (k->rows < k->capacity) {
        return 0;
    }
    uint64_t capacity = k->capacity ? k->capacity * 2 : FIRST_ROWS;
    if (!k->capacity) {
        k->made = (1u << KC_COLUMN_ID) - 1;
    }
    for (uint64_t left = k->made; left; left &= left - 1) {
        int i = __builtin_ctzll(left);
        void *data = realloc(k->data[i], capacity * k->width[i]);
        if (!data) {
            return -1;
        }
        k->data[i] = data;
    }
    k->capacity = capacity;
    return 0;
}

void kc_event_put(kc_rows *k, uint32_t column, uint64_t row, uint64_t bits) {
    switch (k->width[column]) {
    case 1: ((uint8_t *)k->data[column])[row] = (uint8_t)bits; break;
    case 2: ((uint16_t *)k->data[column])[row] = (uint16_t)bits; break;
    case 4: ((uint32_t *)k->data[column])[row] = (uint32_t)bits; break;
    default: ((uint64_t *)k->data[column])[row] = bits;
    }
}

static int make(kc_rows *k, uint32_t column) {
    if (k->made >> column & 1) {
        return 0;
    }
    k->data[column] = malloc(k->capacity * k->width[column]);
    if (!k->data[column]) {
        return -1;
    }
    k->made |= 1ull << column;
    for (uint64_t row = 0; row < k->rows; row++) {
        kc_event_put(k, column, row, (uint64_t)k->fallback[column]);
    }
    return 0;
}

/* A value of the row that is being read. */
int kc_event_set(kc_event *e, uint32_t column, uint64_t bits) {
    if (make(e->kind, column)) {
        return -1;
    }
    kc_event_put(e->kind, column, e->kind->rows, bits);
    e->touched |= 1ull << column;
    return 0;
}

/* Adds a member as it stands: key is its opening quote, end is behind its value. */
int kc_event_keep(const kc_scan *s, kc_text *to, const char *key, const char *end) {
    if (to->size && kc_text_append(to, ",", 1)) {
        return -1;
    }
    if (!(s->flags & KC_ODD)) {
        return kc_text_append(to, key, (uint64_t)(end - key));
    }
    kc_scan again = {.end = s->end};
    const char *p = kc_scan_value(&again, key, to);
    if (!p || kc_text_append(to, ":", 1)) {
        return -1;
    }
    again.lenient = s->lenient;
    return kc_scan_value(&again, kc_space(p) + 1, to) ? 0 : -1;
}

/* ---- arguments ---- */

static int store_number(kc_event *e, const kc_chrome_arg *arg, uint32_t column, const kc_number *n, const char *begin,
                        const char *end) {
    uint64_t limit, bits;
    if (arg->type == KC_T_F64) {
        double value = kc_number_value(n, begin, end);
        if (kc_event_set(e, column, kc_bits_of(value))) {
            return -1;
        }
        return !n->integer && isfinite(value);
    }
    if (!n->integer || !n->exact) {
        return 0;
    }
    bits = n->negative ? 0 - n->mantissa : n->mantissa;
    switch (arg->type) {
    case KC_T_I64: limit = (uint64_t)INT64_MAX + n->negative; break;
    case KC_T_U64: limit = n->negative ? 0 : UINT64_MAX; break;
    case KC_T_I32:
    case KC_T_I32X3: limit = (uint64_t)INT32_MAX + n->negative; break;
    case KC_T_U32: limit = n->negative ? 0 : UINT32_MAX; break;
    case KC_T_U16: limit = n->negative ? 0 : UINT16_MAX; break;
    case KC_T_SIGNED_U32: limit = (uint64_t)INT32_MAX + n->negative; break;
    default: return 0;
    }
    if (n->mantissa > limit) {
        if (arg->type == KC_T_SIGNED_U32 && n->mantissa <= UINT32_MAX && !n->negative &&
            kc_event_set(e, column, bits)) {
            return -1;
        }
        return 0;
    }
    return kc_event_set(e, column, bits) ? -1 : 1;
}

/* Fills the column of an argument. Gives the place behind the value if the column says it exactly, else NULL. */
static const char *store(kc_scan *s, kc_event *e, const kc_chrome_arg *arg, const char *p) {
    kc_number n;
    if (arg->type == KC_T_BOOL) {
        int yes = kc_is_word(p, "true", 4);
        if (!yes && !kc_is_word(p, "false", 5)) {
            return NULL;
        }
        if (kc_event_set(e, arg->column, (uint64_t)yes)) {
            return kc_no_memory(s);
        }
        return p + (yes ? 4 : 5);
    }
    if (arg->type == KC_T_I32X3) {
        if (*p != '[') {
            return NULL;
        }
        p = kc_space(p + 1);
        for (uint32_t i = 0; i < 3; i++) {
            const char *end = kc_scan_number(p, &n);
            if (!end) {
                return NULL;
            }
            int kept = store_number(e, arg, arg->column + i, &n, p, end);
            if (kept < 0) {
                return kc_no_memory(s);
            }
            p = kc_space(end);
            if (kept == 0 || *p != (i < 2 ? ',' : ']')) {
                return NULL;
            }
            p = i < 2 ? kc_space(p + 1) : p + 1;
        }
        return p;
    }
    int quoted = *p == '"';
    const char *end = kc_scan_number(p + quoted, &n);
    if (!end || end >= s->end || (quoted && *end != '"')) {
        return NULL;
    }
    if (!quoted && !n.integer && arg->type != KC_T_F64) { /* 7.0 by programs that know no integers */
        double value = kc_number_value(&n, p, end);
        if (value >= 0 && value < 1e15 && value == floor(value)) {
            n = (kc_number){(uint64_t)value, 0, 0, 1, 1};
            if (store_number(e, arg, arg->column, &n, p, end) < 0) {
                return kc_no_memory(s);
            }
        }
        return NULL;
    }
    int kept = store_number(e, arg, arg->column, &n, p + quoted, end);
    if (kept < 0) {
        return kc_no_memory(s);
    }
    return kept && !quoted ? end : NULL;
}

static uint32_t find_arg(const kc_rows *k, const char *key, uint64_t bytes, uint32_t guess) {
    if (guess && k->args[guess - 1].key_bytes == bytes && !memcmp(k->args[guess - 1].key, key, bytes)) {
        return guess;
    }
    for (uint32_t slot = key_slot(key, bytes); k->slots[slot]; slot = (slot + 1) % KC_KEY_SLOTS) {
        const kc_chrome_arg *arg = k->args + k->slots[slot] - 1;
        if (arg->key_bytes == bytes && !memcmp(arg->key, key, bytes)) {
            return k->slots[slot];
        }
    }
    return 0;
}

/* The object of arguments at p. */
const char *kc_event_args(kc_chrome *c, kc_scan *s, kc_event *e, const char *p) {
    kc_rows *k = e->kind;
    uint32_t before = 0;
    p = kc_space(p + 1);
    if (*p == '}') {
        return p + 1;
    }
    for (;;) {
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
        uint32_t n = find_arg(k, key + 1, (uint64_t)(close - key - 1), k->next[before]);
        const char *end = NULL;
        s->why = 0;
        if (n) {
            const kc_chrome_arg *arg = k->args + n - 1;
            uint64_t bit = 1ull << (KC_FIRST_ARG_BIT + n - 1);
            k->next[before] = (uint8_t)n;
            before = n;
            int again = (e->args_seen & bit) != 0, taken = !again && e->touched >> arg->column & 1;
            e->args_seen |= bit;
            end = taken ? NULL : store(s, e, arg, p); /* taken: two arguments share the column */
            if (s->why == KC_WHY_NO_MEMORY) {
                return NULL;
            }
            if (again && !(e->present & bit)) {
                end = NULL; /* the text has it already, and what comes last counts */
            }
            e->present = end ? e->present | bit : e->present & ~bit;
        }
        if (!end) {
            end = kc_scan_value(s, p, NULL);
            if (!end) {
                return NULL;
            }
            if (kc_event_keep(s, &c->event_args, key, end)) {
                return kc_no_memory(s);
            }
        }
        s->flags |= flags;
        p = kc_space(end);
        if (*p == '}') {
            return p + 1;
        }
        if (*p != ',') {
            return kc_stop(s, p, KC_WHY_NO_COMMA);
        }
        p = kc_space(p + 1);
    }
}
