/* Theory of operation
 *
 * Libraries pass no argument to their buffer callbacks, and exit handlers have none either. So there is a fixed number
 * of places for collectors, each with its own set of functions that know it. A place is never given to another
 * collector: a library may call back at any time.
 *
 * Threads: the functions of hosts run on any; collectors_add and collectors_hook_exit on the agent's; the handlers on
 *   the thread that forks or exits.
 * Blocks: functions of hosts never do; the exit handler up to the limit in collector.c.
 */
#include "kit/collector_slots.h"

#include <pthread.h>
#include <stdlib.h>

static struct kit_collector *collectors[COLLECTORS_MOST];
static uint32_t count; /* written by the agent's thread only */

/* ---- the functions of each place ---- */

#define PLACES(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)

#define FUNCTIONS(i)                                                                                                \
    static void requested_##i(uint8_t **buffer, size_t *size) { pool_request(&collectors[i]->pool, buffer, size); } \
    static void completed_##i(uint8_t *buffer, size_t size, size_t used) {                                          \
        pool_return(&collectors[i]->pool, buffer, used < size ? used : size);                                       \
    }                                                                                                               \
    static bool push_##i(uint32_t kind, const void *record, uint32_t bytes) {                                       \
        return collector_push(collectors[i], kind, record, bytes);                                                  \
    }                                                                                                               \
    static bool add_text_##i(uint32_t space, uint64_t key, const char *text, uint32_t length) {                     \
        return collector_add_text(collectors[i], space, key, text, length);                                         \
    }                                                                                                               \
    static void dropped_##i(uint64_t records) { collector_dropped(collectors[i], records); }                        \
    static void exits_##i(void) { collector_exits(collectors[i]); }
PLACES(FUNCTIONS)
#undef FUNCTIONS

#define HOST(i) {KIT_ABI, sizeof(struct kit_host), requested_##i, completed_##i, push_##i, add_text_##i, dropped_##i},
static const struct kit_host hosts[COLLECTORS_MOST] = {PLACES(HOST)};
#undef HOST

#define EXIT(i) exits_##i,
static void (*const exits[COLLECTORS_MOST])(void) = {PLACES(EXIT)};
#undef EXIT

/* ---- ---- */

static void in_forked_child(void) {
    for (uint32_t i = 0; i < count; i++) {
        collector_forked(collectors[i]);
    }
}

int collectors_add(struct kit_collector *collector) {
    if (count == COLLECTORS_MOST) {
        return -1;
    }
    if (count == 0) {
        (void)pthread_atfork(NULL, NULL, in_forked_child);
    }
    collector->host = &hosts[count];
    collectors[count] = collector;
    return (int)count++;
}

struct kit_collector *collectors_get(int number) {
    return number < 0 || (uint32_t)number >= count ? NULL : collectors[number];
}

void collectors_hook_exit(const struct kit_collector *collector) {
    for (uint32_t i = 0; i < count; i++) {
        if (collectors[i] == collector) {
            (void)atexit(exits[i]);
        }
    }
}
