/* One vendor's collector: an arena, a thread, and the library that fills them. */
#ifndef KINETO_KIT_COLLECTOR_H
#define KINETO_KIT_COLLECTOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kit/collector_thread.h"
#include "kit/collector_turn.h"
#include "kit/kit.h"

enum collector_phase { COLLECTOR_CLOSED, COLLECTOR_PREPARED, COLLECTOR_RECORDING, COLLECTOR_STOPPED };

/* Optional hooks of a vendor in this library beyond kit_vendor; each may be NULL. */
struct collector_hooks {
    /* Called before the collector's thread exists and any buffer is lent: texts may be added to the arena directly.
     * Returns 0 or a negative error with a text. */
    int (*begin)(struct arena *arena, char *error, size_t error_bytes);
    /* On the collector's thread: ends the records that the vendor's own callbacks write into the stream. */
    void (*close_writers)(void);
    /* The process is exiting and another thread has the turn: asks it to give the turn up. On any thread. */
    void (*hurry)(void);
};

struct kit_collector {
    const struct kit_vendor *vendor;
    const struct kit_host *host;
    const struct collector_hooks *hooks; /* NULL: none */
    struct turn turn;
    struct kit_library library;
    bool opened;
    bool vendor_started;
    bool abandoned;     /* the thread did not end in time */
    bool close_pending; /* collector_close was called before it did */
    bool library_left;
    uint32_t dead; /* forked child */
    uint32_t exiting;
    uint32_t phase; /* collector_phase */
    uint32_t exit_hooked;
    struct kit_config config;
    struct arena *arena;
    struct pool pool;
    struct stream stream;
    struct walker walker;
    struct worker worker;
    struct retired retired;
    struct kit_stop_result stopped;
};

/* All except collector_forked, collector_exits and the callbacks: with the turn, or before anyone else knows the
 * collector. */
int collector_open(struct kit_collector *collector, const char *path, char *error, size_t error_bytes);
int collector_prepare(struct kit_collector *collector, const struct kit_config *config, char *error,
                      size_t error_bytes);
int collector_start(struct kit_collector *collector, const uint32_t *kinds, uint32_t count, int32_t *results,
                    char *error, size_t error_bytes);
int collector_counts(const struct kit_collector *collector, struct kc_counts *counts);
/* Stops recording and fills collector->stopped. */
void collector_stop(struct kit_collector *collector, int64_t limit_ns);
/* The library has left the process, so it holds nothing of ours any more. After collector_stop. */
void collector_library_left(struct kit_collector *collector);
int collector_close(struct kit_collector *collector);
enum collector_phase collector_phase(const struct kit_collector *collector);
/* Returns 0, or the error why this process can record no more. */
int collector_refuses(const struct kit_collector *collector);

void collector_forked(struct kit_collector *collector);
void collector_exits(struct kit_collector *collector);

/* What hosts call: see kit_host. */
bool collector_push(struct kit_collector *collector, uint32_t kind, const void *record, uint32_t bytes);
bool collector_add_text(struct kit_collector *collector, uint32_t space, uint64_t key, const char *text,
                        uint32_t length);
void collector_dropped(struct kit_collector *collector, uint64_t records);

#endif
