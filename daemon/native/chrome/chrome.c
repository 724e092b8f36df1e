/* A Chrome trace as a whole: pieces, members beside the events, what to do where it is damaged. See chrome.h.
 *
 * Threads: the caller's, without the GIL; a parser belongs to one thread at a time, and there is no global state.
 * Blocks: never; it allocates.
 */
#include <stdlib.h>
#include <string.h>

#include "chrome/parser_state.h"

enum { AT_START, IN_OBJECT, IN_EVENTS, AT_END, SEEKING_EVENTS };

#define SHOWN_KEY 64 /* bytes that tell an event's beginning, or the end of the list */

static int plan_kinds(kc_chrome *c, const kc_chrome_plan *plan) {
    uint64_t texts = KC_SCAN_PADDING;
    uint32_t arg_count = 0;
    if (plan->kind_count > KC_MAX_KINDS || plan->memory_kind >= plan->kind_count ||
        plan->flow_kind >= plan->kind_count || plan->other_kind >= plan->kind_count ||
        plan->counter_kind >= plan->kind_count) {
        return -1;
    }
    for (uint32_t i = 0; i < plan->kind_count; i++) {
        const kc_chrome_kind *kind = plan->kinds + i;
        if (kind->arg_count > KC_MAX_ARGS || kind->first_arg != arg_count) {
            return -1;
        }
        arg_count += kind->arg_count;
    }
    for (uint32_t i = 0; i < arg_count; i++) {
        const kc_chrome_arg *arg = plan->args + i;
        if (arg->column < KC_FIXED_COLUMNS || arg->type > KC_T_SIGNED_U32 ||
            arg->column + (arg->type == KC_T_I32X3 ? 3 : 1) > KC_MAX_COLUMNS) {
            return -1;
        }
        texts += arg->key_bytes;
    }
    for (uint32_t i = 0; i < plan->category_count; i++) {
        if (plan->categories[i].kind >= plan->kind_count) {
            return -1;
        }
        texts += plan->categories[i].bytes;
    }
    c->args = calloc(arg_count + 1, sizeof *c->args);
    c->categories = calloc(plan->category_count + 1, sizeof *c->categories);
    char *to = c->texts = calloc(texts, 1);
    if (!c->args || !c->categories || !c->texts) {
        return -1;
    }
    for (uint32_t i = 0; i < arg_count; i++) {
        c->args[i] = plan->args[i];
        c->args[i].key = memcpy(to, plan->args[i].key, plan->args[i].key_bytes);
        to += plan->args[i].key_bytes;
    }
    for (uint32_t i = 0; i < plan->category_count; i++) {
        c->categories[i] = plan->categories[i];
        c->categories[i].text = memcpy(to, plan->categories[i].text, plan->categories[i].bytes);
        to += plan->categories[i].bytes;
    }
    c->plan = *plan;
    c->plan.categories = c->categories;
    for (uint32_t i = 0; i < plan->kind_count; i++) {
        c->kinds[i].args = c->args + plan->kinds[i].first_arg;
        c->kinds[i].arg_count = plan->kinds[i].arg_count;
        kc_event_plan(c->kinds + i);
    }
    return 0;
}

kc_chrome *kc_chrome_new(const kc_chrome_plan *plan) {
    kc_chrome *c = calloc(1, sizeof *c);
    if (c && plan_kinds(c, plan)) {
        kc_chrome_free(c);
        return NULL;
    }
    return c;
}

void kc_chrome_free(kc_chrome *c) {
    if (!c) {
        return;
    }
    for (uint32_t i = 0; i < KC_MAX_KINDS; i++) {
        for (uint32_t n = 0; n < KC_MAX_COLUMNS; n++) {
            free(c->kinds[i].data[n]);
        }
    }
    kc_strings_free(&c->strings);
    free(c->args);
    free(c->categories);
    free(c->texts);
    free(c->scratch.data);
    free(c->event_args.data);
    free(c->event_members.data);
    free(c->tracks);
    free(c->track_slots);
    free(c);
}

void kc_chrome_count(const kc_chrome *c, kc_chrome_counts *counts) {
    *counts = c->counts;
    counts->in_events = c->state == IN_EVENTS;
    counts->closed = c->state == AT_END;
    counts->strings = c->strings.count;
    counts->tracks = c->track_count;
}

uint64_t kc_chrome_rows(const kc_chrome *c, uint32_t kind) { return c->kinds[kind].rows; }

void *kc_chrome_take(kc_chrome *c, uint32_t kind, uint32_t column) {
    kc_rows *k = c->kinds + kind;
    void *data = k->data[column];
    k->data[column] = NULL;
    k->made &= ~(1ull << column);
    void *fitted = data && k->rows ? realloc(data, k->rows * k->width[column]) : NULL;
    return fitted ? fitted : data;
}

void kc_chrome_release(void *column) { free(column); }

const char *kc_chrome_strings(const kc_chrome *c, const uint64_t **ends) {
    *ends = c->strings.ends;
    return c->strings.bytes.data;
}

const int64_t *kc_chrome_tracks(const kc_chrome *c) { return c->tracks; }

/* ---- pieces ---- */

typedef struct {
    kc_chrome *c;
    const char *data;
    kc_scan scan;
    uint32_t final, give_up;
    kc_chrome_fed *result;
} piece;

/* The piece was read up to p. */
static void report(piece *f, const char *p, uint32_t status) {
    f->result->status = status;
    f->result->consumed = (uint64_t)(p - f->data);
    f->c->offset += f->result->consumed;
}

static void damage(piece *f, const char *at, const char *p, uint32_t why, uint32_t lost) {
    f->result->at = f->c->offset + (uint64_t)(at - f->data);
    f->result->why = why;
    f->result->lost = lost;
    report(f, p, why == KC_WHY_NO_MEMORY ? KC_CHROME_NO_MEMORY : KC_CHROME_DAMAGE);
}

/* Whether p, a bracket, ends the list of events: what follows belongs to the document. */
static int like_end(const kc_scan *s, const char *p) {
    static const char *const keys[] = {"traceName",           "displayTimeUnit", "deviceProperties",
                                       "schemaVersion",       "otherData",       "metadata",
                                       "baseTimeNanoseconds", "distributedInfo", "systemTraceEvents"};
    p = kc_space(p + 1);
    if (*p == '}') {
        return kc_space(p + 1) >= s->end;
    }
    if (*p != ',') {
        return 0;
    }
    p = kc_space(p + 1);
    for (unsigned i = 0; *p == '"' && i < sizeof keys / sizeof *keys; i++) {
        if (!strncmp(p + 1, keys[i], strlen(keys[i]))) {
            return 1;
        }
    }
    return 0;
}

/* Whether what is at p comes behind a whole object and a comma, as an item of the list does. */
static int is_item(const piece *f, const char *p) {
    static const char before[] = ",}";
    for (const char *wanted = before; *wanted; wanted++) {
        do {
            if (p <= f->data) {
                return 0;
            }
            p--;
        } while (*p == ' ' || *p == '\n' || *p == '\t' || *p == '\r');
        if (*p != *wanted) {
            return 0;
        }
    }
    return 1;
}

/* Goes on behind damage: at the next event that can be read or is an item of the list, or at the end of the list. */
static const char *seek(piece *f, const char *p) {
    kc_chrome *c = f->c;
    for (;; p++) {
        while (p < f->scan.end && *p != '{' && *p != ']') {
            p++;
        }
        if (p >= f->scan.end || (!f->final && f->scan.end - p < SHOWN_KEY)) {
            report(f, p, KC_CHROME_MORE);
            return NULL;
        }
        if (*p == ']') {
            if (!like_end(&f->scan, p)) {
                continue;
            }
        } else {
            if (!kc_like_event(p)) {
                continue;
            }
            const char *lost = NULL;
            f->scan.lenient = 0;
            const char *end = kc_event_read(c, &f->scan, p, 0, 1, &lost);
            if (!end && f->scan.why == KC_WHY_NO_MEMORY) {
                damage(f, p, p, KC_WHY_NO_MEMORY, KC_LOST_EVENT);
                return NULL;
            }
            if (!end && f->scan.why == KC_WHY_END && !f->final && !f->give_up) {
                report(f, p, KC_CHROME_MORE);
                return NULL;
            }
            if (!end && !is_item(f, p)) {
                continue;
            }
            if (end) {
                c->counts.mended += (f->scan.flags & KC_ODD) != 0;
                p = end;
            }
        }
        c->seeking = 0;
        return p;
    }
}

/* The event at p, in as many ways as it takes. */
static const char *event(piece *f, const char *p) {
    kc_chrome *c = f->c;
    const char *lost = NULL;
    for (int attempt = 0; attempt < 3; attempt++) {
        f->scan.lenient = attempt > 0;
        const char *end = kc_event_read(c, &f->scan, p, attempt == 2, 0, &lost);
        if (end && !lost) {
            c->counts.mended += attempt || f->scan.flags & KC_ODD;
            return end;
        }
        if (lost) { /* the arguments: go on behind them */
            c->seeking = 1;
            damage(f, p, end, f->scan.why, KC_LOST_ARGS);
            return NULL;
        }
        if (f->scan.why == KC_WHY_NO_MEMORY) {
            damage(f, p, p, KC_WHY_NO_MEMORY, KC_LOST_EVENT);
            return NULL;
        }
        if (f->scan.why == KC_WHY_END && !f->give_up && (!f->final || !attempt)) {
            if (f->final) {
                damage(f, p, f->scan.end, KC_WHY_END, KC_LOST_END);
                c->state = IN_EVENTS;
            } else {
                report(f, p, KC_CHROME_MORE);
            }
            return NULL;
        }
    }
    c->seeking = 1;
    damage(f, p, p + 1, f->give_up ? KC_WHY_LONG : f->scan.why, KC_LOST_EVENT);
    return NULL;
}

static const char *events(piece *f, const char *p) {
    kc_chrome *c = f->c;
    for (;;) {
        if (c->seeking && !(p = seek(f, p))) {
            return NULL;
        }
        p = kc_space(p);
        while (*p == ',') {
            p = kc_space(p + 1);
        }
        if (p >= f->scan.end) {
            report(f, p, KC_CHROME_MORE);
            return NULL;
        }
        if (*p == ']') {
            c->state = c->counts.list ? AT_END : IN_OBJECT;
            return p + 1;
        }
        if (*p == '{') {
            if (!(p = event(f, p))) {
                return NULL;
            }
            continue;
        }
        f->scan.lenient = f->scan.why = 0;
        const char *end = kc_scan_value(&f->scan, p, NULL);
        if (end && end < f->scan.end) {
            damage(f, p, end, KC_WHY_NO_EVENT, KC_LOST_ITEM);
            return NULL;
        }
        if (!f->final && !f->give_up && (end || f->scan.why == KC_WHY_END)) {
            report(f, p, KC_CHROME_MORE);
            return NULL;
        }
        c->seeking = 1;
        damage(f, p, p + 1, f->scan.why ? f->scan.why : KC_WHY_NO_EVENT, KC_LOST_EVENT);
        return NULL;
    }
}

/* Members beside the events; gives a place only where the events begin, or the object ends. */
static const char *members(piece *f, const char *p) {
    kc_chrome *c = f->c;
    for (;;) {
        p = kc_space(p);
        while (*p == ',') {
            p = kc_space(p + 1);
        }
        if (p >= f->scan.end) {
            report(f, p, KC_CHROME_MORE);
            return NULL;
        }
        if (*p == '}') {
            c->state = AT_END;
            return p + 1;
        }
        const char *key = p, *close = NULL, *value = NULL, *end = NULL;
        f->scan.lenient = f->scan.why = 0;
        if (*p == '"') {
            close = kc_scan_string(&f->scan, p + 1, 0);
        } else {
            kc_stop(&f->scan, p, KC_WHY_NO_KEY);
        }
        if (close) {
            value = kc_space(close + 1);
            if (*value != ':') {
                kc_stop(&f->scan, value, KC_WHY_NO_COLON);
            } else if (*(value = kc_space(value + 1)) == '[' && close - key == 12 &&
                       kc_is_word(key + 1, "traceEvents", 11)) {
                c->state = IN_EVENTS;
                c->counts.had_events = 1;
                return value + 1;
            } else {
                end = kc_scan_value(&f->scan, value, NULL);
            }
        }
        if (end && (end < f->scan.end || f->final)) {
            f->result->key_begin = (uint64_t)(key - f->data);
            f->result->key_end = (uint64_t)(close + 1 - f->data);
            f->result->value_begin = (uint64_t)(value - f->data);
            f->result->value_end = (uint64_t)(end - f->data);
            report(f, end, KC_CHROME_MEMBER);
            return NULL;
        }
        if (!f->give_up && !f->final && (end || f->scan.why == KC_WHY_END)) {
            report(f, p, KC_CHROME_MORE);
            return NULL;
        }
        c->state = c->counts.had_events ? AT_END : SEEKING_EVENTS;
        damage(f, p, p, f->scan.why, c->counts.had_events ? KC_LOST_TAIL : KC_LOST_HEAD);
        return NULL;
    }
}

/* The list of events in a document whose head is damaged. */
static const char *seek_events(piece *f, const char *p) {
    static const char key[] = "\"traceEvents\"";
    const char *last = f->final ? f->scan.end : f->scan.end - SHOWN_KEY;
    for (; p < last; p++) {
        if (*p != '"' || strncmp(p, key, sizeof key - 1)) {
            continue;
        }
        const char *at = kc_space(p + sizeof key - 1);
        if (*at == ':' && *(at = kc_space(at + 1)) == '[') {
            f->c->state = IN_EVENTS;
            f->c->counts.had_events = 1;
            return at + 1;
        }
    }
    report(f, p, KC_CHROME_MORE);
    return NULL;
}

void kc_chrome_feed(kc_chrome *c, const char *data, uint64_t size, uint32_t final, uint32_t give_up,
                    kc_chrome_fed *result) {
    piece f = {c, data, {.end = data + size, .final = final}, final, give_up, result};
    const char *p = data;
    *result = (kc_chrome_fed){0};
    while (p) {
        switch (c->state) {
        case AT_START:
            if (!c->offset && size < 4 && !final) {
                report(&f, p, KC_CHROME_MORE);
                return;
            }
            if (!c->offset && size >= 3 && !memcmp(p, "\xEF\xBB\xBF", 3)) {
                p += 3;
            }
            p = kc_space(p);
            if (p >= f.scan.end) {
                report(&f, p, KC_CHROME_MORE);
                return;
            }
            if (*p != '{' && *p != '[') {
                report(&f, p, KC_CHROME_NOT_JSON);
                return;
            }
            c->counts.list = c->counts.had_events = *p == '[';
            c->state = *p == '[' ? IN_EVENTS : IN_OBJECT;
            p++;
            break;
        case IN_OBJECT: p = members(&f, p); break;
        case IN_EVENTS: p = events(&f, p); break;
        case SEEKING_EVENTS: p = seek_events(&f, p); break;
        default: report(&f, p, KC_CHROME_DONE); return;
        }
    }
}
