/* What a parser of Chrome traces remembers. See chrome.h. */
#ifndef KINETO_CHROME_STATE_H
#define KINETO_CHROME_STATE_H

#include <string.h>

#include "chrome/chrome.h"

#define KC_KEY_SLOTS 256u

typedef struct {
    void *data[KC_MAX_COLUMNS];
    uint8_t width[KC_MAX_COLUMNS];
    int64_t fallback[KC_MAX_COLUMNS]; /* of rows that do not have the value */
    uint64_t made;                    /* columns that are there */
    uint64_t rows, capacity;
    const kc_chrome_arg *args;
    uint32_t arg_count;
    uint8_t slots[KC_KEY_SLOTS];   /* by key: argument + 1 */
    uint8_t next[KC_MAX_ARGS + 1]; /* argument that came after this one last time, + 1; 0th: the first one */
} kc_rows;

typedef struct {
    int64_t pid, tid;
    uint32_t number;
} kc_track;

struct kc_chrome {
    kc_rows kinds[KC_MAX_KINDS];
    kc_chrome_plan plan;
    kc_chrome_arg *args;
    kc_chrome_category *categories;
    char *texts; /* keys and categories: copies, so that the plan need not live on */
    kc_strings strings;
    kc_text scratch, event_args, event_members;
    int64_t *tracks;
    uint32_t *track_slots;
    uint64_t track_count, track_capacity;
    uint32_t last_track;
    kc_chrome_counts counts;
    uint64_t offset; /* of the piece in the document */
    uint32_t state, seeking, seek_lost;
};

/* The event that is being read. */
typedef struct {
    uint64_t present, touched, args_seen;
    int64_t start, duration, pid, tid, id;
    double ts_real, dur_real;
    int32_t name, category;
    uint32_t seen; /* HAS_… of the members that came, exact or not */
    uint8_t phase, memory;
    kc_rows *kind;               /* once it is known */
    const char *args, *args_end; /* put off until the kind is known */
} kc_event;

int kc_event_reserve(kc_rows *kind); /* room for one more row; 0, or -1 when out of memory */
int kc_event_set(kc_event *event, uint32_t column, uint64_t bits); /* a value of the row that is being read */
void kc_event_put(kc_rows *kind, uint32_t column, uint64_t row, uint64_t bits);
int kc_event_keep(const kc_scan *scan, kc_text *to, const char *key, const char *end);
const char *kc_event_args(kc_chrome *c, kc_scan *scan, kc_event *event, const char *p); /* the object at p */

static inline int kc_is_word(const char *p, const char *word, uint64_t bytes) { return !memcmp(p, word, bytes); }

static inline const char *kc_stop(kc_scan *s, const char *p, uint32_t why) {
    s->why = p >= s->end ? KC_WHY_END : why;
    return NULL;
}

static inline const char *kc_no_memory(kc_scan *s) {
    s->why = KC_WHY_NO_MEMORY;
    return NULL;
}

static inline uint64_t kc_bits_of(double value) {
    uint64_t bits;
    memcpy(&bits, &value, 8);
    return bits;
}

/* Reads the event at p (an opening brace) and adds its row. Gives the place behind it; NULL with scan->why.
   keep_head: where the arguments cannot be read, the row is added without them; args_lost then is where they begin. */
const char *kc_event_read(kc_chrome *c, kc_scan *scan, const char *p, int keep_head, int need_phase,
                          const char **args_lost);
void kc_event_plan(kc_rows *kind);

#endif
