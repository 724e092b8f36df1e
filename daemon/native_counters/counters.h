/* Samples the hardware counters of whole GPUs with CUPTI's PM sampling. Called through ctypes by
 * kinetod.counters.cupti_backend, in the process of kinetod-counters only.
 *
 * Theory of operation
 *     kn_open loads a libcupti and the driver, creates no CUDA context and touches no other process. kn_start configures
 *     one GPU and starts the sampling; kn_run decodes in the calling thread until the ring is told to stop, its longest
 *     duration is over, or CUPTI fails; kn_free gives the counters back. Every GPU has a thread of its own. Setting up and
 *     ending are done by one thread at a time (kn_library.setup): nothing says that CUPTI allows more. Decoding is not.
 *
 *     Rows go into a ring in shared memory (sample_ring.h), whose reader never makes this side wait. What is lost is
 *     counted by the gaps between samples, since CUPTI's own overflow flag stays 0 when samples are lost.
 *
 *     Functions that return int return 0, or -1 with *failure filled in.
 */
#ifndef KINETO_COUNTERS_H
#define KINETO_COUNTERS_H

#include <stddef.h>
#include <stdint.h>

#define KN_ABI_VERSION 1
#define KN_EXPORT __attribute__((visibility("default")))
#define KN_NAME_CHARS 128
#define KN_METRICS_MOST 64u
#define KN_DEVICES_MOST 64u

enum kn_failure_kind {
    KN_LOADING = 1, /* a library is missing, lacks a function or is too old */
    KN_DRIVER = 2,  /* result is a CUresult */
    KN_CUPTI = 3,   /* result is a CUptiResult */
    KN_SYSTEM = 4,  /* result is an errno */
};

typedef struct {
    int32_t kind;
    int32_t result;
    char call[64];
    char text[448];
} kn_failure;

typedef struct kn_library kn_library;
typedef struct kn_session kn_session;

/* cuptiProfilerDeviceSupported's word for PM sampling: 0 unknown, 1 unsupported, 2 disabled, 3 supported. */
typedef struct {
    uint8_t uuid[16];
    char name[KN_NAME_CHARS];
    char pci_bus_id[32];
    char chip[32];        /* "GH100"; empty: CUPTI does not know this chip */
    int32_t availability; /* CUptiResult of asking which counters can be used */
    uint32_t supported;   /* all of the following together */
    uint32_t architecture;
    uint32_t sli;
    uint32_t vgpu;
    uint32_t confidential_compute;
    uint32_t mining;
    uint32_t wsl;
} kn_device;

typedef struct {
    char unit[64]; /* of the values, as CUPTI names it; empty: none */
    char description[512];
    uint32_t type; /* 0 counter, 1 ratio, 2 throughput */
} kn_metric;

typedef struct {
    const char *const *metrics;
    uint64_t interval; /* ns, or cycles of the system clock */
    uint64_t interval_ns;
    uint64_t poll_ns;
    uint64_t hardware_buffer_bytes;
    uint64_t image_bytes_most;
    uint32_t device; /* CUDA's index */
    uint32_t metric_count;
    uint32_t by_clock; /* 1: `interval` is in cycles of the system clock, for chips without a timer */
} kn_request;

KN_EXPORT uint32_t kn_abi_version(void);

/* cuda, cupti: names or paths for dlopen; libnvperf_target.so and libnvperf_host.so are loaded from cupti's folder if they
 * are there. Never closed. NULL on failure. */
KN_EXPORT kn_library *kn_open(const char *cuda, const char *cupti, kn_failure *failure);
KN_EXPORT uint32_t kn_version(const kn_library *library);
KN_EXPORT uint32_t kn_device_count(const kn_library *library);
KN_EXPORT int kn_describe(kn_library *library, uint32_t device, kn_device *found, kn_failure *failure);

/* Properties of a metric, with its submetric or without. */
KN_EXPORT int kn_metric_of(kn_library *library, uint32_t device, const char *name, kn_metric *found,
                           kn_failure *failure);
/* In how many passes these metrics can be measured together. */
KN_EXPORT int kn_passes(kn_library *library, uint32_t device, const char *const *metrics, uint32_t count,
                        uint64_t *passes, kn_failure *failure);
/* The names of base metrics of a type, one a line, ending with a 0. Returns the bytes that they need, which may be more
 * than `bytes`; -1 on failure. */
KN_EXPORT int64_t kn_base_metrics(kn_library *library, uint32_t device, uint32_t type, char *names, size_t bytes,
                                  kn_failure *failure);

struct kn_writer;
/* `writer`: filled in by kn_ring_make for as many metrics; it and its ring must live until kn_free. NULL on failure. */
KN_EXPORT kn_session *kn_start(kn_library *library, const kn_request *request, struct kn_writer *writer,
                               kn_failure *failure);
/* Decodes until the end, which the ring's header tells. */
KN_EXPORT void kn_run(kn_session *session);
KN_EXPORT void kn_free(kn_session *session);

#endif
