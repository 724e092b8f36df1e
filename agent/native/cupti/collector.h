/* The collector's interface: what libkineto_collector.so exports, driven by sources/cupti/collector_binding.py.
 *
 * One recording at a time, every function but kc_hurry on one thread at a time (the agent's), in this order:
 *
 *   kc_open -> kc_drain -> kc_prepare -> kc_keep_calls* -> kc_subscribe? -> kc_start -> kc_record_calls? -> kc_counts*
 *     -> kc_stop -> kc_detach? -> kc_close
 *
 * Functions return 0 (or what their comments say) on success and a negative kc_error otherwise; those with an `error`
 * buffer put a text into it. In a forked child everything returns KC_FORKED and does nothing.
 */
#ifndef KINETO_COLLECTOR_H
#define KINETO_COLLECTOR_H

#include <stddef.h>
#include <stdint.h>

#include "common/export.h"
#include "cupti/cuda_devices.h"

#define KC_ABI 6 /* changes with any signature or structure below */

enum { KC_CUPTI = -3 /* CUPTI refused */, KC_BUSY = -6 /* it would wait for the GPU */ };

struct kc_config {
    uint64_t buffer_limit_bytes; /* cap on all buffers; two is the least */
    uint64_t buffer_bytes;
    uint64_t strings_bytes;
    uint64_t prefault_bytes; /* buffers backed by memory before kc_prepare returns */
    uint32_t flush_period_ms;
    uint32_t kernel_name_offset; /* of the name pointer in a CONCURRENT_KERNEL record */
    uint32_t may_decline;        /* this CUPTI drops records when it gets no buffer (CUDA 12.9 and later) */
    uint32_t reserved;
};

struct kc_stop_result {
    struct kc_counts counts;
    uint64_t cpu_ns;            /* of the collector's thread */
    uint64_t names_lost;        /* kernel names that did not fit or could not be read */
    uint64_t calls_unnamed;     /* API names that did not fit */
    uint64_t irregular_records; /* dropped because their sizes contradict each other */
    uint32_t withheld;          /* buffers that CUPTI did not give back */
    uint32_t timed_out;         /* 1: CUPTI's last flush did not return in time; the arena is not closed */
    uint32_t flushes;
    int32_t flush_result; /* CUPTI's answer to the last flush */
};

enum kc_detach_outcome {
    KC_DETACHED = 0,
    KC_DETACH_SUBSCRIBED_ELSEWHERE = 1, /* another tool holds CUPTI's subscriber */
    KC_DETACH_NO_CALL = 2,              /* no CUDA call ended within the limit: stays attached */
    KC_DETACH_REFUSED = 3,              /* a CUPTI call failed, see result */
    KC_DETACH_STUCK = 4,                /* cuptiFinalize has not returned */
    KC_DETACH_MUST_STAY = 5,            /* never tried: cuptiFinalize could end the program; result: kc_stay bits */
    KC_DETACH_BUSY = 6, /* never tried: cuptiFinalize would wait for the GPU; result: kc_drain_outcome */
};

enum kc_drain_outcome {
    KC_DRAIN_SHORT = 0,      /* the GPU is nearly idle, or CUPTI is in use already: CUPTI waits for nothing */
    KC_DRAIN_SOON = 1,       /* its queue is steady and within the limit */
    KC_DRAIN_NOT = 2,        /* its work did not end within the limit */
    KC_DRAIN_CAPTURING = 3,  /* unknown: the program has been capturing CUDA graphs all the time */
    KC_DRAIN_UNKNOWN = 4,    /* unknown: this driver cannot be asked, see code */
    KC_DRAIN_CALLED = 5,     /* CUPTI's first call was made, and has not returned */
    KC_DRAIN_UNANSWERED = 6, /* unknown: the driver has not answered in time, or the caller was hurried */
};

struct kc_drain_wish {
    uint32_t limit_ms;     /* how much queued work is short enough, here and in kc_detach */
    uint32_t settle_ms;    /* for captures that have already begun on unknown streams */
    uint32_t stream_count; /* of `streams`: handles that stay valid, on which captures may have begun already */
};

struct kc_drain_result {
    int32_t outcome;    /* kc_drain_outcome */
    int32_t code;       /* the CUDA result that caused it, 0: none */
    uint64_t waited_ns; /* until the answer */
    uint64_t queued_ns; /* how long queued work took at most, or has taken so far */
};

enum kc_stay {
    KC_STAY_GRAPHS = 1,      /* CUDA graphs were launched while GPU activities were recorded */
    KC_STAY_UNWATCHED = 2,   /* may have been: another tool had the subscriber, which reports launches */
    KC_STAY_USED_BEFORE = 4, /* another tool has registered buffers, and may have recorded graphs */
};

struct kc_detach_result {
    int32_t outcome; /* kc_detach_outcome */
    int32_t result;  /* the CUPTI result that caused it, or kc_stay bits */
    uint64_t ns;     /* from the request until detached */
};

/* Other users of CUPTI in the process. */
struct kc_others {
    int64_t time_ns;     /* Unix: when another user came during this recording, which had ended by then; 0: none came */
    uint64_t caller;     /* an address in its code */
    uint64_t listener;   /* their buffer callback that CUPTI had when we subscribed; 0: none known */
    uint32_t in_use;     /* activities that they had enabled then, as far as known */
    uint32_t ended;      /* 1: they have disabled all that they enabled, as far as known */
    char function[48];   /* of CUPTI, that they called */
    char unnoticed[160]; /* why a user may come unnoticed; empty: none may */
    int64_t
        standing_ns; /* Unix: since when our first call of CUPTI, or our cuptiFinalize, has been stuck; 0: neither is */
};

KC_EXPORT uint32_t kc_abi(void);
/* Opens libcupti at `path` and stores its cuptiGetVersion. May be called again. */
KC_EXPORT int kc_open(const char *path, uint32_t *version, char *error, size_t error_bytes);
/* Waits, 1.5 s at most, for a moment in which CUPTI's first call need not wait for the GPU: the program's launches
 * would wait with it. After NOT, CAPTURING, CALLED or UNANSWERED no other function of CUPTI may be called. */
KC_EXPORT int kc_drain(const struct kc_drain_wish *wish, const uint64_t *streams, struct kc_drain_result *result);
/* Makes the arena; returns its descriptor, which stays the collector's. */
KC_EXPORT int kc_prepare(const struct kc_config *config, char *error, size_t error_bytes);
/* Chooses the calls of a domain (1 driver, 2 runtime) that kc_record_calls records: fnmatch patterns, each ending with
 * NUL, the list with an empty one, `bytes` in all. Without this none is recorded. */
KC_EXPORT int kc_keep_calls(uint32_t domain, const char *patterns, size_t bytes);
/* On any thread; after kc_close only standing_ns is filled. From kc_prepare until kc_close the recording ends by itself
 * when another tool begins to use CUPTI, on that tool's thread; kc_stop returns the totals. */
KC_EXPORT int kc_others(struct kc_others *others);
/* Waits for such a moment again, and takes CUPTI's only subscriber in it, which kc_record_calls and kc_detach need.
 * Returns 0, KC_CUPTI with CUPTI's result (39: another tool has it), or KC_BUSY with kc_drain_outcome: there was no
 * such moment, or CUPTI's first call does not return. */
KC_EXPORT int kc_subscribe(int32_t *result);
/* Registers, starts the thread, enables each kind and stores CUPTI's result in results[i]. After a failure kc_close is
 * still due. */
KC_EXPORT int kc_start(const uint32_t *kinds, uint32_t count, int32_t *results, char *error, size_t error_bytes);
/* Records the chosen calls through the subscriber. After kc_start. */
KC_EXPORT int kc_record_calls(char *error, size_t error_bytes);
/* Releases the subscriber for another tool: no more calls are recorded, no detach. */
KC_EXPORT int kc_yield(void);
/* On any thread at any time: a waiting kc_detach gives up. */
KC_EXPORT int kc_hurry(void);
KC_EXPORT int kc_counts(struct kc_counts *counts);
/* Disables, flushes and makes everything READY, within `limit_ms`. */
KC_EXPORT int kc_stop(uint32_t limit_ms, struct kc_stop_result *result);
/* Detaches CUPTI from the process at the end of the next CUDA call, within `limit_ms`, once the GPU's queue is short.
 * After kc_stop. */
KC_EXPORT int kc_detach(uint32_t limit_ms, struct kc_detach_result *result);
KC_EXPORT int kc_close(void);
/* CUPTI's own text for one of its results. */
KC_EXPORT void kc_result_text(int32_t result, char *text, size_t text_bytes);
/* Facts of CUDA about device `index` and its `count` CUdevice_attributes (DEVICE_ATTRIBUTES at most). At any time. */
KC_EXPORT void kc_device(uint32_t index, const int32_t *attributes, uint32_t count, struct device_facts *facts);
/* Serves all of the above by packets on the socket `fd` (serve.h), for a process without Python, on a dedicated thread:
 * blocks its signals and renames it. Returns when the other end is closed or asks for it; recording has ended then, and
 * `fd` is closed. */
KC_EXPORT int kc_serve(int fd);

#endif
