/* LD_PRELOAD: CLOCK_REALTIME plus the seconds that $SHIFTED_CLOCK, a file of one little-endian int64, says now.

   For programs that must see a clock jump on a machine whose clock nobody may set. A time namespace has no offset for
   this clock. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *shift_s;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void load(void) {
    const char *path = getenv("SHIFTED_CLOCK");
    *(void **)&real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) {
        return;
    }
    void *map = mmap(NULL, sizeof *shift_s, PROT_READ, MAP_SHARED, fd, 0);
    if (map != MAP_FAILED) {
        shift_s = map;
    }
    close(fd);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!real_clock_gettime) {
        load();
    }
    int status = real_clock_gettime(clock, now);
    if (status == 0 && shift_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        now->tv_sec += *shift_s;
    }
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    int status = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return status;
}

time_t time(time_t *now) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (now) {
        *now = precise.tv_sec;
    }
    return precise.tv_sec;
}
