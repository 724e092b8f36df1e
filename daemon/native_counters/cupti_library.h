/* A loaded libcupti: its functions, and the sizes of structures that it expects. */
#ifndef KINETO_CUPTI_LIBRARY_H
#define KINETO_CUPTI_LIBRARY_H

#include <pthread.h>

#include "counters.h"
#include "cupti_parameters.h"

#define CUPTI_FUNCTIONS(X)                       \
    X(cuptiProfilerInitialize)                   \
    X(cuptiProfilerDeviceSupported)              \
    X(cuptiDeviceGetChipName)                    \
    X(cuptiPmSamplingGetCounterAvailability)     \
    X(cuptiProfilerHostInitialize)               \
    X(cuptiProfilerHostDeinitialize)             \
    X(cuptiProfilerHostConfigAddMetrics)         \
    X(cuptiProfilerHostGetConfigImageSize)       \
    X(cuptiProfilerHostGetConfigImage)           \
    X(cuptiProfilerHostGetNumOfPasses)           \
    X(cuptiProfilerHostGetMetricProperties)      \
    X(cuptiProfilerHostGetBaseMetrics)           \
    X(cuptiProfilerHostEvaluateToGpuValues)      \
    X(cuptiPmSamplingEnable)                     \
    X(cuptiPmSamplingSetConfig)                  \
    X(cuptiPmSamplingGetCounterDataSize)         \
    X(cuptiPmSamplingCounterDataImageInitialize) \
    X(cuptiPmSamplingStart)                      \
    X(cuptiPmSamplingDecodeData)                 \
    X(cuptiPmSamplingGetCounterDataInfo)         \
    X(cuptiPmSamplingCounterDataGetSampleInfo)   \
    X(cuptiPmSamplingStop)                       \
    X(cuptiPmSamplingDisable)

typedef int (*cupti_function)(void *parameters);

struct gpu {
    int32_t handle; /* CUdevice */
    char chip[32];
    int32_t availability; /* CUptiResult; the image is there if it is 0 */
    uint8_t *image;
};

struct kn_library {
#define MEMBER(name) cupti_function name;
    CUPTI_FUNCTIONS(MEMBER)
#undef MEMBER
    int (*cuptiGetResultString)(int result, const char **text);
    int (*cuDeviceGetName)(char *name, int bytes, int device);
    int (*cuDeviceGetUuid)(uint8_t uuid[16], int device);
    int (*cuDeviceGetPCIBusId)(char *id, int bytes, int device);
    uint32_t version;
    size_t host_bytes, properties_bytes, supported_bytes; /* of structures that have grown */
    pthread_mutex_t setup;
    uint32_t device_count;
    struct gpu gpus[KN_DEVICES_MOST];
};

/* Fills in *failure and returns -1. */
int kn_fail(kn_failure *failure, int32_t kind, int32_t result, const char *call, const char *text);
int kn_fail_cupti(const struct kn_library *library, kn_failure *failure, int result, const char *call);

/* A host object with these metrics, of a GPU whose chip is known. The caller has the lock `setup`. */
int kn_host_open(struct kn_library *library, uint32_t device, const char *const *metrics, uint32_t count, void **host,
                 kn_failure *failure);
void kn_host_close(struct kn_library *library, void *host);
/* The configuration of a host object's metrics, to be freed by the caller, and its passes. */
int kn_configuration(struct kn_library *library, void *host, uint8_t **image, size_t *bytes, uint64_t *passes,
                     kn_failure *failure);

#endif
