/* See kernel_threads.h.
 *
 * The CPU clock of a thread is named by its tid alone: no descriptor, no right, 0.2 us. A descriptor is only opened to
 * list the threads (ten times a second), for a new thread's name, and for the wait reason of a thread that has been
 * running and is off the processor now; sampler_thread.c keeps these in a separate descriptor table.
 *
 * Threads: the sampler's.
 * Blocks: never for long: reads of /proc, and of clocks by system calls.
 */
#define _GNU_SOURCE
#include "python/kernel_threads.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "common/wake.h"

#define OWN_PREFIX "kineto-" /* names of the agent's threads; no other thread's name begins like this */
#define NAME_LOOKS 3u        /* a thread of ours has its name within this many refreshes */
#define LISTING_BYTES 8192u

static size_t read_file(const char *path, char *text, size_t bytes) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return 0;
    }
    const ssize_t size = read(fd, text, bytes - 1);
    close(fd);
    text[size > 0 ? size : 0] = 0;
    return size > 0 ? (size_t)size : 0;
}

/* arm64 has only the newer ones of some calls. */
static enum task_wait wait_of_older_call(long number, uint64_t first, uint64_t second) {
    switch (number) {
#ifdef SYS_poll
    case SYS_poll: return second == 0 ? TASK_SLEEPS : TASK_POLLS;
    case SYS_select: /* without descriptors: how older Pythons sleep */ return first == 0 ? TASK_SLEEPS : TASK_POLLS;
    case SYS_epoll_wait: return TASK_POLLS;
    case SYS_open: return TASK_IN_IO;
#endif
    default: (void)first, (void)second; return TASK_WAIT_UNKNOWN;
    }
}

static enum task_wait wait_of_call(long number, uint64_t first, uint64_t second) {
    switch (number) {
    case -1: /* in the kernel, but not in a system call */
    case SYS_mmap:
    case SYS_munmap:
    case SYS_mremap:
    case SYS_mprotect:
    case SYS_madvise:
    case SYS_brk: return TASK_PAGES;
    case SYS_nanosleep:
    case SYS_clock_nanosleep: return TASK_SLEEPS;
    case SYS_futex:
    case SYS_flock:
    case SYS_semtimedop: return TASK_LOCKED;
    case SYS_ppoll: return second == 0 ? TASK_SLEEPS : TASK_POLLS;
    case SYS_pselect6: return first == 0 ? TASK_SLEEPS : TASK_POLLS;
    case SYS_epoll_pwait:
    case SYS_recvfrom:
    case SYS_recvmsg:
    case SYS_sendto:
    case SYS_sendmsg:
    case SYS_accept4:
    case SYS_accept:
    case SYS_connect: return TASK_POLLS;
    case SYS_read:
    case SYS_readv:
    case SYS_pread64:
    case SYS_preadv:
    case SYS_write:
    case SYS_writev:
    case SYS_pwrite64:
    case SYS_pwritev:
    case SYS_sendfile:
    case SYS_fsync:
    case SYS_fdatasync:
    case SYS_openat:
    case SYS_ftruncate:
    case SYS_fallocate:
    case SYS_getdents64:
    case SYS_io_getevents: return TASK_IN_IO;
    case SYS_wait4:
    case SYS_waitid: return TASK_AWAITS_CHILD;
    case SYS_ioctl: return TASK_IN_DRIVER;
    default: return wait_of_older_call(number, first, second);
    }
}

enum task_state task_state_off_cpu(uint32_t tid, uint64_t gil, uint32_t gil_bytes, enum task_wait *wait) {
    char path[64];
    char text[256];
    *wait = TASK_WAIT_UNKNOWN;
    snprintf(path, sizeof path, "/proc/self/task/%u/syscall", tid);
    if (read_file(path, text, sizeof text) == 0) {
        return TASK_UNKNOWN;
    }
    if (strncmp(text, "running", 7) == 0) { /* runnable, but others are running */
        *wait = TASK_READY;
        return TASK_RUNNING;
    }
    char *end;
    const long number = strtol(text, &end, 10);
    const uint64_t first = strtoull(end, &end, 16);
    const uint64_t second = strtoull(end, NULL, 16);
    if (number == SYS_futex && gil != 0 && first >= gil && first < gil + gil_bytes) {
        return TASK_WAITS_FOR_GIL;
    }
    *wait = wait_of_call(number, first, second);
    return TASK_IDLE;
}

/* ---- the list ---- */

static uint32_t position(const struct tasks *tasks, uint32_t tid) {
    uint32_t low = 0;
    uint32_t high = tasks->count;
    while (low < high) {
        const uint32_t middle = (low + high) / 2;
        if (tasks->of[middle].tid < tid) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static void look_at_name(struct task *task) {
    char path[64];
    char name[TASK_NAME_BYTES + 1];
    snprintf(path, sizeof path, "/proc/self/task/%u/comm", task->tid);
    const size_t size = read_file(path, name, sizeof name);
    task->looks_at_name++;
    if (size == 0) {
        return;
    }
    name[strcspn(name, "\n")] = 0;
    memcpy(task->name, name, TASK_NAME_BYTES);
    task->name[TASK_NAME_BYTES - 1] = 0;
    task->ours = strncmp(task->name, OWN_PREFIX, sizeof OWN_PREFIX - 1) == 0;
}

struct task *tasks_find(struct tasks *tasks, uint32_t tid) {
    const uint32_t at = position(tasks, tid);
    struct task *task = &tasks->of[at];
    if (at < tasks->count && task->tid == tid) {
        return task;
    }
    if (tasks->count == TASKS_MOST) {
        tasks->left_out++;
        return NULL;
    }
    memmove(task + 1, task, (tasks->count - at) * sizeof *task);
    tasks->count++;
    *task = (struct task){.tid = tid, .present = true};
    if (!tasks->began) { /* it existed before: its CPU time so far is not of this recording */
        (void)thread_cpu_ns(tid, &task->cpu_ns);
    }
    look_at_name(task);
    return task;
}

static void see(struct tasks *tasks, uint32_t tid) {
    struct task *task = tasks_find(tasks, tid);
    if (task == NULL) {
        return;
    }
    task->present = true;
    if (task->looks_at_name < NAME_LOOKS) {
        look_at_name(task);
    }
}

static void forget_ended(struct tasks *tasks) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < tasks->count; i++) {
        if (tasks->of[i].present) {
            if (kept != i) {
                tasks->of[kept] = tasks->of[i];
            }
            kept++;
        }
    }
    tasks->count = kept;
}

void tasks_refresh(struct tasks *tasks) {
    char listing[LISTING_BYTES];
    const int fd = open("/proc/self/task", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        return;
    }
    for (uint32_t i = 0; i < tasks->count; i++) {
        tasks->of[i].present = false;
    }
    tasks->left_out = 0;
    long size;
    while ((size = syscall(SYS_getdents64, fd, listing, sizeof listing)) > 0) {
        for (long at = 0; at < size;) {
            uint16_t length; /* struct linux_dirent64: ino, off, reclen, type, name */
            memcpy(&length, listing + at + 16, sizeof length);
            const char *name = listing + at + 19;
            if (*name >= '1' && *name <= '9') {
                see(tasks, (uint32_t)strtoul(name, NULL, 10));
            }
            at += length;
        }
    }
    close(fd);
    if (size == 0) {
        forget_ended(tasks);
    }
}
