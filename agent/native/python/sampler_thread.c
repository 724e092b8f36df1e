/* See sampler_thread.h; stack_sampler.c explains how it works.
 *
 * Threads: the sampler's own, without Python and with all signals blocked; sampler_name runs on the agent's.
 * Blocks: the thread sleeps until its next tick. It holds the string table's lock while it names one stack;
 *   sampler_name, with the GIL, may wait that long.
 */
#define _GNU_SOURCE
#include "python/sampler_thread.h"

#include <errno.h>
#include <limits.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "python/sampling_rate.h"
#include "common/wake.h"

#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#define CLOSE_RANGE_UNSHARE_FLAG 2u /* Linux 5.9 */

#define NS_PER_MS 1000000LL
#define REFRESH_PERIOD_NS (100 * NS_PER_MS) /* a native thread that lives shorter may go unseen */
#define PUBLISH_PERIOD_NS (250 * NS_PER_MS) /* a killed process loses no more than this */
#define INTERPRETERS_MOST 256u
#define GIL_HELD 256u /* bit in the state of a sample */
#define WAIT_SHIFT 16 /* what it waits for, in the state of a sample */
/* interval, holder, locked, switch number; twice a condition variable and a mutex */
#define GIL_BYTES ((uint32_t)(32 + 2 * (sizeof(pthread_cond_t) + sizeof(pthread_mutex_t))))

struct record {
    int64_t time_ns;
    uint32_t tid;
    uint32_t node;
    uint32_t state;
    uint32_t cpu_us;
};

/* Data of one tick, the same for all threads. */
struct tick {
    int64_t time_ns;
    uint64_t number;
    uint64_t elapsed_ns; /* since the tick before */
};

struct sampler *sampler_create(const struct kc_sampler_layout *layout, const struct thread_ids *ids,
                               const struct kc_sampler_config *config) {
    void *memory = mmap(NULL, sizeof(struct sampler), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        return NULL;
    }
    (void)madvise(memory, sizeof(struct sampler), MADV_DONTFORK);
    struct sampler *sampler = memory;
    sampler->names = stack_names_create();
    if (sampler->names == NULL) {
        const int number = errno;
        munmap(memory, sizeof *sampler);
        errno = number;
        return NULL;
    }
    sampler->layout = *layout;
    sampler->ids = *ids;
    sampler->config = *config;
    sampler->walker.layout = &sampler->layout;
    sampler->buffer = SAMPLER_NO_BUFFER;
    (void)pthread_mutex_init(&sampler->strings, NULL);
    return sampler;
}

void sampler_destroy(struct sampler *sampler) {
    stack_names_destroy(sampler->names);
    munmap(sampler, sizeof *sampler);
}

bool sampler_name(struct sampler *sampler, uint32_t tid, const char *name, uint32_t length) {
    pthread_mutex_lock(&sampler->strings);
    const bool added = arena_add_string(&sampler->arena, tid, ARENA_SPACE_THREAD_NAME, name, length);
    pthread_mutex_unlock(&sampler->strings);
    return added;
}

/* ---- records ---- */

static void publish(struct sampler *sampler) {
    const struct arena *arena = &sampler->arena;
    const uint64_t records = sampler->buffer_used / sizeof(struct record);
    if (sampler->buffer == SAMPLER_NO_BUFFER || records == 0) {
        return;
    }
    *arena_buffer_word(arena, sampler->buffer, ARENA_BUFFER_VALID_BYTES) = sampler->buffer_used;
    *arena_buffer_word(arena, sampler->buffer, ARENA_BUFFER_RECORDS) = records;
    *arena_buffer_word(arena, sampler->buffer, ARENA_BUFFER_SEQUENCE) = arena_load(arena, ARENA_SEQUENCE);
    arena_add(arena, ARENA_SEQUENCE, 1);
    arena_add(arena, ARENA_RECORDS, records);
    arena_add(arena, ARENA_VALID_BYTES, sampler->buffer_used);
    arena_set_state(arena, sampler->buffer, ARENA_READY);
    sampler->buffer = SAMPLER_NO_BUFFER;
}

/* Takes the lowest FREE one: its memory is already mapped. */
static bool lend(struct sampler *sampler) {
    for (uint32_t i = 0; i < sampler->arena.fixed.buffer_count; i++) {
        if (arena_load_state(&sampler->arena, i) == ARENA_FREE) {
            arena_set_state(&sampler->arena, i, ARENA_LOANED);
            sampler->buffer = i;
            sampler->buffer_used = 0;
            return true;
        }
    }
    return false;
}

static void append(struct sampler *sampler, const struct record *record) {
    if (sampler->buffer == SAMPLER_NO_BUFFER && !lend(sampler)) {
        arena_add(&sampler->arena, ARENA_DROPPED, 1);
        return;
    }
    memcpy(arena_buffer(&sampler->arena, sampler->buffer) + sampler->buffer_used, record, sizeof *record);
    sampler->buffer_used += (uint32_t)sizeof *record;
    if (sampler->buffer_used + sizeof *record > sampler->arena.fixed.buffer_bytes) {
        publish(sampler);
    }
}

static void write_sample(struct sampler *sampler, const struct tick *tick, struct task *task, uint64_t used_ns,
                         bool holds_gil) {
    const uint64_t used_us = used_ns / 1000;
    const struct record record = {.time_ns = tick->time_ns,
                                  .tid = task->tid,
                                  .node = task->node,
                                  .state = (uint32_t)task->state | (holds_gil ? GIL_HELD : 0) |
                                           (uint32_t)task->wait << WAIT_SHIFT,
                                  .cpu_us = used_us > UINT32_MAX ? UINT32_MAX : (uint32_t)used_us};
    if (!task->named) {
        task->named = true;
        (void)sampler_name(sampler, task->tid, task->name, (uint32_t)strnlen(task->name, TASK_NAME_BYTES));
    }
    sampler->result.truncated_stacks += task->truncated;
    append(sampler, &record);
}

/* ---- one thread ---- */

/* CPU time since the last call; cpu_ns is the clock. */
static uint64_t cpu_used(struct task *task, uint64_t cpu_ns) {
    if (cpu_ns < task->cpu_ns) { /* a new thread has the id of one that ended */
        task->cpu_ns = 0;
        task->settled = task->named = false;
        task->looks_at_name = 0;
    }
    return cpu_ns - task->cpu_ns;
}

static enum task_state state_now(struct task *task, uint64_t cpu_ns, uint64_t used_ns, const struct tick *tick,
                                 uint64_t gil) {
    uint64_t now;
    task->wait = TASK_WAIT_UNKNOWN;
    if (thread_cpu_ns(task->tid, &now) && now > cpu_ns) {
        return TASK_RUNNING;
    }
    const enum task_state state = task_state_off_cpu(task->tid, gil, GIL_BYTES, &task->wait);
    if (state != TASK_UNKNOWN || tick->elapsed_ns == 0) {
        return state;
    }
    return 2 * used_ns > tick->elapsed_ns ? TASK_RUNNING : TASK_IDLE;
}

/* Walks the stack and assigns it a node. False: no sample. */
static bool look(struct sampler *sampler, const struct python_thread *thread, struct task *task, enum walk *walked) {
    *walked = walk_stack(&sampler->walker, thread, &task->outermost);
    if (*walked == WALK_EMPTY) {
        return false;
    }
    enum named named = NAMED_TORN;
    if (*walked != WALK_TORN) {
        pthread_mutex_lock(&sampler->strings);
        named = stack_names_node(sampler->names, &sampler->walker, &sampler->arena, &task->node);
        pthread_mutex_unlock(&sampler->strings);
    }
    if (named != NAMED) { /* a torn stack is a failed look, not a lost record: more room would not help */
        sampler->result.torn_samples += named == NAMED_TORN;
        sampler->result.unnamed_samples += named == NAMED_FULL;
        arena_add(&sampler->arena, ARENA_DROPPED, named == NAMED_FULL);
        return false;
    }
    sampler->result.partial_stacks += *walked == WALK_PARTIAL;
    task->truncated = sampler->walker.stack.truncated;
    return true;
}

/* The kernel's id of a thread and its CPU clock; 0 if the thread has ended. */
static uint32_t tid_of(const struct sampler *sampler, const struct python_thread *thread, uint64_t *cpu_ns) {
    const uint32_t native = (uint32_t)thread->native_id;
    if (thread_cpu_ns(native, cpu_ns)) {
        return native;
    }
    const uint32_t tid = ids_tid(&sampler->ids, &sampler->walker.memory, thread->id);
    return thread_cpu_ns(tid, cpu_ns) ? tid : 0;
}

/* The garbage collector keeps the GIL: a thread that has the GIL before and after a running collector is seen runs
 * it. */
static bool collects(const struct sampler *sampler, const struct python_thread *thread, uint64_t gil, uint64_t holder) {
    return holder == thread->id && walk_collects(&sampler->walker, thread->interpreter) &&
           walk_gil_holder(&sampler->walker, gil) == holder;
}

static void sample_python_thread(struct sampler *sampler, const struct tick *tick, const struct python_thread *thread,
                                 uint64_t gil, uint64_t holder) {
    uint64_t cpu_ns;
    const uint32_t tid = tid_of(sampler, thread, &cpu_ns);
    struct task *task = tid == 0 || tid == sampler->own_tid ? NULL : tasks_find(&sampler->tasks, tid);
    if (task == NULL || task->ours || task->tick == tick->number) {
        return;
    }
    const uint64_t used_ns = cpu_used(task, cpu_ns);
    if (used_ns != 0 || !task->settled) {
        enum walk walked;
        const bool found = look(sampler, thread, task, &walked);
        if (walked == WALK_EMPTY) { /* perhaps inside another interpreter, otherwise it is a native thread for now */
            return;
        }
        task->tick = tick->number;
        task->settled = false;
        if (!found) { /* its CPU time is in the next sample */
            return;
        }
        task->state = state_now(task, cpu_ns, used_ns, tick, gil);
        task->settled = walked == WALK_WHOLE && (task->state == TASK_IDLE || task->state == TASK_WAITS_FOR_GIL);
        holder = walk_gil_holder(&sampler->walker, gil);
        if (task->state == TASK_RUNNING && collects(sampler, thread, gil, holder)) {
            task->wait = TASK_COLLECTS;
        }
    }
    task->tick = tick->number;
    task->cpu_ns = cpu_ns;
    write_sample(sampler, tick, task, used_ns, holder == thread->id);
}

static void sample_native_thread(struct sampler *sampler, const struct tick *tick, struct task *task) {
    uint64_t cpu_ns;
    if (!thread_cpu_ns(task->tid, &cpu_ns)) {
        return;
    }
    const uint64_t used_ns = cpu_used(task, cpu_ns);
    task->cpu_ns = cpu_ns;
    task->settled = false;
    if (used_ns == 0) {
        return;
    }
    task->node = 0;
    task->truncated = false;
    task->state = state_now(task, cpu_ns, used_ns, tick, 0);
    write_sample(sampler, tick, task, used_ns, false);
}

/* ---- all threads ---- */

static void sample_interpreter(struct sampler *sampler, const struct tick *tick, uint64_t interpreter) {
    const struct walker_of_stacks *walker = &sampler->walker;
    const uint64_t gil = walk_gil(walker, interpreter);
    const uint64_t holder = walk_gil_holder(walker, gil);
    uint64_t address = walk_threads(walker, interpreter);
    struct python_thread thread;
    for (uint32_t i = 0; i < TASKS_MOST && address != 0 && walk_thread(walker, address, interpreter, &thread); i++) {
        sample_python_thread(sampler, tick, &thread, gil, holder);
        address = thread.next;
    }
}

static void sample_all(struct sampler *sampler, const struct tick *tick) {
    const struct walker_of_stacks *walker = &sampler->walker;
    uint64_t interpreter = walk_interpreters(walker); /* newest first: code inside another interpreter is found first */
    for (uint32_t i = 0; i < INTERPRETERS_MOST && interpreter != 0; i++) {
        sample_interpreter(sampler, tick, interpreter);
        interpreter = walk_next_interpreter(walker, interpreter);
    }
    for (uint32_t i = 0; i < sampler->tasks.count; i++) {
        struct task *task = &sampler->tasks.of[i];
        if (task->tick != tick->number && !task->ours && task->tid != sampler->own_tid) {
            sample_native_thread(sampler, tick, task);
        }
    }
    if (sampler->tasks.left_out > sampler->result.threads_left_out) {
        sampler->result.threads_left_out = sampler->tasks.left_out;
    }
    sampler->tasks.began = true;
}

/* ---- the thread ---- */

static bool told_to_end(const struct sampler *sampler) {
    return __atomic_load_n(&sampler->command, __ATOMIC_SEQ_CST) != SAMPLER_RUN;
}

/* Returns false if it is time to end. */
static bool wait_until(struct sampler *sampler, int64_t deadline) {
    for (;;) {
        const uint32_t seen = wake_seen(&sampler->work);
        if (told_to_end(sampler)) {
            return false;
        }
        const int64_t left = deadline - clock_ns(CLOCK_MONOTONIC);
        if (left <= 0) {
            return true;
        }
        wake_wait(&sampler->work, seen, left);
    }
}

static void sample_until_told(struct sampler *sampler) {
    struct stack_rate rate;
    struct tick tick = {.number = 0};
    int64_t refreshed = 0;
    int64_t published = clock_ns(CLOCK_MONOTONIC);
    int64_t before = published;
    rate_begin(&rate, sampler->config.hz, sampler->config.max_load_ppm);
    do {
        const int64_t cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID);
        const int64_t now = clock_ns(CLOCK_MONOTONIC);
        if (now - refreshed >= REFRESH_PERIOD_NS) {
            tasks_refresh(&sampler->tasks);
            refreshed = now;
        }
        tick = (struct tick){clock_ns(CLOCK_REALTIME), tick.number + 1, (uint64_t)(now - before)};
        before = now;
        sample_all(sampler, &tick);
        if (now - published >= PUBLISH_PERIOD_NS) {
            publish(sampler);
            published = now;
        }
        if (tick.number > 1) { /* the first one names most frames: no measure for the others */
            rate_spent(&rate, clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu);
        }
        __atomic_store_n(&sampler->ticks, tick.number, __ATOMIC_RELEASE);
    } while (wait_until(sampler, rate_next(&rate)));
    sampler->result.missed_ticks = rate.missed;
    sampler->result.longest_period_ns = (uint64_t)rate.longest_ns;
    sampler->result.longest_cost_ns = (uint64_t)rate.longest_cost_ns;
}

void *sampler_run(void *argument) {
    struct sampler *sampler = argument;
    (void)prctl(PR_SET_NAME, "kineto-stacks");
    sampler->own_tid = (uint32_t)syscall(SYS_gettid);
    /* A separate, empty table of descriptors: descriptors that this thread opens briefly never take a number that the
     * program counts on, and a program that closes descriptors it has not opened cannot turn our read into a read of
     * its own pipe. None of the program's descriptors is copied, so none is kept open. */
    (void)syscall(SYS_close_range, 0u, UINT_MAX, CLOSE_RANGE_UNSHARE_FLAG);
    if (memory_open(&sampler->walker.memory)) {
        ids_learn(&sampler->ids, &sampler->walker.memory);
        sample_until_told(sampler);
        memory_close(&sampler->walker.memory);
    }
    publish(sampler);
    arena_store(&sampler->arena, ARENA_CLOSED, 1);
    sampler->result.ticks = sampler->ticks;
    sampler->result.cpu_ns = (uint64_t)clock_ns(CLOCK_THREAD_CPUTIME_ID);
    __atomic_store_n(&sampler->ended, 1, __ATOMIC_SEQ_CST);
    wake_post(&sampler->done);
    return NULL;
}
