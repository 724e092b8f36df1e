/* The sampler's thread. */
#ifndef KINETO_STACKS_THREAD_H
#define KINETO_STACKS_THREAD_H

#include <pthread.h>

#include "common/arena.h"
#include "python/stack_sampler.h"
#include "python/thread_ids.h"
#include "python/stack_names.h"
#include "python/kernel_threads.h"
#include "python/frame_walk.h"
#include "common/wake.h"

enum sampler_command { SAMPLER_RUN, SAMPLER_FINISH };

/* One recording, in separate memory that no forked child has. The thread is the only writer of the arena except for the
 * string table, which `strings` guards. */
struct sampler {
    struct kc_sampler_layout layout;
    struct kc_sampler_config config;
    struct arena arena;
    struct stack_names *names;
    struct walker_of_stacks walker;
    struct tasks tasks;
    struct thread_ids ids;
    pthread_mutex_t strings;
    struct wake work;
    struct wake done;
    uint32_t command; /* sampler_command */
    uint32_t ended;
    uint64_t ticks; /* read by other threads, too */
    /* The rest belongs to the thread; others read it once it has ended. */
    uint32_t own_tid;
    uint32_t buffer; /* the LOANED one, or SAMPLER_NO_BUFFER */
    uint32_t buffer_used;
    struct kc_sampler_stop_result result;
};

#define SAMPLER_NO_BUFFER UINT32_MAX

/* NULL with errno set on failure. */
struct sampler *sampler_create(const struct kc_sampler_layout *layout, const struct thread_ids *ids,
                               const struct kc_sampler_config *config);
void sampler_destroy(struct sampler *sampler);
/* The thread's function; its argument is the sampler. */
void *sampler_run(void *sampler);
/* Sets the program's own name of a thread; false if the table is full. Any thread. */
bool sampler_name(struct sampler *sampler, uint32_t tid, const char *name, uint32_t length);

#endif
