// A libcupti and a libcuda in one file, without a GPU: PM sampling as CUPTI 12.8 to 13.5 does it.
//
// It checks the order of the calls and structSize of every block by the version that it plays, and answers
// INVALID_PARAMETER where one is wrong, with a line in FAKE_PM_LOG. The file that FAKE_PM_PLAN names says what it plays, one
// "key=value" a line, read when a call needs it:
//   version=130001      cuptiGetVersion
//   gpus=2              how many; chip=GH100, mig=1, vgpu=2 (cuptiProfilerDeviceSupported's word)
//   fail=CALL:RESULT    that function fails with that result; at=N: only its Nth call, counted from 1
//   hang=CALL           that function does not return
//   full=N              the Nth decoding stops with COUNTER_DATA_FULL and loses what did not fit
//   gap=N               after N samples, three are missing
//   adjust=N, by=NS     from sample N on, all times are so much earlier: the clock that converts them was adjusted
//   lose=1              the hardware loses the older half of what waits at every decoding
//   triage=1            there are metrics TPC.TriageCompute.sm__…
//   busy=PATH           a lock file: the first process that configures a GPU has its counters, others get HARDWARE_BUSY
// Samples take FAKE interval (the one configured) of CLOCK_REALTIME and begin at cuptiPmSamplingStart; value i of sample n
// of GPU d is 1000 * d + 100 * i + n % 100.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define DEVICES_MOST 16
#define INVALID_PARAMETER 1
#define INVALID_OPERATION 7
#define OUT_OF_MEMORY 8
#define INVALID_METRIC_NAME 17
#define HARDWARE_BUSY 26
#define UNKNOWN 999
#define BYTES_A_SAMPLE 1024

typedef uint64_t block[16]; // a parameter block as words: structSize is word 0, pPriv word 1

struct object {
    uint64_t device;
    int configured, started, stopped, busy_lock;
    uint64_t interval, first_ns, decoded, stop_ns, lost;
    const uint8_t *config; // must stay as it is: CUPTI keeps the pointer
    uint8_t config_copy[64];
    size_t config_bytes;
};
struct host {
    uint64_t device_known;
    char names[64][128];
    uint64_t count;
};
struct image {
    uint64_t capacity, completed, first[8192], second[8192], number[8192], device;
};

static struct object *sampled[DEVICES_MOST];
static int initialised;

static void note(const char *call, const char *what) {
    const char *path = getenv("FAKE_PM_LOG");
    if (path != NULL) {
        int log = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
        dprintf(log, "%s %s\n", call, what);
        close(log);
    }
}

static int planned(const char *key, const char *prefix, char *value, size_t bytes) {
    const char *path = getenv("FAKE_PM_PLAN");
    FILE *plan = path != NULL ? fopen(path, "re") : NULL;
    char line[512];
    int found = 0;
    size_t length = strlen(key);
    while (plan != NULL && !found && fgets(line, sizeof line, plan) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        if (strncmp(line, key, length) == 0 && line[length] == '=' &&
            strncmp(line + length + 1, prefix, strlen(prefix)) == 0) {
            snprintf(value, bytes, "%s", line + length + 1 + strlen(prefix));
            found = 1;
        }
    }
    if (plan != NULL) {
        fclose(plan);
    }
    return found;
}

static uint64_t number(const char *key, uint64_t usual) {
    char value[64];
    return planned(key, "", value, sizeof value) ? strtoull(value, NULL, 0) : usual;
}

static uint32_t version(void) { return (uint32_t)number("version", 130001); }

// What every call passes: its structSize, and the plan.
static int entered(const char *call, const uint64_t *p, uint64_t bytes, unsigned *calls) {
    char value[128], prefix[128];
    *calls += 1;
    note(call, "");
    if (planned("hang", "", value, sizeof value) && strcmp(value, call) == 0) {
        pause();
    }
    if (p[0] != bytes || p[1] != 0) {
        char text[128];
        snprintf(text, sizeof text, "WRONG structSize %zu, not %zu", (size_t)p[0], (size_t)bytes);
        note(call, text);
        return INVALID_PARAMETER;
    }
    snprintf(prefix, sizeof prefix, "%s:", call);
    uint64_t at = number("at", 0);
    if (planned("fail", prefix, value, sizeof value) && (at == 0 || at == *calls)) {
        return (int)strtol(value, NULL, 0);
    }
    return 0;
}
#define ENTER(bytes)                                     \
    uint64_t *p = parameters;                            \
    static unsigned calls;                               \
    int refused = entered(__func__, p, (bytes), &calls); \
    if (refused != 0) {                                  \
        return refused;                                  \
    }
static int wrong(const char *call, const char *what) {
    char text[128];
    snprintf(text, sizeof text, "WRONG %s", what);
    note(call, text);
    return INVALID_OPERATION;
}

static uint64_t real_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

// ---- libcuda

EXPORT int cuInit(unsigned flags) { return flags != 0 ? 1 : (int)number("cuinit", 0); }
EXPORT int cuDeviceGetCount(int *count) {
    *count = (int)number("gpus", 1);
    return 0;
}
EXPORT int cuDeviceGet(int *device, int index) {
    *device = index + 100; // no index: whoever takes one for the other is found out
    return 0;
}
EXPORT int cuDeviceGetUuid_v2(uint8_t uuid[16], int device) {
    memset(uuid, 0, 16);
    uuid[0] = 0xfa;
    uuid[15] = (uint8_t)(device - 100);
    return 0;
}
EXPORT int cuDeviceGetName(char *name, int bytes, int device) {
    (void)device;
    snprintf(name, (size_t)bytes, "%s", number("mig", 0) ? "Fake GPU MIG 1g.10gb" : "Fake GPU");
    return 0;
}
EXPORT int cuDeviceGetPCIBusId(char *id, int bytes, int device) {
    snprintf(id, (size_t)bytes, "0000:%02X:00.0", device - 100 + 1);
    return 0;
}

// ---- libcupti

EXPORT int cuptiGetVersion(uint32_t *found) {
    *found = version();
    return 0;
}
EXPORT int cuptiGetResultString(int result, const char **text) {
    static __thread char said[64];
    snprintf(said, sizeof said, "FAKE_RESULT_%d", result);
    *text = said;
    return 0;
}
EXPORT int cuptiProfilerInitialize(void *parameters) {
    ENTER(16)
    initialised = 1;
    return 0;
}
EXPORT int cuptiProfilerDeviceSupported(void *parameters) {
    ENTER(version() >= 130100 ? 56u : 52u)
    int32_t *words = (int32_t *)(p + 2);
    if (words[0] < 100 || words[8] != 3) { // a CUdevice; CUPTI_PROFILER_PM_SAMPLING
        return INVALID_PARAMETER;
    }
    uint32_t vgpu = (uint32_t)number("vgpu", 3);
    for (int i = 1; i < 8; i++) {
        words[i] = 3;
    }
    words[4] = (int32_t)vgpu;
    words[1] = vgpu == 3 ? 3 : 1;
    return 0;
}
EXPORT int cuptiDeviceGetChipName(void *parameters) {
    static char chip[32];
    ENTER(32)
    if (!planned("chip", "", chip, sizeof chip)) {
        strcpy(chip, "GH100");
    }
    p[3] = (uint64_t)(uintptr_t)chip;
    return p[2] < number("gpus", 1) ? 0 : INVALID_PARAMETER;
}
EXPORT int cuptiPmSamplingGetCounterAvailability(void *parameters) {
    ENTER(40)
    if (p[4] == 0) {
        p[3] = 9184;
        return 0;
    }
    memset((void *)(uintptr_t)p[4], 7, p[3]);
    return p[3] == 9184 ? 0 : INVALID_PARAMETER;
}
EXPORT int cuptiProfilerHostInitialize(void *parameters) {
    ENTER(version() >= 130200 ? 56u : 48u)
    if (!initialised || (uint32_t)p[2] != 1 || p[3] == 0) {
        return INVALID_PARAMETER;
    }
    p[5] = (uint64_t)(uintptr_t)calloc(1, sizeof(struct host));
    return 0;
}
EXPORT int cuptiProfilerHostDeinitialize(void *parameters) {
    ENTER(24)
    free((void *)(uintptr_t)p[2]);
    return 0;
}

static const char *const KNOWN[] = {
    "gr__cycles_active",
    "sm__cycles_active",
    "sm__pipe_tensor_cycles_active",
    "sm__warps_active",
    "sm__inst_issued",
    "sm__pipe_fma_cycles_active",
    "dram__throughput",
    "dram__read_throughput",
    "dram__write_throughput",
    "dram__bytes_read",
    "dram__bytes_write",
    "pcie__read_bytes",
    "pcie__write_bytes",
    "gpc__cycles_elapsed",
    "lts__t_sectors",
    "sm__inst_executed_pipe_tensor", // of two passes
};

static int is_known(const char *name) {
    static const char triage[] = "TPC.TriageCompute.sm__";
    if (strncmp(name, triage, sizeof triage - 1) == 0) {
        return number("triage", 0) != 0;
    }
    for (size_t i = 0; i < sizeof KNOWN / sizeof *KNOWN; i++) {
        size_t length = strlen(KNOWN[i]);
        if (strncmp(KNOWN[i], name, length) == 0 && (name[length] == '.' || name[length] == '\0')) {
            return 1;
        }
    }
    return 0;
}

EXPORT int cuptiProfilerHostConfigAddMetrics(void *parameters) {
    ENTER(40)
    struct host *host = (void *)(uintptr_t)p[2];
    const char *const *names = (void *)(uintptr_t)p[3];
    for (uint64_t i = 0; i < p[4]; i++) {
        if (!is_known(names[i])) {
            return INVALID_METRIC_NAME;
        }
        snprintf(host->names[host->count++], 128, "%s", names[i]);
    }
    return 0;
}
EXPORT int cuptiProfilerHostGetConfigImageSize(void *parameters) {
    ENTER(32)
    p[3] = 64;
    return 0;
}
EXPORT int cuptiProfilerHostGetConfigImage(void *parameters) {
    ENTER(40)
    struct host *host = (void *)(uintptr_t)p[2];
    uint8_t *image = (void *)(uintptr_t)p[4];
    memset(image, 0x5a, p[3]);
    image[0] = 1;
    for (uint64_t i = 0; i < host->count; i++) {
        // One pass alone; two beside the tensor pipe, as on a GH100.
        int fma = strncmp(host->names[i], "sm__pipe_fma", 12) == 0;
        if (strncmp(host->names[i], "sm__inst_executed_pipe_tensor", 29) == 0 || (fma && host->count > 1)) {
            image[0] = 2;
        }
    }
    return 0;
}
EXPORT int cuptiProfilerHostGetNumOfPasses(void *parameters) {
    ENTER(40)
    p[4] = ((uint8_t *)(uintptr_t)p[3])[0];
    return 0;
}
EXPORT int cuptiProfilerHostGetMetricProperties(void *parameters) {
    ENTER(version() >= 130100 ? 64u : 60u)
    const char *name = (void *)(uintptr_t)p[3];
    if (!is_known(name)) {
        return INVALID_METRIC_NAME;
    }
    p[4] = (uint64_t)(uintptr_t)"a metric of the fake";
    p[5] = (uint64_t)(uintptr_t)"fake";
    p[6] = (uint64_t)(uintptr_t)(strstr(name, "bytes") != NULL ? "byte" : "cycle");
    *(int32_t *)(p + 7) = 0;
    return 0;
}
EXPORT int cuptiProfilerHostGetBaseMetrics(void *parameters) {
    ENTER(48)
    p[4] = (uint64_t)(uintptr_t)KNOWN;
    p[5] = (int32_t)p[3] == 0 ? sizeof KNOWN / sizeof *KNOWN : 0;
    return 0;
}
EXPORT int cuptiProfilerHostEvaluateToGpuValues(void *parameters) {
    ENTER(72)
    struct host *host = (void *)(uintptr_t)p[2];
    struct image *image = (void *)(uintptr_t)p[3];
    double *values = (void *)(uintptr_t)p[8];
    if (p[7] != host->count || p[5] >= image->completed) {
        return wrong(__func__, "index or count");
    }
    for (uint64_t i = 0; i < p[7]; i++) {
        values[i] = (double)(1000 * image->device + 100 * i + image->number[p[5]] % 100);
    }
    return 0;
}
EXPORT int cuptiPmSamplingEnable(void *parameters) {
    ENTER(32)
    if (!initialised || p[2] >= DEVICES_MOST || sampled[p[2]] != NULL) {
        return wrong(__func__, "device or order");
    }
    struct object *object = calloc(1, sizeof *object);
    object->device = p[2];
    object->busy_lock = -1;
    sampled[p[2]] = object;
    p[3] = (uint64_t)(uintptr_t)object;
    return 0;
}

static int taken(struct object *object) {
    char path[400], mine[420];
    if (!planned("busy", "", path, sizeof path)) {
        return 0;
    }
    snprintf(mine, sizeof mine, "%s.%d", path, (int)object->device);
    object->busy_lock = open(mine, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    return flock(object->busy_lock, LOCK_EX | LOCK_NB) != 0;
}

EXPORT int cuptiPmSamplingSetConfig(void *parameters) {
    ENTER(64)
    struct object *object = (void *)(uintptr_t)p[2];
    const int32_t *modes = (int32_t *)(p + 7);
    if (modes[1] != 1 || p[5] < (1u << 20)) {
        return wrong(__func__, "append mode or buffer");
    }
    char by_clock[8];
    if (modes[0] != (planned("chip", "GA100", by_clock, sizeof by_clock) ? 0 : 1)) {
        return wrong(__func__, "trigger mode");
    }
    if (((uint8_t *)(uintptr_t)p[4])[0] != 1) {
        return 27; // several passes
    }
    if (taken(object)) {
        return HARDWARE_BUSY;
    }
    object->config = (void *)(uintptr_t)p[4];
    object->config_bytes = p[3];
    memcpy(object->config_copy, object->config, sizeof object->config_copy);
    object->interval = p[6];
    object->configured = 1;
    return 0;
}
EXPORT int cuptiPmSamplingGetCounterDataSize(void *parameters) {
    ENTER(56)
    uint64_t samples = (uint32_t)p[5];
    if (samples == 0 || samples > 8192) {
        return INVALID_PARAMETER;
    }
    uint64_t bytes = samples * number("sample_bytes", BYTES_A_SAMPLE);
    p[6] = sizeof(struct image) + bytes;
    return 0;
}
EXPORT int cuptiPmSamplingCounterDataImageInitialize(void *parameters) {
    ENTER(40)
    struct image *image = (void *)(uintptr_t)p[4];
    image->capacity = (p[3] - sizeof *image) / number("sample_bytes", BYTES_A_SAMPLE);
    image->completed = 0;
    return 0;
}
EXPORT int cuptiPmSamplingStart(void *parameters) {
    ENTER(24)
    struct object *object = (void *)(uintptr_t)p[2];
    if (!object->configured || object->started) {
        return wrong(__func__, "order");
    }
    object->started = 1;
    object->first_ns = real_ns();
    return 0;
}

// The gap and the adjustment of the plan: from these samples on, all are three intervals later, or so much earlier.
static uint64_t start_of(const struct object *object, uint64_t sample) {
    uint64_t gap = number("gap", 0), adjust = number("adjust", 0);
    return object->first_ns + (sample + (gap != 0 && sample >= gap ? 3 : 0)) * object->interval -
           (adjust != 0 && sample >= adjust ? number("by", 0) : 0);
}

EXPORT int cuptiPmSamplingDecodeData(void *parameters) {
    ENTER(45)
    struct object *object = (void *)(uintptr_t)p[2];
    struct image *image = (void *)(uintptr_t)p[3];
    if (!object->started || image->completed != 0) {
        return wrong(__func__, "order, or an image that is not initialised");
    }
    if (memcmp(object->config, object->config_copy, sizeof object->config_copy) != 0) {
        return wrong(__func__, "the configuration is gone");
    }
    uint64_t until = object->stopped ? object->stop_ns : real_ns();
    uint64_t waiting = 0;
    while (start_of(object, object->decoded + waiting + 1) <= until) {
        waiting += 1;
    }
    if (number("lose", 0) && waiting > 1) {
        object->decoded += waiting / 2;
        waiting -= waiting / 2;
    }
    uint64_t full = number("full", 0), most = full != 0 && full == calls ? waiting / 2 : image->capacity;
    int32_t stop = 0; // OTHER
    uint64_t count = waiting;
    if (waiting > most) {
        count = most;
        stop = 1; // COUNTER_DATA_FULL: the rest is gone
    }
    image->device = object->device;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t sample = object->decoded + i;
        image->first[i] = start_of(object, sample) - (sample == 0 ? 2000000000u : 0); // since an earlier reset
        image->second[i] = start_of(object, sample) + object->interval;
        image->number[i] = sample;
    }
    image->completed = count;
    object->decoded += waiting;
    *(int32_t *)(p + 5) = stop;
    ((uint8_t *)(p + 5))[4] = 0;
    return 0;
}
EXPORT int cuptiPmSamplingGetCounterDataInfo(void *parameters) {
    ENTER(56)
    struct image *image = (void *)(uintptr_t)p[2];
    p[4] = image->capacity;
    p[5] = p[6] = image->completed;
    return 0;
}
EXPORT int cuptiPmSamplingCounterDataGetSampleInfo(void *parameters) {
    ENTER(64)
    struct image *image = (void *)(uintptr_t)p[3];
    if (p[5] >= image->completed) {
        return INVALID_PARAMETER;
    }
    p[6] = image->first[p[5]];
    p[7] = image->second[p[5]];
    return 0;
}
EXPORT int cuptiPmSamplingStop(void *parameters) {
    ENTER(24)
    struct object *object = (void *)(uintptr_t)p[2];
    if (!object->started || object->stopped) {
        return wrong(__func__, "order");
    }
    object->stopped = 1;
    object->stop_ns = real_ns();
    return 0;
}
EXPORT int cuptiPmSamplingDisable(void *parameters) {
    ENTER(24)
    struct object *object = (void *)(uintptr_t)p[2];
    sampled[object->device] = NULL;
    if (object->busy_lock >= 0) {
        close(object->busy_lock);
    }
    free(object);
    return 0;
}
