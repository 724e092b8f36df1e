/* See rocprofiler_vendor.h.
 *
 * Theory of operation
 *   The kit does what all vendors need. This file opens rocprofiler, starts our client's contexts for a recording, and
 *   drains it: stopped contexts still deliver the records of queued work, so the last flush is repeated until no more
 *   come.
 *
 *   rocprofiler sets environment variables when it is configured, for the library that notifies it of runtimes. A
 *   process that inherits them cannot be profiled properly. If the runtime has registered already, this process does
 *   not need them, and those that were not there before are removed again.
 *
 * Threads: flush, take_dropped and read_clock run on the collector's; the rest on the agent's.
 * Blocks: inside rocprofiler. The last flush sleeps between its attempts, DRAIN_LIMIT_NS at most.
 */
#define _GNU_SOURCE
#include "rocprofiler/rocprofiler_vendor.h"

#include <dirent.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/error_text.h"
#include "common/wake.h"
#include "rocprofiler/hip_calls.h"
#include "rocprofiler/kernel_ids.h"
#include "rocprofiler/rocprofiler_api.h"
#include "rocprofiler/rocprofiler_client.h"

#define NS_PER_MS 1000000LL
#define DRAIN_LIMIT_NS (1500 * NS_PER_MS)
#define DRAIN_PERIOD_MS 10
#define QUIET_NS (40 * NS_PER_MS)    /* no record for this long: nothing is in the queues */
#define AWAITED_NS (500 * NS_PER_MS) /* the same, with launches whose dispatches have not come */
#define BUSY_ATTEMPTS 50
#define BUSY_PERIOD_US 200
#define AGENTS_MOST 64u
#define VARIABLES 2u

static const char *const VARIABLE_NAMES[VARIABLES] = {"ROCPROFILER_REGISTER_FORCE_LOAD",
                                                      "ROCPROFILER_REGISTER_LIBRARY"};

static struct {
    struct rocp_api api;
    uint64_t version;
    const struct kit_host *host;
    bool told;       /* names of operations have been added in this recording */
    bool dispatches; /* are being recorded */
    bool calls;      /* HIP's, are being recorded */
    uint64_t kernels_lost_before;
    char variables_left[160]; /* of the environment: names */
} self;

/* ---- opening ---- */

static int open_library(const struct kit_host *host, const char *path, struct kit_library *library, char *error,
                        size_t error_bytes) {
    self.host = host;
    if (rocprofiler_api_open(&self.api, path, &self.version, error, error_bytes) != 0) {
        return KC_LIBRARY;
    }
    library->version = self.version;
    return 0;
}

/* Whether this process has AMD's device open, as it does once a runtime has initialised. */
static bool runtime_is_up(void) {
    char path[64], target[256];
    bool found = false;
    DIR *folder = opendir("/proc/self/fd");
    for (const struct dirent *entry = folder == NULL ? NULL : readdir(folder); entry != NULL && !found;
         entry = readdir(folder)) {
        snprintf(path, sizeof path, "/proc/self/fd/%.20s", entry->d_name);
        const ssize_t length = readlink(path, target, sizeof target - 1);
        found = length >= 4 && memcmp(target + length - 4, "/kfd", 4) == 0;
    }
    if (folder != NULL) {
        closedir(folder);
    }
    return found;
}

/* ---- facts ---- */

struct text {
    char *at;
    size_t size, length;
};

static void append(struct text *text, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const size_t room = text->length < text->size ? text->size - text->length : 0;
    const int more = vsnprintf(text->at + (room > 0 ? text->length : 0), room, format, arguments);
    va_end(arguments);
    text->length += more > 0 ? (size_t)more : 0;
}

/* Names of devices are ASCII; characters that JSON would escape are left out. */
static void append_name(struct text *text, const char *key, const char *name) {
    append(text, ",\"%s\":\"", key);
    for (const char *at = name == NULL ? "" : name; *at != 0 && at - name < 128; at++) {
        if (*at >= ' ' && *at < 127 && *at != '"' && *at != '\\') {
            append(text, "%c", *at);
        }
    }
    append(text, "\"");
}

static int add_agents(int version, const void **agents, size_t count, void *data) {
    struct text *text = data;
    (void)version;
    for (size_t i = 0; i < count && i < AGENTS_MOST; i++) {
        const struct rocp_agent *agent = agents[i];
        if (agent == NULL || agent->size < sizeof *agent) {
            continue;
        }
        append(text, "%s{\"id\":%llu,\"gpu\":%d,\"ordinal\":%d", i > 0 ? "," : "", (unsigned long long)agent->id,
               agent->type == ROCP_AGENT_GPU, agent->ordinal);
        append_name(text, "arch", agent->name);
        append_name(text, "name", agent->product_name);
        append(text,
               ",\"compute_units\":%u,\"wavefront\":%u,\"lds_kb\":%u,\"waves_per_unit\":%u,\"workgroup_most\":%u,"
               "\"clock_mhz\":%u,\"memory_bytes\":%llu,\"gfx_version\":%u,\"domain\":%u,\"location\":%u}",
               agent->compute_units, agent->wavefront, agent->lds_kb, agent->waves_per_unit, agent->workgroup_most,
               agent->clock_mhz, (unsigned long long)agent->memory_bytes, agent->gfx_version, agent->domain,
               agent->location);
    }
    return ROCP_SUCCESS;
}

static int64_t describe(char *room, size_t size) {
    struct text text = {room, size, 0};
    int initialised = 0, finalised = 0;
    (void)self.api.is_initialized(&initialised);
    (void)self.api.is_finalized(&finalised);
    append(&text,
           "{\"initialised\":%d,\"finalised\":%d,\"configured\":%s,\"runtime_up\":%s,\"variables_left\":\"%s\","
           "\"agents\":[",
           initialised, finalised, client_configured() ? "true" : "false", runtime_is_up() ? "true" : "false",
           self.variables_left);
    if (self.version >= 10000 && finalised == 0) {
        (void)self.api.available_agents(ROCP_AGENTS_VERSION, add_agents, sizeof(struct rocp_agent), &text);
    }
    append(&text, "]}");
    return text.length < size ? (int64_t)text.length : -1;
}

/* ---- recording ---- */

static int part_of(uint32_t kind) {
    switch (kind) {
    case HIP_RUNTIME_CALL: return PART_HIP_RUNTIME;
    case HIP_COMPILER_CALL: return PART_HIP_COMPILER;
    case ROCP_BUFFER_KERNEL_DISPATCH: return PART_DISPATCHES;
    case ROCP_BUFFER_MEMORY_COPY: return PART_COPIES;
    case ROCP_BUFFER_MEMORY_ALLOCATION: return PART_ALLOCATIONS;
    case ROCP_BUFFER_SCRATCH_MEMORY: return PART_SCRATCH;
    case ROCP_BUFFER_HSA_CORE: return PART_HSA;
    default: return -1;
    }
}

static int configure(char *error, size_t error_bytes) {
    const char *step = "";
    bool had[VARIABLES];
    const bool up = runtime_is_up();
    for (size_t i = 0; i < VARIABLES; i++) {
        had[i] = getenv(VARIABLE_NAMES[i]) != NULL;
    }
    const bool before = client_configured();
    const int status = client_configure(&self.api, self.host, &step);
    self.variables_left[0] = 0;
    for (size_t i = 0; !before && i < VARIABLES; i++) {
        if (had[i] || getenv(VARIABLE_NAMES[i]) == NULL) {
            continue;
        }
        if (up) {
            unsetenv(VARIABLE_NAMES[i]);
        } else {
            const size_t length = strlen(self.variables_left);
            snprintf(self.variables_left + length, sizeof self.variables_left - length, "%s%s",
                     length > 0 ? " and " : "", VARIABLE_NAMES[i]);
        }
    }
    if (status != ROCP_SUCCESS) {
        snprintf(error, error_bytes, "%s refused: %s (%d)", step,
                 status < 0 ? "no context" : self.api.status_text(status), status);
        return KIT_VENDOR_FAILED;
    }
    return 0;
}

static void stop(void) {
    for (int part = PARTS - 1; part > PART_KERNEL_NAMES; part--) {
        client_stop((enum client_part)part);
    }
}

static int start(const uint32_t *kinds, uint32_t count, int32_t *results, char *error, size_t error_bytes) {
    bool all_allocations = false, any = false;
    const int code = configure(error, error_bytes);
    if (code != 0) {
        return code;
    }
    for (uint32_t i = 0; i < count; i++) {
        all_allocations |= kinds[i] == ROCPROFILER_ALL_ALLOCATIONS;
    }
    self.told = self.dispatches = self.calls = false;
    self.kernels_lost_before = kernel_ids_lost();
    kernel_ids_rewind();
    client_begin(self.host);
    hip_calls_begin(self.host, ROCPROFILER_SPACE_FUNCTION, all_allocations);
    for (uint32_t i = 0; i < count; i++) {
        const int part = part_of(kinds[i]);
        results[i] = part < 0 ? ROCP_SUCCESS : client_start((enum client_part)part);
        any |= part >= 0 && results[i] == ROCP_SUCCESS;
        self.dispatches |= part == PART_DISPATCHES && results[i] == ROCP_SUCCESS;
        self.calls |= part == PART_HIP_RUNTIME && results[i] == ROCP_SUCCESS;
    }
    if (!any) {
        hip_calls_end();
        return refuse(KIT_VENDOR_FAILED, error, error_bytes, "rocprofiler-sdk started none of the wanted activities");
    }
    return 0;
}

/* ---- draining ---- */

static void tell_names(void) {
    kernel_ids_tell(self.host, ROCPROFILER_SPACE_KERNEL);
    if (!self.told) {
        self.told = true;
        hip_calls_tell(&self.api, self.host, ROCPROFILER_SPACE_OPERATION);
        client_tell(self.host, ROCPROFILER_SPACE_OPERATION);
    }
}

static int flush_once(void) {
    int status = client_flush();
    for (int i = 0; status == ROCP_BUFFER_BUSY && i < BUSY_ATTEMPTS; i++) {
        usleep(BUSY_PERIOD_US);
        status = client_flush();
    }
    return status;
}

static int drain(void) {
    const int64_t begin = clock_ns(CLOCK_MONOTONIC);
    int64_t last = begin;
    uint64_t seen = client_records();
    int status = flush_once();
    while (status == ROCP_SUCCESS) {
        const int64_t now = clock_ns(CLOCK_MONOTONIC);
        last = client_records() != seen ? now : last;
        seen = client_records();
        const bool awaited = self.dispatches && hip_calls_launches() > client_dispatches();
        const int64_t patience = awaited ? AWAITED_NS : QUIET_NS;
        if (now - last >= patience || now - begin >= DRAIN_LIMIT_NS) {
            break;
        }
        usleep(DRAIN_PERIOD_MS * 1000);
        status = flush_once();
    }
    return status;
}

static int32_t flush(bool forced) {
    if (!client_configured()) {
        return 0;
    }
    if (forced) {
        hip_calls_end();
    }
    const int status = forced ? drain() : flush_once();
    tell_names();
    return status;
}

static uint64_t take_dropped(void) { return client_take_dropped(); }

static uint64_t read_clock(void) { return (uint64_t)clock_ns(CLOCK_BOOTTIME); }

static int64_t problem(char *room, size_t size) {
    struct text text = {room, size, 0};
    const struct client_alien alien = client_alien();
    const uint64_t lost = kernel_ids_lost() - self.kernels_lost_before;
    if (alien.count > 0) {
        append(
            &text,
            "%llu records were left out: this rocprofiler-sdk writes records of kind %u with %llu bytes, which is not "
            "a size that this agent knows",
            (unsigned long long)alien.count, alien.kind, (unsigned long long)alien.size);
    }
    if (lost > 0) {
        append(&text, "%s%llu kernels have no name: more were loaded than are kept", text.length > 0 ? "; " : "",
               (unsigned long long)lost);
    }
    if (self.calls && hip_calls_made() == 0 && client_dispatches() > 0) {
        append(&text,
               "%srocprofiler-sdk told of %llu kernels, but of no call of HIP's: they have no launches, and queues in "
               "place of streams",
               text.length > 0 ? "; " : "", (unsigned long long)client_dispatches());
    }
    return (int64_t)text.length;
}

static void forked(void) {
    client_kill();
    hip_calls_kill();
}

static const char *result_text(int32_t result) { return self.api.status_text(result); }

const struct kit_vendor rocprofiler_vendor = {
    .abi = KIT_ABI,
    .size = sizeof(struct kit_vendor),
    .name = "rocprofiler",
    .open = open_library,
    .start = start,
    .stop = stop,
    .flush = flush,
    .take_dropped = take_dropped,
    .read_clock = read_clock,
    .problem = problem,
    .forked = forked,
    .describe = describe,
    .result_text = result_text,
};
