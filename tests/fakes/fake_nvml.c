// A libnvidia-ml.so.1 with the real ABI for the calls that kinetod makes. What its GPUs do stands in the file
// that FAKE_NVML names, one "key value" a line, read anew at each call:
//   gpus N          how many there are (default 2)
//   init CODE       what nvmlInit answers
//   lost INDEX      this GPU has fallen off the bus
//   old 1           a driver without NVLink counters, energy, ECC, PCIe throughput and events
//   hang 1          nvmlDeviceGetMemoryInfo does not return as long as this stands there
//   crash 1         nvmlDeviceGetMemoryInfo kills the process
//   xid NUMBER      is reported once for GPU 0 each time an event set is made
//   process GPU PID MIB PERCENT
//   energy MJ       what the GPUs have used so far
//   reasons BITS    why their clocks are lower
//   no_power 1      no power, clock, temperature and reason is told
//   hang_reasons INDEX  asking this GPU for the reasons does not return as long as this stands there
//   hang_init 1     nvmlInit does not return as long as this stands there
//   gpm 0           no GPU has GPM
//   gpm_error CODE  what nvmlGpmSampleGet answers
//   gpm_get_error CODE  what nvmlGpmMetricsGet answers
//   mig INDEX       this GPU is in MIG mode
//   counters 1      the GPUs have the UUIDs of those of fake_pm_sampling.c
//   metric ID VALUE the value of a metric of GPM (default: its number)
//   no_metric ID    a metric of GPM that the GPUs do not have
// "alloc" and "free" of GPM's buffers, and each call out of order, are a line in the file $FAKE_NVML.gpm.
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    OK = 0,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT = 7,
    TIMEOUT = 10,
    LOST = 15,
    VERSION_MISMATCH = 25,
    MAX_GPUS = 16
};
typedef int Result;
typedef struct Gpu {
    unsigned index;
} Gpu;
typedef Gpu *Device;
typedef struct {
    char legacy_bus_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} Pci;
typedef struct {
    unsigned long long total, free, used;
} Memory;
typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} MemoryV2;
typedef struct {
    unsigned gpu, memory;
} Utilization;
typedef struct {
    unsigned field, scope;
    long long timestamp, latency_us;
    unsigned value_type;
    Result result;
    union {
        double d;
        unsigned u;
        unsigned long ul;
        unsigned long long ull;
    } value;
} FieldValue;
typedef struct {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
} Process;
typedef struct {
    unsigned pid;
    unsigned long long time_us;
    unsigned sm, memory, encoder, decoder;
} Sample;
typedef struct {
    Device device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} Event;

static Gpu gpus[MAX_GPUS];
static long pending_xid;

// The value of a key; `fallback` if the file does not have it.
static long set(const char *key, long fallback) {
    char line[256], name[64];
    long value, found = fallback;
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "%63s %ld", name, &value) == 2 && strcmp(name, key) == 0) {
            found = value;
        }
    }
    if (file) {
        fclose(file);
    }
    return found;
}

static int processes(unsigned gpu, Process *list, Sample *samples, unsigned room) {
    char line[256];
    unsigned at, pid, mib, percent, count = 0;
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "process %u %u %u %u", &at, &pid, &mib, &percent) == 4 && at == gpu) {
            if (list && count < room) {
                list[count] = (Process){pid, (unsigned long long)mib << 20, ~0u, ~0u};
            }
            if (samples && count < room) {
                samples[count] = (Sample){pid, 1000000ull + count, percent, 1, 0, 0};
            }
            count++;
        }
    }
    if (file) {
        fclose(file);
    }
    return (int)count;
}

// Whether the file has a line "key number" with this number, and the value behind it, if there is one.
static int of_number(const char *key, unsigned number, double *value) {
    char line[256], name[64];
    unsigned at;
    double behind;
    int found = 0;
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    while (file && !found && fgets(line, sizeof line, file)) {
        int fields = sscanf(line, "%63s %u %lf", name, &at, &behind);
        found = fields >= 2 && strcmp(name, key) == 0 && at == number;
        if (found && fields == 3) {
            *value = behind;
        }
    }
    if (file) {
        fclose(file);
    }
    return found;
}

static Result usable(Device device) { return set("lost", -1) == (long)device->index ? LOST : OK; }
static Result powered(Device device) { return set("no_power", 0) ? NOT_SUPPORTED : usable(device); }
static Result newer(Device device) { return set("old", 0) ? NOT_SUPPORTED : usable(device); }

Result nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    for (unsigned i = 0; i < MAX_GPUS; i++) {
        gpus[i].index = i;
    }
    while (set("hang_init", 0)) {
        poll(NULL, 0, 5);
    }
    return (Result)set("init", OK);
}
Result nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(Result result) { return result == LOST ? "GPU is lost" : "an error of the fake"; }
Result nvmlSystemGetDriverVersion(char *version, unsigned size) {
    snprintf(version, size, "580.65.06");
    return OK;
}
Result nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)set("gpus", 2);
    return OK;
}
Result nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
    *device = &gpus[index];
    return OK;
}
Result nvmlDeviceGetIndex(Device device, unsigned *index) {
    *index = device->index;
    return OK;
}
Result nvmlDeviceGetUUID(Device device, char *uuid, unsigned size) {
    snprintf(uuid, size, "GPU-%s-0000-0000-0000-%012u", set("counters", 0) ? "fa000000" : "00000000", device->index);
    return OK;
}
Result nvmlDeviceGetHandleByUUID(const char *uuid, Device *device) {
    for (unsigned i = 0; i < (unsigned)set("gpus", 2); i++) {
        char its[96];
        nvmlDeviceGetUUID(&gpus[i], its, sizeof its);
        if (strcmp(uuid, its) == 0) {
            *device = &gpus[i];
            return usable(*device);
        }
    }
    return NOT_FOUND;
}
Result nvmlDeviceGetName(Device device, char *name, unsigned size) {
    (void)device;
    snprintf(name, size, "NVIDIA H200");
    return OK;
}
Result nvmlDeviceGetMinorNumber(Device device, unsigned *minor) {
    *minor = device->index;
    return OK;
}
Result nvmlDeviceGetPciInfo_v3(Device device, Pci *pci) {
    memset(pci, 0, sizeof *pci);
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", 0x18 + device->index);
    return OK;
}
Result nvmlDeviceGetMemoryInfo(Device device, Memory *memory) {
    while (set("hang", 0)) {
        poll(NULL, 0, 5);
    }
    if (set("crash", 0)) {
        raise(SIGKILL);
    }
    *memory = (Memory){143771ull << 20, 100000ull << 20, 43771ull << 20};
    return usable(device);
}
Result nvmlDeviceGetMemoryInfo_v2(Device device, MemoryV2 *memory) {
    if (set("old", 0)) {
        return NOT_SUPPORTED;
    }
    if (memory->version != (sizeof *memory | 2u << 24)) {
        return VERSION_MISMATCH;
    }
    Memory all;
    Result result = nvmlDeviceGetMemoryInfo(device, &all);
    *memory = (MemoryV2){memory->version, all.total, 671ull << 20, all.free, all.used - (671ull << 20)};
    return result;
}
Result nvmlDeviceGetUtilizationRates(Device device, Utilization *rates) {
    *rates = (Utilization){87 - device->index, 43};
    return usable(device);
}
Result nvmlDeviceGetPowerUsage(Device device, unsigned *milliwatts) {
    *milliwatts = 512345;
    return powered(device);
}
Result nvmlDeviceGetEnforcedPowerLimit(Device device, unsigned *milliwatts) {
    *milliwatts = 700000;
    return powered(device);
}
Result nvmlDeviceGetTotalEnergyConsumption(Device device, unsigned long long *millijoules) {
    *millijoules = (unsigned long long)set("energy", 123456000);
    return set("no_power", 0) ? NOT_SUPPORTED : newer(device);
}
Result nvmlDeviceGetTemperature(Device device, int sensor, unsigned *celsius) {
    (void)sensor;
    *celsius = 61;
    return powered(device);
}
Result nvmlDeviceGetClockInfo(Device device, int clock, unsigned *mhz) {
    *mhz = clock == 2 ? 3201 : 1980;
    return powered(device);
}
Result nvmlDeviceGetMaxClockInfo(Device device, int clock, unsigned *mhz) {
    *mhz = clock == 2 ? 3201 : 2040;
    return powered(device);
}
Result nvmlDeviceGetCurrentClocksThrottleReasons(Device device, unsigned long long *reasons) {
    while (set("hang_reasons", -1) == (long)device->index) {
        poll(NULL, 0, 5);
    }
    *reasons = (unsigned long long)set("reasons", 0);
    return powered(device);
}
Result nvmlDeviceGetCurrentClocksEventReasons(Device device, unsigned long long *reasons) {
    return set("old", 0) ? NOT_SUPPORTED : nvmlDeviceGetCurrentClocksThrottleReasons(device, reasons);
}
Result nvmlDeviceGetPcieThroughput(Device device, int counter, unsigned *kib_per_s) {
    *kib_per_s = counter == 0 ? 1000 : 2000;
    return newer(device);
}
Result nvmlDeviceGetFieldValues(Device device, int count, FieldValue *values) {
    for (int i = 0; i < count; i++) {
        int memory_temperature = values[i].field == 82;
        int nvlink = (values[i].field == 138 || values[i].field == 139) && values[i].scope == 0xFFFFFFFFu;
        int power = values[i].field == 186 && !set("no_power", 0); // at the moment
        values[i].result = memory_temperature || ((nvlink || power) && !set("old", 0)) ? OK : NOT_SUPPORTED;
        values[i].value_type = memory_temperature || power ? 1 : 3;
        if (memory_temperature || power) {
            values[i].value.u = power ? 498000 + device->index : 70;
        } else {
            values[i].value.ull = values[i].field == 138 ? 5000 : 6000;
        }
    }
    return usable(device);
}
Result nvmlDeviceGetTotalEccErrors(Device device, int type, int since, unsigned long long *count) {
    (void)since;
    *count = type == 0 ? 3 : 1;
    return newer(device);
}
Result nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *count, Process *list) {
    unsigned there = (unsigned)processes(device->index, NULL, NULL, 0), room = *count;
    *count = there;
    if (usable(device)) {
        return usable(device);
    }
    if (there > (list ? room : 0)) {
        return INSUFFICIENT;
    }
    processes(device->index, list, NULL, room);
    return OK;
}
Result nvmlDeviceGetGraphicsRunningProcesses_v3(Device device, unsigned *count, Process *list) {
    (void)list;
    *count = 0;
    return usable(device);
}
Result nvmlDeviceGetProcessUtilization(Device device, Sample *samples, unsigned *count, unsigned long long since) {
    unsigned there = (unsigned)processes(device->index, NULL, NULL, 0), room = *count;
    (void)since;
    *count = there;
    if (!samples || room < there) {
        return INSUFFICIENT;
    }
    processes(device->index, NULL, samples, room);
    return OK;
}
Result nvmlEventSetCreate(void **events) {
    pending_xid = set("xid", 0);
    *events = &pending_xid;
    return set("old", 0) ? NOT_SUPPORTED : OK;
}
Result nvmlEventSetFree(void *events) {
    (void)events;
    return OK;
}
Result nvmlDeviceRegisterEvents(Device device, unsigned long long types, void *events) {
    (void)types, (void)events;
    return newer(device);
}
Result nvmlEventSetWait_v2(void *events, Event *event, unsigned timeout_ms) {
    (void)events, (void)timeout_ms;
    if (!pending_xid) {
        return TIMEOUT;
    }
    *event = (Event){&gpus[0], 8, (unsigned long long)pending_xid, ~0u, ~0u};
    pending_xid = 0;
    return OK;
}

// ---------------------------------------------------------------- GPM

typedef struct GpmSample {
    int alive, filled;
    unsigned gpu;
    unsigned long long number;
} *GpmSample;
typedef struct {
    unsigned version, supported;
} GpmSupport;
typedef struct {
    unsigned id;
    Result result;
    double value;
    char *short_name, *long_name, *unit;
} GpmMetric;
typedef struct {
    unsigned version, count;
    GpmSample first, second;
    GpmMetric metrics[]; // as many as the header knows; the driver reads `count` of them
} GpmMetricsGet;

static unsigned long long gpm_samples;

static void gpm_log(const char *what) {
    char path[4096];
    const char *base = getenv("FAKE_NVML");
    snprintf(path, sizeof path, "%s.gpm", base ? base : "fake-nvml");
    FILE *file = fopen(path, "a");
    if (file) {
        fprintf(file, "%s\n", what);
        fclose(file);
    }
}
static Result gpm_wrong(const char *what) {
    gpm_log(what);
    return INVALID_ARGUMENT;
}

Result nvmlDeviceGetMigMode(Device device, unsigned *current, unsigned *pending) {
    *current = *pending = set("mig", -1) == (long)device->index;
    return newer(device);
}
Result nvmlGpmQueryDeviceSupport(Device device, GpmSupport *support) {
    if (support->version != 1) {
        return VERSION_MISMATCH;
    }
    support->supported = set("gpm", 1) != 0;
    return newer(device);
}
Result nvmlGpmSampleAlloc(GpmSample *sample) {
    gpm_log("alloc");
    *sample = calloc(1, sizeof **sample);
    (*sample)->alive = 1;
    return OK;
}
Result nvmlGpmSampleFree(GpmSample sample) {
    if (!sample || !sample->alive) {
        return gpm_wrong("freed what is no buffer");
    }
    gpm_log("free");
    sample->alive = 0; // the memory stays, so that a later use can be told
    return OK;
}
Result nvmlGpmSampleGet(Device device, GpmSample sample) {
    if (!sample || !sample->alive) {
        return gpm_wrong("sampled into what is no buffer");
    }
    if (set("mig", -1) == (long)device->index) {
        return gpm_wrong("sampled a GPU in MIG mode as a whole");
    }
    if (set("gpm_error", OK)) {
        return (Result)set("gpm_error", OK);
    }
    *sample = (struct GpmSample){1, 1, device->index, ++gpm_samples};
    return newer(device);
}
Result nvmlGpmMetricsGet(GpmMetricsGet *get) {
    if (get->version != 1) {
        return VERSION_MISMATCH;
    }
    GpmSample first = get->first, second = get->second;
    if (!first || !second || !first->filled || !second->filled || first->number >= second->number) {
        return gpm_wrong("compared what are no two samples in order");
    }
    if (first->gpu != second->gpu) {
        return gpm_wrong("compared samples of two GPUs");
    }
    if (set("gpm_get_error", OK)) {
        return (Result)set("gpm_get_error", OK);
    }
    for (unsigned i = 0; i < get->count; i++) {
        GpmMetric *metric = &get->metrics[i];
        metric->value = metric->id;
        metric->result = of_number("no_metric", metric->id, &metric->value) ? NOT_SUPPORTED : OK;
        of_number("metric", metric->id, &metric->value);
        metric->short_name = metric->long_name = metric->unit = NULL;
    }
    return OK;
}
