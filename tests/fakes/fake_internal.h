/* What the two halves of the fake share: its state and the record layouts. */
#ifndef FAKE_INTERNAL_H
#define FAKE_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fake_cupti.h"

#define KINDS 64u
#define CBIDS 1024u
#define STREAMS 64u
#define THREADS 256u
#define QUEUE 1024u
#define NAMES 4096u
#define NS_PER_S 1000000000ull

enum { MEMCPY = 1, MEMSET = 2, DRIVER = 4, RUNTIME = 5, KERNEL = 10, OVERHEAD = 17, SYNC = 38 };
enum { DOMAIN_DRIVER = 1, DOMAIN_RUNTIME = 2, DOMAINS = 5 };

enum { GET_DEVICE = 17, MEMCPY_ASYNC = 41, MEMSET_ASYNC = 51, STREAM_SYNC = 131, LAUNCH = 211, GRAPH_LAUNCH = 311 };
enum { CTX_GET_CURRENT = 304, CU_LAUNCH = 307, CU_GRAPH_LAUNCH = 514 };

struct kernel { /* CUpti_ActivityKernel9 (208 bytes) and 10 (216) */
    uint32_t kind;
    uint8_t cache_config, shared_config;
    uint16_t registers;
    uint32_t cache_requested, cache_executed;
    uint64_t start, end, completed;
    uint32_t device, context, stream;
    int32_t grid[3], block[3];
    int32_t static_shared, dynamic_shared;
    uint32_t local_per_thread, local_total, correlation;
    int64_t grid_id;
    const char *name;
    void *reserved;
    uint64_t queued, submitted;
    uint8_t launch_type, carveout_requested, carveout, padding;
    uint32_t shared_executed;
    uint64_t graph_node;
    uint32_t shmem_limit, graph;
    void *window;
    uint32_t channel, channel_type, cluster[3], cluster_policy;
    uint64_t local_total_v2;
    uint32_t tail[2];         /* potential cluster size, active clusters: since CUDA 12 */
    uint64_t device_launched; /* since CUDA 13 */
};
_Static_assert(sizeof(struct kernel) == 216 && offsetof(struct kernel, name) == 104, "CUDA 13.0's layout");

struct copy {
    uint32_t kind;
    uint8_t copy_kind, source, destination, flags;
    uint64_t bytes, start, end;
    uint32_t device, context, stream, correlation, runtime_correlation, pad;
    void *reserved;
    uint64_t graph_node;
    uint32_t graph, channel, channel_type;
    uint8_t device_launched, pad2[3];
    uint64_t copies;
};
_Static_assert(sizeof(struct copy) == 96, "CUpti_ActivityMemcpy6");

struct fill {
    uint32_t kind, value;
    uint64_t bytes, start, end;
    uint32_t device, context, stream, correlation;
    uint16_t flags, memory_kind;
    uint32_t pad;
    void *reserved;
    uint64_t graph_node;
    uint32_t graph, channel, channel_type;
    uint8_t device_launched, pad2[3];
};
_Static_assert(sizeof(struct fill) == 88, "CUpti_ActivityMemset4");

struct api {
    uint32_t kind, cbid;
    uint64_t start, end;
    uint32_t process, thread, correlation, result;
};
_Static_assert(sizeof(struct api) == 40, "CUpti_ActivityAPI");

struct sync {
    uint32_t kind, type;
    uint64_t start, end;
    uint32_t correlation, context, stream, event;
    uint64_t event_sync;
    uint32_t result, pad;
};
_Static_assert(sizeof(struct sync) == 56, "CUpti_ActivitySynchronization2");

struct overhead {
    uint32_t kind, overhead_kind, object_kind, object[3];
    uint64_t start, end;
    uint32_t correlation, reserved;
    void *data;
};
_Static_assert(sizeof(struct overhead) == 56, "CUpti_ActivityOverhead3");

typedef void (*requested_fn)(uint8_t **buffer, size_t *size, size_t *max_records);
typedef void (*completed_fn)(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid);
typedef void (*callback_fn)(void *user, uint32_t domain, uint32_t cbid, const void *data);

struct filled {
    uint8_t *buffer;
    size_t size, valid;
};

struct fake {
    pthread_mutex_t mutex;
    pthread_cond_t filled_some;
    bool thread_runs;
    bool hooked;         /* a kind has been enabled since the start or the last finalize */
    bool had_subscriber; /* since the library was loaded */
    bool kineto;         /* the program's own Kineto profiles: fake_kineto.c */
    bool kinetos_clock;  /* it has registered its timestamp callback, for the life of the process */
    uint64_t entered;    /* of its functions, those with which it is taken into use */
    requested_fn requested;
    completed_fn completed;
    uint8_t enabled[KINDS];
    callback_fn callback;
    void *callback_user;
    uint8_t domain_on[DOMAINS];
    uint8_t call_on[DOMAINS][CBIDS];
    struct filled current[THREADS]; /* of each thread; the first one's is everybody's unless per_thread is set */
    struct filled queue[QUEUE];
    uint32_t queue_head, queue_tail, handing_over;
    uint64_t stream_end[STREAMS];
    const char *names[NAMES];
    uint32_t name_count;
    uint64_t written[KINDS], dropped_total, finalized, misused, single_calls;
    size_t dropped;
    uint32_t correlation;
    long version, subscribe_result, refuse_kind, refuse_result, drop_next, extra_kernel_bytes, one_wide_kernel;
    long hold_a_buffer, names_result, flush_delay_ms, enable_delay_ms, enter_delay_ms, finalize_result,
        finalize_delay_ms, subscribe_delay_ms, starved, drop_at_finalize, return_at_finalize;
    long graph_recorded;    /* a graph was launched while the device's activities were enabled */
    long context;           /* of all calls, as their callbacks tell it */
    long per_thread;        /* buffers, as CUPTI has them from 12.4 on */
    long newer_than_driver; /* CUPTI names a call that the driver does not have */
};
extern struct fake fake;

extern _Thread_local int fake_in_exit; /* depth of exit callbacks on this thread */

void fake_wait_ms(const long *delay_ms); /* ends early once the delay is set to 0 */
uint64_t fake_now_ns(void);
void fake_take_time(void); /* in cuptiActivityEnable */
/* The buffer that the calling thread writes into. */
struct filled *fake_current(void);
void fake_lock(void);
void fake_unlock(void);
/* Turns the times in a record into those of Kineto's clock, once it is registered: CLOCK_MONOTONIC. */
void fake_stamp(uint32_t kind, uint8_t *record);
/* Writes one record if its kind is enabled; with the lock held. */
void fake_put(uint32_t kind, const void *record, size_t have);

#endif
