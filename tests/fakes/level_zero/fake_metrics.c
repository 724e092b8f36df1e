// Level Zero's metric streamer over GPUs that do not exist: a part of the fake driver (fake_driver.c, empty_tables.c),
// in which Intel's traps are. What it does stands in the file that FAKE_METRICS names, one "key value" a line, read
// anew at each call:
//   fail.FUNCTION CODE  this function answers so
//   busy 1              a stream holds the file "FAKE_METRICS.<gpu>.held" locked, and one that cannot get it answers as
//   busy_code CODE      says; default ERROR_UNKNOWN, as Intel's driver does of everything that the kernel refuses
//   groups 0            there are no groups of metrics
//   gap N               report N and the two after it are missing
//   drop N              likewise, and the read that comes next warns, without telling how much it wrote
//   context N           between reports N and N+1 there is one of a switch between contexts
//   period NS           the hardware's interval, whatever is asked for
//   late NS             timestamps are off by so much
// FAKE_METRICS_LOG names a file that gets each call, and each call that is wrong with the word WRONG.
//
// Report N tells of GPU_BUSY N % 100; its other values are constants or in proportion to its time (values_of).
#define _GNU_SOURCE
#include <fcntl.h>
#include <level_zero/ze_api.h>
#include <level_zero/zet_api.h>
#include <level_zero/zet_ddi.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "tables.h"

#define GPUS_MOST 4u
#define METRICS_MOST 16u
#define MISSING 3u
#define API static ze_result_t

// As fake_driver.c has devices: `detail` is the index.
struct object {
    struct object *self;
    struct object *parent;
    void *detail;
};

struct metric {
    void *none[8]; // a loader may read the first words of a handle
    const char *name, *unit;
    zet_metric_type_t type;
    zet_value_type_t value_type;
};

struct group {
    void *none[8];
    const char *name;
    zet_metric_group_sampling_type_flags_t sampling;
    uint32_t domain, count;
    struct metric metrics[METRICS_MOST];
};

// Raw reports: numbers begin with 1.
struct report {
    uint64_t number, time_ns, reason, padding[5];
};

struct stream {
    void *none[8];
    struct group *group;
    uint32_t gpu;
    bool open;
    int held;
    uint64_t began_ns, period_ns, late_ns, next;
    bool switched;
};

#define TIME_NS {.name = "GpuTime", .unit = "ns", .type = ZET_METRIC_TYPE_EVENT, .value_type = ZET_VALUE_TYPE_UINT64}
#define END_NS \
    {.name = "QueryBeginTime", .unit = "ns", .type = ZET_METRIC_TYPE_TIMESTAMP, .value_type = ZET_VALUE_TYPE_UINT64}
#define PERCENT(name_) \
    {.name = name_, .unit = "percent", .type = ZET_METRIC_TYPE_DURATION, .value_type = ZET_VALUE_TYPE_FLOAT32}
#define COUNT(name_, unit_) \
    {.name = name_, .unit = unit_, .type = ZET_METRIC_TYPE_EVENT, .value_type = ZET_VALUE_TYPE_UINT64}

static struct group groups[] = {
    {.name = "EuStallSampling",
     .sampling = ZET_METRIC_GROUP_SAMPLING_TYPE_FLAG_TIME_BASED,
     .domain = 100,
     .count = 2,
     .metrics = {COUNT("IP", "address"), COUNT("Active", "events")}},
    {.name = "ComputeBasic",
     .sampling = ZET_METRIC_GROUP_SAMPLING_TYPE_FLAG_EVENT_BASED,
     .count = 2,
     .metrics = {TIME_NS, PERCENT("GPU_BUSY")}},
    {.name = "MemoryProfile",
     .sampling = ZET_METRIC_GROUP_SAMPLING_TYPE_FLAG_TIME_BASED,
     .count = 5,
     .metrics = {TIME_NS, COUNT("GPU_MEMORY_BYTE_READ", "bytes"), COUNT("GPU_MEMORY_BYTE_WRITE", "bytes"),
                 PERCENT("GPU_MEMORY_REQUEST_QUEUE_FULL"), END_NS}},
    {.name = "ComputeBasic",
     .sampling = ZET_METRIC_GROUP_SAMPLING_TYPE_FLAG_TIME_BASED,
     .count = 13,
     .metrics =
         {TIME_NS,
          COUNT("GpuCoreClocks", "cycles"),
          COUNT("AvgGpuCoreFrequencyMHz", "MHz"),
          PERCENT("GPU_BUSY"),
          PERCENT("XVE_ACTIVE"),
          PERCENT("XVE_STALL"),
          PERCENT("XVE_THREADS_OCCUPANCY_ALL"),
          COUNT("GPU_MEMORY_BYTE_READ", "bytes"),
          COUNT("GPU_MEMORY_BYTE_WRITE", "bytes"),
          COUNT("XVE_INST_EXECUTED_SEND_ALL", "events"),
          END_NS,
          {.name = "ReportReason", .unit = "", .type = ZET_METRIC_TYPE_RAW, .value_type = ZET_VALUE_TYPE_UINT32},
          {.name = "ContextIdValid", .unit = "", .type = ZET_METRIC_TYPE_FLAG, .value_type = ZET_VALUE_TYPE_BOOL8}}},
};
#define GROUPS (sizeof groups / sizeof groups[0])

static struct stream streams[GPUS_MOST];
static struct group *active[GPUS_MOST];

static long long said(const char *key, long long otherwise) {
    const char *path = getenv("FAKE_METRICS");
    FILE *file = path ? fopen(path, "re") : NULL;
    char word[96];
    long long value, found = otherwise;
    while (file && fscanf(file, "%95s %lld", word, &value) == 2) {
        found = strcmp(word, key) == 0 ? value : found;
    }
    if (file) {
        fclose(file);
    }
    return found;
}

static void note(const char *format, ...) {
    const char *path = getenv("FAKE_METRICS_LOG");
    char line[256];
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    const int file = path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (file >= 0) {
        if (write(file, line, (size_t)length) != length) {
            abort();
        }
        close(file);
    }
}

static ze_result_t wrong(const char *function, const char *why) {
    note("%s WRONG %s\n", function, why);
    return ZE_RESULT_ERROR_INVALID_ARGUMENT;
}

// Functions have the names of the interface, and an underscore.
#define CALLED                                                                      \
    do {                                                                            \
        char key[96];                                                               \
        snprintf(key, sizeof key, "fail.%.*s", (int)sizeof __func__ - 2, __func__); \
        note("%s\n", key + strlen("fail."));                                        \
        const long long code = said(key, 0);                                        \
        if (code != 0) {                                                            \
            return (ze_result_t)code;                                               \
        }                                                                           \
    } while (0)
#define MUST(condition)                         \
    do {                                        \
        if (!(condition)) {                     \
            return wrong(__func__, #condition); \
        }                                       \
    } while (0)

static uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC_RAW, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static uint32_t index_of(ze_device_handle_t device) { return (uint32_t)(uintptr_t)((struct object *)device)->detail; }

// ---- groups and metrics ----

API zetMetricGroupGet_(zet_device_handle_t device, uint32_t *count, zet_metric_group_handle_t *found) {
    CALLED;
    const char *enabled = getenv("ZET_ENABLE_METRICS");
    if (enabled == NULL || strcmp(enabled, "1") != 0) {
        return ZE_RESULT_ERROR_UNSUPPORTED_FEATURE;
    }
    const uint32_t there = said("groups", 1) ? GROUPS : 0;
    for (uint32_t i = 0; found != NULL && i < *count && i < there; i++) {
        found[i] = (zet_metric_group_handle_t)&groups[i];
    }
    *count = *count == 0 || *count > there ? there : *count;
    return ZE_RESULT_SUCCESS;
}

API zetMetricGroupGetProperties_(zet_metric_group_handle_t handle, zet_metric_group_properties_t *properties) {
    CALLED;
    MUST(properties->stype == ZET_STRUCTURE_TYPE_METRIC_GROUP_PROPERTIES);
    const struct group *group = (struct group *)handle;
    snprintf(properties->name, sizeof properties->name, "%s", group->name);
    properties->samplingType = group->sampling;
    properties->domain = group->domain;
    properties->metricCount = group->count;
    zet_metric_global_timestamps_resolution_exp_t *clock = properties->pNext;
    if (clock != NULL) {
        MUST(clock->stype == ZET_STRUCTURE_TYPE_METRIC_GLOBAL_TIMESTAMPS_RESOLUTION_EXP && clock->pNext == NULL);
        clock->timerResolution = 1000000000u;
        clock->timestampValidBits = 32;
    }
    return ZE_RESULT_SUCCESS;
}

API zetMetricGet_(zet_metric_group_handle_t handle, uint32_t *count, zet_metric_handle_t *found) {
    struct group *group = (struct group *)handle;
    for (uint32_t i = 0; found != NULL && i < *count && i < group->count; i++) {
        found[i] = (zet_metric_handle_t)&group->metrics[i];
    }
    *count = group->count;
    return ZE_RESULT_SUCCESS;
}

API zetMetricGetProperties_(zet_metric_handle_t handle, zet_metric_properties_t *properties) {
    const struct metric *metric = (struct metric *)handle;
    MUST(properties->stype == ZET_STRUCTURE_TYPE_METRIC_PROPERTIES && properties->pNext == NULL);
    snprintf(properties->name, sizeof properties->name, "%s", metric->name);
    snprintf(properties->resultUnits, sizeof properties->resultUnits, "%s", metric->unit);
    properties->metricType = metric->type;
    properties->resultType = metric->value_type;
    return ZE_RESULT_SUCCESS;
}

// ---- streams ----

API zetContextActivateMetricGroups_(zet_context_handle_t context, zet_device_handle_t device, uint32_t count,
                                    zet_metric_group_handle_t *wanted) {
    CALLED;
    const uint32_t gpu = index_of(device);
    MUST(context != NULL && count <= 1);
    MUST(!streams[gpu].open); // not while a stream is open
    active[gpu] = count ? (struct group *)wanted[0] : NULL;
    return ZE_RESULT_SUCCESS;
}

static bool hold(struct stream *stream) {
    char path[512];
    snprintf(path, sizeof path, "%s.%u.held", getenv("FAKE_METRICS"), stream->gpu);
    stream->held = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (stream->held >= 0 && flock(stream->held, LOCK_EX | LOCK_NB) == 0) {
        return true;
    }
    close(stream->held);
    return false;
}

API zetMetricStreamerOpen_(zet_context_handle_t context, zet_device_handle_t device, zet_metric_group_handle_t group,
                           zet_metric_streamer_desc_t *how, ze_event_handle_t event,
                           zet_metric_streamer_handle_t *made) {
    CALLED;
    const uint32_t gpu = index_of(device);
    struct stream *stream = &streams[gpu];
    MUST(context != NULL && event == NULL);
    MUST(how->stype == ZET_STRUCTURE_TYPE_METRIC_STREAMER_DESC && how->pNext == NULL);
    MUST(how->notifyEveryNReports > 0 && how->samplingPeriod > 0);
    if (stream->open) {
        return ZE_RESULT_ERROR_HANDLE_OBJECT_IN_USE;
    }
    if (active[gpu] != (struct group *)group) {
        return ZE_RESULT_NOT_READY;
    }
    stream->gpu = gpu;
    stream->held = -1;
    if (said("busy", 0) && !hold(stream)) {
        return (ze_result_t)said("busy_code", ZE_RESULT_ERROR_UNKNOWN);
    }
    how->samplingPeriod = (uint32_t)said("period", how->samplingPeriod);
    stream->group = (struct group *)group;
    stream->period_ns = how->samplingPeriod;
    stream->late_ns = (uint64_t)said("late", 0);
    stream->began_ns = now_ns();
    stream->next = 1;
    stream->switched = false;
    stream->open = true;
    *made = (zet_metric_streamer_handle_t)stream;
    return ZE_RESULT_SUCCESS;
}

static uint64_t time_of(const struct stream *stream, uint64_t number) {
    return stream->began_ns + number * stream->period_ns + stream->late_ns;
}

static bool is_missing(uint64_t number, uint64_t from) {
    return from != 0 && number >= from && number < from + MISSING;
}

API zetMetricStreamerReadData_(zet_metric_streamer_handle_t handle, uint32_t most, size_t *size, uint8_t *data) {
    struct stream *stream = (struct stream *)handle;
    if (*size == 0) {
        *size = most * sizeof(struct report);
        return ZE_RESULT_SUCCESS;
    }
    CALLED;
    MUST(stream->open && data != NULL && *size >= sizeof(struct report));
    for (size_t i = 0; i < *size; i++) {
        MUST(data[i] == 0); // a clear buffer tells how much was written
    }
    const uint64_t due = (now_ns() - stream->began_ns) / stream->period_ns;
    const uint64_t switch_after = (uint64_t)said("context", 0);
    const uint64_t gap = (uint64_t)said("gap", 0), drop = (uint64_t)said("drop", 0);
    struct report *reports = (struct report *)data;
    uint64_t count = 0;
    bool warns = false;
    while (stream->next <= due && count < *size / sizeof(struct report)) {
        const uint64_t number = stream->next;
        if (number == switch_after && !stream->switched) {
            stream->switched = true;
            const uint64_t time_ns = time_of(stream, number) - stream->period_ns / 4;
            reports[count++] = (struct report){.number = number, .time_ns = time_ns, .reason = 8};
            continue;
        }
        stream->next++;
        warns = warns || is_missing(number, drop);
        if (!is_missing(number, drop) && !is_missing(number, gap)) {
            reports[count++] = (struct report){.number = number, .time_ns = time_of(stream, number), .reason = 1};
        }
    }
    if (warns) {
        return ZE_RESULT_WARNING_DROPPED_DATA; // *size is as it was
    }
    *size = count * sizeof(struct report);
    return ZE_RESULT_SUCCESS;
}

API zetMetricStreamerClose_(zet_metric_streamer_handle_t handle) {
    CALLED;
    struct stream *stream = (struct stream *)handle;
    MUST(stream->open);
    stream->open = false;
    close(stream->held);
    return ZE_RESULT_SUCCESS;
}

// ---- values ----

static zet_typed_value_t value_of(const struct metric *metric, const struct report *report, uint64_t length_ns) {
    static const struct {
        const char *name;
        double constant, per_ns;
    } figures[] = {
        {"AvgGpuCoreFrequencyMHz", 1500, 0},
        {"XVE_ACTIVE", 40, 0},
        {"XVE_STALL", 20, 0},
        {"XVE_THREADS_OCCUPANCY_ALL", 30, 0},
        {"GPU_MEMORY_REQUEST_QUEUE_FULL", 5, 0},
        {"GpuCoreClocks", 0, 1.5},
        {"GPU_MEMORY_BYTE_READ", 0, 200},
        {"GPU_MEMORY_BYTE_WRITE", 0, 100},
        {"XVE_INST_EXECUTED_SEND_ALL", 0, 0.5},
        {"GpuTime", 0, 1},
        {"ContextIdValid", 1, 0},
    };
    zet_typed_value_t value = {.type = metric->value_type};
    double number = strcmp(metric->name, "GPU_BUSY") == 0 ? (double)(report->number % 100) : 0;
    for (size_t i = 0; i < sizeof figures / sizeof figures[0]; i++) {
        if (strcmp(metric->name, figures[i].name) == 0) {
            number = figures[i].constant + figures[i].per_ns * (double)length_ns;
        }
    }
    switch (metric->value_type) {
    case ZET_VALUE_TYPE_FLOAT32: value.value.fp32 = (float)number; break;
    case ZET_VALUE_TYPE_UINT32: value.value.ui32 = (uint32_t)report->reason; break;
    case ZET_VALUE_TYPE_BOOL8: value.value.b8 = (ze_bool_t)number; break;
    default: // the clock has 32 bits
        value.value.ui64 = strcmp(metric->name, "QueryBeginTime") == 0 ? (uint32_t)report->time_ns : (uint64_t)number;
    }
    return value;
}

API zetMetricGroupCalculateMetricValues_(zet_metric_group_handle_t handle, zet_metric_group_calculation_type_t type,
                                         size_t size, const uint8_t *data, uint32_t *count, zet_typed_value_t *values) {
    CALLED;
    const struct group *group = (struct group *)handle;
    MUST(type == ZET_METRIC_GROUP_CALCULATION_TYPE_METRIC_VALUES && size > 0 && size % sizeof(struct report) == 0);
    const uint32_t reports = (uint32_t)(size / sizeof(struct report));
    if (*count == 0) {
        *count = reports * group->count;
        return ZE_RESULT_SUCCESS;
    }
    MUST(values != NULL && *count >= reports * group->count);
    static struct report before[GPUS_MOST]; // of an earlier calculation, and of an earlier stream
    uint32_t gpu = 0;
    while (gpu + 1 < GPUS_MOST && !(streams[gpu].open && streams[gpu].group == group)) {
        gpu++;
    }
    uint32_t made = 0;
    for (uint32_t i = 0; i < reports; i++) {
        struct report report;
        memcpy(&report, data + i * sizeof report, sizeof report);
        MUST(report.number != 0);
        for (uint32_t j = 0; before[gpu].number != 0 && j < group->count; j++) {
            values[made++] = value_of(&group->metrics[j], &report, report.time_ns - before[gpu].time_ns);
        }
        before[gpu] = report;
    }
    *count = made;
    return ZE_RESULT_SUCCESS;
}

#define TABLE(function, type_, ...)                                             \
    ZE_DLLEXPORT ze_result_t function(ze_api_version_t version, type_ *table) { \
        fill_table(table, sizeof *table);                                       \
        __VA_ARGS__;                                                            \
        return ZE_RESULT_SUCCESS;                                               \
    }

TABLE(zetGetContextProcAddrTable, zet_context_dditable_t,
      table->pfnActivateMetricGroups = zetContextActivateMetricGroups_)
TABLE(zetGetMetricProcAddrTable, zet_metric_dditable_t, table->pfnGet = zetMetricGet_,
      table->pfnGetProperties = zetMetricGetProperties_)
TABLE(zetGetMetricGroupProcAddrTable, zet_metric_group_dditable_t, table->pfnGet = zetMetricGroupGet_,
      table->pfnGetProperties = zetMetricGroupGetProperties_,
      table->pfnCalculateMetricValues = zetMetricGroupCalculateMetricValues_)
TABLE(zetGetMetricStreamerProcAddrTable, zet_metric_streamer_dditable_t, table->pfnOpen = zetMetricStreamerOpen_,
      table->pfnClose = zetMetricStreamerClose_, table->pfnReadData = zetMetricStreamerReadData_)
