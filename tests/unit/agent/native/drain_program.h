/* What the scenarios of drive_drain.c share: the fake driver and the fake libcupti, and what is true at their end. */
#ifndef DRAIN_PROGRAM_H
#define DRAIN_PROGRAM_H

#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "common/wake.h"
#include "cupti/capture_gate.h"
#include "cupti/collector.h"
#include "cupti/driver_slots.h"
#include "fake_driver.h"

#define NS_PER_MS 1000000LL
#define PATIENCE_NS (1500 * NS_PER_MS) /* collector.c */
#define BATCH 20
#define GRAPHS 100 /* that would wait 20 ms each if a moment were held for ever */
#define STREAM 0x2000u
#define BLOCKING_STREAM 0x100u
enum { GLOBAL = 0, THREAD_LOCAL = 1, WRONG_THREAD = 908 };

static const char *cupti_path;
static void *cuda;
static struct {
    void (*set)(enum fake_driver_setting, int);
    int (*blocked)(void);
    unsigned (*harmed)(void);
    unsigned (*garbled)(void);
    unsigned (*launched)(void);
    unsigned (*recorded)(void);
    int (*intact)(void);
    int (*launches_held)(void);
    int (*begin)(uintptr_t);
    int (*begin_v2)(uintptr_t, int);
    int (*begin_v2_ptsz)(uintptr_t, int);
    int (*begin_to)(uintptr_t, uintptr_t, uintptr_t, uintptr_t, size_t, int);
    int (*end)(uintptr_t, void **);
    int (*end_ptsz)(uintptr_t, void **);
    int (*launch)(uintptr_t, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, uintptr_t, uintptr_t,
                  const int64_t *);
    int (*launch_graph)(const int64_t *, uintptr_t);
    int (*record)(void *, void *);
} driver;
static struct {
    int (*set)(const char *, long);
    uint32_t (*memset)(uint64_t, uint64_t, uint32_t);
    int (*subscribed)(void);
    uint64_t (*misused)(void);
} fake;
static atomic_bool goes_on;

static void load(const char *cuda_path) {
    static const struct {
        void *function;
        const char *name;
    } WANTED[] = {
        {&driver.set, "fake_driver_set"},
        {&driver.blocked, "fake_driver_blocked"},
        {&driver.harmed, "fake_driver_harmed"},
        {&driver.garbled, "fake_driver_garbled"},
        {&driver.launched, "fake_driver_launched"},
        {&driver.recorded, "fake_driver_recorded"},
        {&driver.intact, "fake_driver_intact"},
        {&driver.launches_held, "fake_driver_launches_held"},
        {&driver.begin, "cuStreamBeginCapture"},
        {&driver.begin_v2, "cuStreamBeginCapture_v2"},
        {&driver.begin_v2_ptsz, "cuStreamBeginCapture_v2_ptsz"},
        {&driver.begin_to, "cuStreamBeginCaptureToGraph"},
        {&driver.end, "cuStreamEndCapture"},
        {&driver.end_ptsz, "cuStreamEndCapture_ptsz"},
        {&driver.launch, "cuLaunchKernel"},
        {&driver.launch_graph, "cuGraphLaunch"},
        {&driver.record, "cuCtxRecordEvent"},
        {&fake.set, "fake_set"},
        {&fake.memset, "fake_memset"},
        {&fake.subscribed, "fake_subscribed"},
        {&fake.misused, "fake_misused"},
    };
    void *cupti = dlopen(cupti_path, RTLD_NOW | RTLD_LOCAL);
    cuda = dlopen(cuda_path, RTLD_NOW | RTLD_LOCAL);
    CHECK(cupti != NULL && cuda != NULL);
    for (size_t i = 0; i < sizeof WANTED / sizeof *WANTED; i++) {
        void *found = dlsym(
            strncmp(WANTED[i].name, "fake_", 5) == 0 && strncmp(WANTED[i].name, "fake_driver", 11) != 0 ? cupti : cuda,
            WANTED[i].name);
        CHECK(found != NULL || strcmp(WANTED[i].name, "cuCtxRecordEvent") == 0);
        *(void **)WANTED[i].function = found;
    }
    driver.set(FAKE_CONTEXTS, 2);
}

static void pause_us(long us) { nanosleep(&(struct timespec){0, us * 1000}, NULL); }

#define UNTIL(condition)                                     \
    do {                                                     \
        for (int tries = 0; !(condition); tries++) {         \
            CHECK(tries < 60000 || !"is so after a minute"); \
            pause_us(1000);                                  \
        }                                                    \
    } while (0)

static struct kc_drain_result drain(uint32_t limit_ms, const uint64_t *streams, uint32_t count) {
    const struct kc_drain_wish wish = {limit_ms, 0, count};
    struct kc_drain_result result;
    CHECK(kc_drain(&wish, streams, &result) == 0);
    return result;
}

static int outcome(void) { return drain(300, NULL, 0).outcome; }

static void *run_drain(void *result) {
    *(int *)result = outcome();
    return NULL;
}

static void ends(void) {
    CHECK(kc_close() == 0);
    CHECK(driver.intact());
    CHECK(driver.harmed() == 0 && driver.garbled() == 0);
}

static int threads_that_ask(void) {
    int count = 0;
    char path[300], name[20];
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    for (struct dirent *task; (task = readdir(tasks)) != NULL;) {
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
        FILE *comm = fopen(path, "r");
        count += comm != NULL && fgets(name, sizeof name, comm) != NULL && strcmp(name, "kineto-drain\n") == 0;
        if (comm != NULL) {
            fclose(comm);
        }
    }
    closedir(tasks);
    return count;
}

#endif
