/* Reads Chrome-trace JSON into columns: one set per kind of event. Called through ctypes by
 * kineto_trace.formats.chrome.chrome_native_reader.
 *
 * Theory of operation
 *     The document comes in pieces. A piece that ends inside an event is read up to that event; the caller puts the
 *     rest in front of the next piece, so that every event is seen as a whole and nothing is kept half-read.
 *
 *     An event's kind follows from its phase, category and name. A table that Python hands in says which arguments of
 *     a kind are numbers with a column. A value that its column holds exactly sets a bit in the row's `present` mask
 *     and is gone from the text; whatever else the event has stays as JSON text, word for word, interned. Both
 *     together are the event again. Columns are made when the first row has their argument, and grow by realloc.
 *
 *     Text that is no valid JSON is mended where its meaning is clear: escapes that do not exist (Windows paths),
 *     control characters, N/A and nan. An event that still cannot be read is read again with quotes taken as part of a
 *     text unless a member's end follows. If that fails too it is left out: the reader goes on at the next object that
 *     is an event.
 *
 *     Input is untrusted: no read beyond the buffer and the padding that the caller promises, no recursion, no length
 *     believed. A parser is for one thread at a time; there is no global state.
 */
#ifndef KINETO_CHROME_H
#define KINETO_CHROME_H

#include <stddef.h>
#include <stdint.h>

#include "codec/codec.h"

#define KC_SCAN_PADDING 64 /* readable zero bytes behind every piece */
#define KC_MAX_COLUMNS 64
#define KC_MAX_KINDS 32
#define KC_MAX_ARGS 42 /* per kind: bits 20 to 61 of `present` */
#define KC_FIRST_ARG_BIT 20

/* Bits of `present` that are not arguments. */
enum {
    KC_HAS_PHASE = 1 << 0,
    KC_HAS_CATEGORY = 1 << 1,
    KC_HAS_NAME = 1 << 2,
    KC_HAS_PID = 1 << 3,
    KC_HAS_TID = 1 << 4,
    KC_HAS_TS = 1 << 5,
    KC_HAS_DUR = 1 << 6,
    KC_HAS_ID = 1 << 7,
    KC_HAS_ARGS = 1 << 8,
    KC_BP_E = 1 << 9,
    KC_S_T = 1 << 10,
    KC_S_G = 1 << 11,
    KC_TS_INTEGER = 1 << 12,
    KC_DUR_INTEGER = 1 << 13,
    KC_TS_REAL = 1 << 14, /* not whole nanoseconds: the column ts_real has the number */
    KC_DUR_REAL = 1 << 15,
    KC_PID_TEXT = 1 << 16,
    KC_TID_TEXT = 1 << 17,
    KC_ID_TEXT = 1 << 18,
};

/* The columns that every kind has; those from KC_COLUMN_ID on, and the arguments', are made when needed. */
enum {
    KC_COLUMN_START,    /* int64, ns after the document's base */
    KC_COLUMN_DURATION, /* int64, ns */
    KC_COLUMN_PRESENT,  /* uint64 */
    KC_COLUMN_NAME,     /* int32, number of a text; -1: none */
    KC_COLUMN_CATEGORY, /* int32 */
    KC_COLUMN_ARGS,     /* int32 */
    KC_COLUMN_MEMBERS,  /* int32 */
    KC_COLUMN_TRACK,    /* uint32, number of a pair of pid and tid */
    KC_COLUMN_PLACE,    /* uint32, of the event in the file */
    KC_COLUMN_PHASE,    /* uint8 */
    KC_COLUMN_ID,       /* int64 */
    KC_COLUMN_TS_REAL,  /* double, microseconds */
    KC_COLUMN_DUR_REAL, /* double */
    KC_FIXED_COLUMNS
};

#define KC_TEXT_ID (-((int64_t)1 << 62)) /* pid, tid or id that is a text: this less the text's number */

enum { KC_T_I64, KC_T_U64, KC_T_I32, KC_T_U32, KC_T_U16, KC_T_F64, KC_T_BOOL, KC_T_I32X3, KC_T_SIGNED_U32 };

typedef struct {
    const char *key;
    uint32_t key_bytes;
    uint32_t type;
    uint32_t column; /* of the kind; KC_T_I32X3 has three */
    uint32_t pad;
    int64_t default_value; /* of the column, as bits */
} kc_chrome_arg;

typedef struct {
    uint32_t first_arg;
    uint32_t arg_count;
} kc_chrome_kind;

typedef struct {
    const char *text; /* in lower case */
    uint32_t bytes;
    uint32_t suffix; /* 1: categories that end so */
    uint32_t kind;
    uint32_t pad;
} kc_chrome_category;

typedef struct {
    const kc_chrome_kind *kinds;
    const kc_chrome_arg *args;
    const kc_chrome_category *categories; /* of complete events and counters; the first that fits counts */
    uint32_t kind_count;
    uint32_t category_count;
    uint32_t memory_kind; /* instants with the name [memory] */
    uint32_t flow_kind;   /* phases s, t and f */
    uint32_t other_kind;
    uint32_t counter_kind; /* phase C, with one of its categories */
} kc_chrome_plan;

enum {
    KC_CHROME_MORE = 0,     /* wants the next piece, with what was not consumed in front of it */
    KC_CHROME_MEMBER = 1,   /* a member beside traceEvents: its key and value are at these places of the piece */
    KC_CHROME_DONE = 2,     /* the document is over */
    KC_CHROME_NOT_JSON = 3, /* neither an object nor a list */
    KC_CHROME_DAMAGE = 4,   /* something was left out: why, where, and how many bytes */
    KC_CHROME_NO_MEMORY = 5,
};

/* Why something was left out; kineto_trace.formats.chrome.chrome_native_reader has the words. */
enum {
    KC_WHY_NONE,
    KC_WHY_END, /* the text ends */
    KC_WHY_NO_MEMORY,
    KC_WHY_NO_KEY,
    KC_WHY_NO_COLON,
    KC_WHY_NO_VALUE,
    KC_WHY_NO_COMMA,
    KC_WHY_DEPTH,
    KC_WHY_NO_EVENT, /* a value that is no object */
    KC_WHY_LONG,     /* longer than the caller wants to keep */
};
/* What was left out. */
enum { KC_LOST_EVENT = 1, KC_LOST_ARGS = 2, KC_LOST_HEAD = 3, KC_LOST_END = 4, KC_LOST_ITEM = 5, KC_LOST_TAIL = 6 };

typedef struct {
    uint64_t consumed; /* bytes of the piece */
    uint64_t key_begin, key_end, value_begin, value_end;
    uint64_t at; /* KC_CHROME_DAMAGE: byte of the document */
    uint32_t status;
    uint32_t why;
    uint32_t lost;
    uint32_t pad;
} kc_chrome_fed;

typedef struct {
    uint64_t events;
    uint64_t mended;     /* events that are no valid JSON as they stand */
    uint64_t phases;     /* events with a phase */
    uint32_t in_events;  /* the document ended inside its list of events */
    uint32_t closed;     /* the document's own end was seen */
    uint32_t list;       /* the document is a bare list */
    uint32_t had_events; /* there was a list of events */
    uint64_t strings;
    uint64_t tracks;
} kc_chrome_counts;

typedef struct kc_chrome kc_chrome;

KC_EXPORT kc_chrome *kc_chrome_new(const kc_chrome_plan *plan); /* NULL: no memory, or a plan that cannot be */
KC_EXPORT void kc_chrome_free(kc_chrome *parser);
/* One piece. final: no more will come. give_up: what does not end in this piece is damaged. */
KC_EXPORT void kc_chrome_feed(kc_chrome *parser, const char *data, uint64_t size, uint32_t final, uint32_t give_up,
                              kc_chrome_fed *result);
KC_EXPORT void kc_chrome_count(const kc_chrome *parser, kc_chrome_counts *counts);
KC_EXPORT uint64_t kc_chrome_rows(const kc_chrome *parser, uint32_t kind);
/* Hands a column over: the caller frees it. NULL: no row has it. */
KC_EXPORT void *kc_chrome_take(kc_chrome *parser, uint32_t kind, uint32_t column);
KC_EXPORT void kc_chrome_release(void *column);
/* Text n is bytes[ends[n] .. ends[n + 1]]. */
KC_EXPORT const char *kc_chrome_strings(const kc_chrome *parser, const uint64_t **ends);
KC_EXPORT const int64_t *kc_chrome_tracks(const kc_chrome *parser); /* pid, tid, pid, tid, … */

/* ---- text: scanning, mending, interning ---- */

typedef struct {
    char *data;
    uint64_t size, capacity;
} kc_text;

int kc_text_reserve(kc_text *text, uint64_t more); /* 0, or -1 when out of memory */
int kc_text_append(kc_text *text, const char *bytes, uint64_t size);

enum { KC_ESCAPES = 1, KC_ODD = 2 }; /* kc_scan.flags: has escapes; is no valid JSON as it stands */

typedef struct {
    const char *end; /* zero bytes follow */
    uint32_t flags;  /* of what was scanned since the caller cleared them */
    uint32_t lenient;
    uint32_t why;
    uint32_t final; /* nothing follows `end` */
} kc_scan;

typedef struct {
    uint64_t mantissa;
    int32_t exponent;
    uint8_t negative;
    uint8_t integer; /* neither point nor exponent */
    uint8_t exact;   /* mantissa has all digits */
} kc_number;

static inline const char *kc_space(const char *p) {
    while (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t') {
        p++;
    }
    return p;
}

/* All of these give the place behind what they read; NULL, with `why`, if there is no such thing. */
const char *kc_scan_string(kc_scan *scan, const char *p, uint32_t in_list); /* p: behind the opening quote; gives the
                                                                              closing quote */
const char *kc_scan_value(kc_scan *scan, const char *p, kc_text *out); /* out: takes valid JSON; NULL: not wanted */
int kc_like_event(const char *p); /* whether p, a brace, begins an object whose first member an event could have */
const char *kc_scan_number(const char *p, kc_number *number);
double kc_number_value(const kc_number *number, const char *begin, const char *end);
/* The text of a JSON string's inside. 0: exact; 1: it has half characters (lone surrogates); -1: no memory. */
int kc_unescape(kc_text *out, const char *p, const char *end);

typedef struct {
    kc_text bytes;
    uint64_t *ends;
    uint32_t *hashes;
    uint8_t *marks; /* free for the owner; 0 at first */
    uint64_t count, capacity;
    uint32_t *slots; /* number + 1 */
    uint64_t slot_count;
} kc_strings;

int64_t kc_strings_add(kc_strings *strings, const char *bytes, uint64_t size); /* the number; -1: no memory */
void kc_strings_free(kc_strings *strings);

#endif
