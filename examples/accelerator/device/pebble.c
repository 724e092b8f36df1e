/* The library of Pebble, an accelerator that does not exist: a thread plays the device and runs kernels that only sleep.
 *
 *     cc -O2 -shared -fPIC -pthread -o libpebble.so pebble.c
 *
 * Its tracing is what vendors offer: switched on and off, it keeps records in a ring that somebody reads. Nothing is
 * called back, and a full ring loses records and counts them.
 *
 * Threads: pebble_launch and pebble_wait from any of the program; the device runs on its own; the reader is one more.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define QUEUED 256
#define RING 65536
#define KERNEL 1
#define LAUNCH 2

struct pebble_record { /* 48 bytes; times are Unix ns */
    uint32_t kind;
    uint32_t kernel; /* its number, as pebble_launch got it */
    uint64_t start;
    uint64_t end;
    uint32_t correlation; /* a launch and its kernel have the same */
    uint32_t thread;      /* of a launch */
    uint32_t stream;
    uint32_t grid;
    uint64_t reserved;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct pebble_record queue[QUEUED], ring[RING];
static uint64_t queued, done, written, read_from, dropped;
static uint32_t durations[QUEUED];
static int tracing, running;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void record(const struct pebble_record *made) { /* with the lock */
    if (tracing && written - read_from < RING) {
        ring[written++ % RING] = *made;
    } else if (tracing) {
        dropped++;
    }
}

static void *device(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (done == queued) {
            pthread_cond_wait(&changed, &lock);
        }
        struct pebble_record kernel = queue[done % QUEUED];
        const struct timespec length = {0, 1000L * durations[done % QUEUED]};
        pthread_mutex_unlock(&lock);
        kernel.start = now_ns();
        nanosleep(&length, 0);
        kernel.end = now_ns();
        pthread_mutex_lock(&lock);
        done++;
        record(&kernel);
        pthread_cond_broadcast(&changed);
    }
    return 0;
}

/* Puts a kernel into the queue, which runs in order. Waits while the queue is full. */
void pebble_launch(uint32_t number, uint32_t grid, uint32_t microseconds) {
    struct pebble_record call = {.kind = LAUNCH, .kernel = number, .start = now_ns(), .grid = grid};
    pthread_t thread;
    pthread_mutex_lock(&lock);
    if (!running) {
        running = pthread_create(&thread, 0, device, 0) == 0 && pthread_detach(thread) == 0;
    }
    while (queued - done == QUEUED) {
        pthread_cond_wait(&changed, &lock);
    }
    call.correlation = (uint32_t)queued + 1;
    call.thread = (uint32_t)syscall(SYS_gettid);
    durations[queued % QUEUED] = microseconds;
    queue[queued % QUEUED] = call;
    queue[queued++ % QUEUED].kind = KERNEL;
    call.end = now_ns();
    record(&call);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* Waits until the queue is empty. */
void pebble_wait(void) {
    pthread_mutex_lock(&lock);
    while (done != queued) {
        pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
}

/* Switches tracing on or off. On: what an earlier reader has left is gone. */
void pebble_trace(int on) {
    pthread_mutex_lock(&lock);
    tracing = on;
    if (on) {
        read_from = written;
        dropped = 0;
    }
    pthread_mutex_unlock(&lock);
}

/* Copies at most `room` records; returns how many. */
size_t pebble_read(struct pebble_record *into, size_t room) {
    size_t copied = 0;
    pthread_mutex_lock(&lock);
    for (; copied < room && read_from < written; copied++) {
        into[copied] = ring[read_from++ % RING];
    }
    pthread_mutex_unlock(&lock);
    return copied;
}

/* Records that found the ring full since tracing was switched on. */
uint64_t pebble_dropped(void) {
    pthread_mutex_lock(&lock);
    const uint64_t found = dropped;
    pthread_mutex_unlock(&lock);
    return found;
}
