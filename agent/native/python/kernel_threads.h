/* The kernel's threads of this process: identity, CPU time and what they wait for. */
#ifndef KINETO_STACKS_TASKS_H
#define KINETO_STACKS_TASKS_H

#include <stdbool.h>
#include <stdint.h>

#define TASKS_MOST 4096u
#define TASK_NAME_BYTES 16u

enum task_state { TASK_UNKNOWN = 0, TASK_RUNNING = 1, TASK_WAITS_FOR_GIL = 2, TASK_IDLE = 3 };

/* What a thread waits for: for an idle one from its system call; the last two are for a running one. As in
 * records.py. */
enum task_wait {
    TASK_WAIT_UNKNOWN = 0,
    TASK_SLEEPS = 1, /* for a time */
    TASK_LOCKED = 2, /* a lock, a condition, a semaphore: futex */
    TASK_POLLS = 3,  /* sockets, pipes, events */
    TASK_IN_IO = 4,  /* reads or writes */
    TASK_AWAITS_CHILD = 5,
    TASK_IN_DRIVER = 6, /* ioctl */
    TASK_PAGES = 7,     /* a page fault, or a change of its address space */
    TASK_READY = 8,     /* a processor */
    TASK_COLLECTS = 9,  /* nothing: it runs the garbage collector */
};

struct task {
    uint32_t tid;
    uint32_t looks_at_name; /* how often its name has been read */
    bool ours;              /* a thread of the agent */
    bool named;             /* its name is in the string table */
    bool settled;           /* `node` and `state` stay valid as long as it gets no CPU time */
    bool present;
    bool truncated; /* its stack was truncated */
    enum task_state state;
    enum task_wait wait;
    uint32_t node;
    uint64_t tick;      /* of its latest sample */
    uint64_t cpu_ns;    /* when last read */
    uint64_t outermost; /* frame, see walk_stack */
    char name[TASK_NAME_BYTES];
};

/* Sorted by tid, ascending. */
struct tasks {
    uint32_t count;
    uint32_t left_out; /* threads beyond TASKS_MOST */
    bool began;        /* a new thread has begun since the last refresh */
    struct task of[TASKS_MOST];
};

/* Updates the list from /proc/self/task. */
void tasks_refresh(struct tasks *tasks);
/* Returns the task with this tid, added if it is new; NULL if the list is full. May move the others. */
struct task *tasks_find(struct tasks *tasks, uint32_t tid);

/* The state of a thread that gets no CPU time right now. [gil, gil + gil_bytes) holds the GIL's lock. */
enum task_state task_state_off_cpu(uint32_t tid, uint64_t gil, uint32_t gil_bytes, enum task_wait *wait);

#endif
