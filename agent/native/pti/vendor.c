/* Intel's PTI (libpti_view) as a vendor of the kit. kit/vendor.h describes each function.
 *
 * Theory of operation
 *   PTI keeps one buffer for each thread that submits work, and writes a record when it finds that a kernel has ended:
 *   on a thread of the program, under a lock of its own. A buffer that is nearly full goes to a thread of PTI's, which
 *   returns it.
 *
 *   No flush while a view is on. ptiFlushAllViews takes the buffers of all threads on PTI's thread without the lock
 *   under which they are written, and a thread that writes at that moment writes through a dangling pointer. So there
 *   is only one flush, after everything has been disabled, and buffers are small (gpu_activities.py), because their
 *   records are lost if the process is killed.
 *
 *   Every request gets a buffer. Versions before 1.0 write to address 0 when they get none, later ones print a line for
 *   each record. When the kit has none left, `last_resort` serves: it is as large as the largest record, so it holds
 *   one record and comes back at once; requests after the end of a recording get it, too.
 *
 *   None of our buffers stays in PTI. PTI returns a buffer through the callbacks that are set by then, and Kineto
 *   crashes on one that it has not lent. So all are taken back before another tool sets callbacks: in flush after stop,
 *   until none is out; and buffers that Kineto has left there are flushed before our callbacks are set. A view is on or
 *   off for the whole process, so only views enabled here are disabled.
 *
 *   Fork: a child has no PTI thread: PTI is not called there, and calls of Level Zero bypass it again. exit_guard.c
 *   handles the end of the child.
 *
 *   Views are switched on and off by one thread of ours (switch_thread.h).
 *
 * Threads: requested runs on threads of the program (with a lock of PTI's), completed on PTI's thread; flush and
 *   next_record on the collector's; the others on the agent's, one to which the agent yields or one that exits.
 * Blocks: inside PTI; flush also for SETTLE_NS and, if PTI is slow to return a buffer, for RETURN_LIMIT_NS. The two
 *   callbacks never do.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "common/arena.h"
#include "common/error_text.h"
#include "common/own_threads.h"
#include "kit/vendor.h"
#include "pti/exit_guard.h"
#include "pti/level_zero.h"
#include "pti/pti.h"
#include "pti/pti_api.h"
#include "pti/switch_thread.h"
#include "pti/vendor.h"

#define LAST_RESORT_BYTES 256u
#define SETTLE_NS 2000000L /* a thread that was inside PTI as a view was disabled has left it by then */
#define RETURN_LIMIT_NS 100000000LL
#define RETURN_PAUSE_NS 1000000L
#define CALLS_MOST 1024u /* numbers of API calls; there are some 320 */
#define SPACE_SYNCHRONIZATION KIT_FIRST_SPACE

static struct {
    struct pti_api api;
    const struct kit_host *host;
    const uint32_t *wanted; /* kinds, and the result for each: while recording begins */
    int32_t *results;
    uint32_t wanted_count;
    int32_t enabled[KIT_KINDS_MOST];
    uint32_t enabled_count;
    uint32_t recording; /* views are on */
    int64_t lent;       /* buffers that PTI has */
    bool named;         /* the names of calls are in the string table */
    bool with_calls;
    uint8_t last_resort[LAST_RESORT_BYTES];
} self;

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void pause_ns(long ns) {
    const struct timespec length = {.tv_nsec = ns};
    (void)nanosleep(&length, NULL);
}

/* ---- PTI's callbacks ---- */

static void requested(unsigned char **buffer, size_t *size) {
    *buffer = NULL;
    *size = 0;
    if (__atomic_load_n(&self.recording, __ATOMIC_SEQ_CST)) {
        self.host->buffer_requested(buffer, size);
    }
    if (*buffer == NULL) {
        *buffer = self.last_resort;
        *size = pti_largest_record(&self.api);
    }
    __atomic_fetch_add(&self.lent, 1, __ATOMIC_SEQ_CST);
}

static void completed(unsigned char *buffer, size_t size, size_t used) {
    if (buffer != self.last_resort) {
        self.host->buffer_completed(buffer, size, used);
    } else if (used > 0) {
        self.host->dropped(1);
    }
    __atomic_fetch_sub(&self.lent, 1, __ATOMIC_SEQ_CST);
}

/* ---- whether it may be used ---- */

uint32_t kc_pti_abi(void) { return KC_PTI_ABI; }

int kc_pti_look(char *error, size_t error_bytes) { return (int)level_zero_look(error, error_bytes); }

int kc_pti_version(const char *path, char *version, size_t version_bytes, char *error, size_t error_bytes) {
    const int code = pti_api_open(&self.api, path, error, error_bytes);
    if (code == 0) {
        snprintf(version, version_bytes, "%s", self.api.version_string());
    }
    return code;
}

/* PTI makes its thread at its first use. It must not run signal handlers of the program. */
static pti_result first_use(void) {
    sigset_t before;
    block_signals(&before);
    const pti_result result = self.api.local_available();
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return result;
}

int kc_pti_core(char *error, size_t error_bytes) {
    if (self.api.library == NULL) {
        return refuse(KC_ORDER, error, error_bytes, "libpti_view has not been opened");
    }
    if (!pti_core_loads(&self.api)) {
        return refuse(KC_PTI_NO_CORE, error, error_bytes,
                      "libpti_view cannot load its core library libpti.so, or what that one needs");
    }
    if (!exit_guard_place()) {
        return refuse(KC_PTI_UNGUARDED, error, error_bytes,
                      "this build of libpti.so registers what it does at exit in an unknown way, so that forked child "
                      "processes might never end");
    }
    const pti_result result = first_use();
    if (result != PTI_OK) {
        snprintf(error, error_bytes, "PTI cannot trace this GPU on demand: %s (%d)", pti_result_text(result), result);
        return KIT_VENDOR_FAILED;
    }
    return KC_PTI_READY;
}

/* ---- the vendor ---- */

static int vendor_open(const struct kit_host *host, const char *path, struct kit_library *library, char *error,
                       size_t error_bytes) {
    static const struct kit_name KERNEL_NAME = {PTI_KERNEL, PTI_KERNEL_NAME_OFFSET, ARENA_SPACE_KERNEL_NAME,
                                                KIT_BY_TEXT};
    self.host = host;
    const int code = pti_api_open(&self.api, path, error, error_bytes);
    if (code != 0) {
        return code;
    }
    library->version = (uint64_t)self.api.major << 32 | self.api.minor;
    library->when_full = KIT_FULL_SPILLS;
    library->name_count = 1;
    library->names[0] = KERNEL_NAME;
    return 0;
}

/* Chooses the calls that wait, and the one that executes command lists. Not those that append work: PTI reads their
 * correlation from the launch after other threads may have freed it. The first choice switches off all other calls, of
 * which there are 200. */
static pti_result choose_driver_calls(void) {
    const pti_result result = self.api.driver_class(1, PTI_CLASS_HOST_SYNCHRONIZATION, PTI_GROUP_LEVEL_ZERO);
    (void)self.api.driver_call(1, PTI_GROUP_LEVEL_ZERO, PTI_ID_EXECUTE_COMMAND_LISTS);
    return result;
}

static pti_result enable(int32_t view) {
    pti_result result = self.api.enable(view);
    if (result == PTI_OK && view == PTI_DRIVER_CALLS) {
        result = choose_driver_calls();
    }
    if (result == PTI_OK && view == PTI_RUNTIME_CALLS) {
        result = self.api.runtime_class(1, PTI_CLASS_OPERATIONS, PTI_GROUP_ALL);
    }
    if (result != PTI_OK) {
        (void)self.api.disable(view);
    }
    return result;
}

/* ---- on the thread that switches views ---- */

static void enable_wanted(void) {
    for (uint32_t i = 0; i < self.wanted_count; i++) {
        const int32_t kind = (int32_t)self.wanted[i];
        self.results[i] = enable(kind);
        if (self.results[i] == PTI_OK) {
            self.enabled[self.enabled_count++] = kind;
            self.with_calls |= kind == PTI_DRIVER_CALLS || kind == PTI_RUNTIME_CALLS || kind == PTI_SYNCHRONIZATION;
        }
    }
}

static void disable_all(void) {
    while (self.enabled_count > 0) {
        (void)self.api.disable(self.enabled[--self.enabled_count]);
    }
}

/* ---- start and stop ---- */

static void vendor_stop(void) {
    switch_off();
    __atomic_store_n(&self.recording, 0, __ATOMIC_SEQ_CST);
}

static int vendor_start(const uint32_t *kinds, uint32_t count, int32_t *results, char *error, size_t error_bytes) {
    int number = 0;
    (void)self.api.flush(); /* buffers left by the program's own profiler, while its callbacks are set */
    self.named = false;
    self.with_calls = false;
    self.lent = 0;
    __atomic_store_n(&self.recording, 1, __ATOMIC_SEQ_CST);
    const pti_result result = self.api.set_callbacks(requested, completed);
    for (uint32_t i = 0; i < count; i++) {
        results[i] = result;
    }
    if (result == PTI_OK) {
        self.wanted = kinds;
        self.wanted_count = count;
        self.results = results;
        number = switch_on(enable_wanted, disable_all);
    }
    if (self.enabled_count > 0) {
        return 0;
    }
    vendor_stop();
    (void)self.api.flush();
    return number != 0 ? refuse_system(error, error_bytes, "pthread_create", number)
                       : refuse(KIT_VENDOR_FAILED, error, error_bytes, "PTI enabled none of the wanted activities");
}

static void add_name(int32_t group, uint32_t id) {
    const char *name = NULL;
    if (self.api.call_name(group, id, &name) != PTI_OK || name == NULL) {
        return;
    }
    const uint32_t space = group == PTI_GROUP_LEVEL_ZERO ? ARENA_SPACE_DRIVER_API : ARENA_SPACE_RUNTIME_API;
    /* As the two numbers lie side by side in records: in call records the group comes first. */
    (void)self.host->add_text(space, (uint64_t)id << 32 | (uint32_t)group, name, (uint32_t)strlen(name));
    (void)self.host->add_text(SPACE_SYNCHRONIZATION, (uint64_t)(uint32_t)group << 32 | id, name,
                              (uint32_t)strlen(name));
}

static void add_names(void) {
    static const int32_t GROUPS[] = {PTI_GROUP_LEVEL_ZERO, PTI_GROUP_SYCL, PTI_GROUP_SYCL_LEVEL_ZERO};
    self.named = true;
    for (uint32_t id = 0; id < CALLS_MOST; id++) {
        for (size_t i = 0; i < sizeof GROUPS / sizeof *GROUPS; i++) {
            add_name(GROUPS[i], id);
        }
    }
}

static int32_t vendor_flush(bool forced) {
    (void)forced; /* depends on whether views are on */
    if (self.with_calls && !self.named) {
        add_names();
    }
    if (__atomic_load_n(&self.recording, __ATOMIC_SEQ_CST)) {
        return PTI_OK;
    }
    pause_ns(SETTLE_NS);
    const int64_t deadline = now_ns() + RETURN_LIMIT_NS;
    pti_result result = self.api.flush();
    while (result == PTI_OK && __atomic_load_n(&self.lent, __ATOMIC_SEQ_CST) > 0 && now_ns() < deadline) {
        pause_ns(RETURN_PAUSE_NS);
        result = self.api.flush();
    }
    return result;
}

static int32_t vendor_next_record(uint8_t *buffer, size_t used, void **record) {
    return self.api.next_record(buffer, used, record);
}

static void vendor_forked(void) {
    if (__atomic_load_n(&self.recording, __ATOMIC_SEQ_CST)) {
        level_zero_untrace();
    }
}

static void append(char **at, const char *end, const char *text) {
    const int length = snprintf(*at, (size_t)(end - *at), "%s", text);
    *at += length < end - *at ? length : end - *at - 1;
}

/* Removes characters that JSON would have to escape from a device's name. */
static void plain(char *name) {
    for (; *name != 0; name++) {
        *name = *name < ' ' || *name > '~' || *name == '"' || *name == '\\' ? '?' : *name;
    }
}

static int64_t vendor_describe(char *text, size_t text_bytes) {
    static struct level_zero_device devices[LEVEL_ZERO_DEVICES_MOST];
    char piece[1024];
    char *at = text;
    const char *end = text + text_bytes;
    const uint32_t count = level_zero_devices(devices);
    append(&at, end, "{\"devices\": [");
    for (uint32_t i = 0; i < count; i++) {
        struct ze_properties *of = &devices[i].properties;
        char uuid[2 * sizeof of->uuid + 1];
        for (size_t byte = 0; byte < sizeof of->uuid; byte++) {
            snprintf(uuid + 2 * byte, 3, "%02x", of->uuid[byte]);
        }
        of->name[sizeof of->name - 1] = 0;
        plain(of->name);
        snprintf(
            piece, sizeof piece,
            "%s{\"id\": %u, \"name\": \"%s\", \"uuid\": \"%s\", \"pci\": \"%x:%x:%x.%x\", \"totalGlobalMem\": %llu, "
            "\"maxComputeUnits\": %u, \"maxClockFrequency\": %u, \"maxMemAllocSize\": %llu}",
            i == 0 ? "" : ", ", i, of->name, uuid, devices[i].pci.domain, devices[i].pci.bus, devices[i].pci.device,
            devices[i].pci.function, (unsigned long long)devices[i].memory_bytes,
            of->slices * of->subslices_per_slice * of->eus_per_subslice, of->core_clock_mhz,
            (unsigned long long)of->allocation_most);
        append(&at, end, piece);
    }
    append(&at, end, "]}");
    return (size_t)(at - text) + 1 < text_bytes ? at - text : -1;
}

static const char *vendor_result_text(int32_t result) { return pti_result_text(result); }

const struct kit_vendor PTI_VENDOR = {
    .abi = KIT_ABI,
    .size = sizeof(struct kit_vendor),
    .name = "pti",
    .open = vendor_open,
    .start = vendor_start,
    .stop = vendor_stop,
    .flush = vendor_flush,
    .next_record = vendor_next_record,
    .forked = vendor_forked,
    .describe = vendor_describe,
    .result_text = vendor_result_text,
    .stops_at_exit = true,
};
