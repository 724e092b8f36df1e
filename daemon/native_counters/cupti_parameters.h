/* Parameters of CUPTI's functions for PM sampling, laid out as the public headers of CUPTI 12.8 to 13.5 declare them; the
 * vendor's names are in the comments. `bytes` (structSize) is the offset of the last field plus its size, without
 * padding, and two structures have grown: struct_bytes in cupti_library.c knows when.
 */
#ifndef KINETO_CUPTI_PARAMETERS_H
#define KINETO_CUPTI_PARAMETERS_H

#include <stddef.h>
#include <stdint.h>

enum { CUPTI_OK = 0, CUPTI_OUT_OF_MEMORY = 8 };
enum { PROFILER_TYPE_PM_SAMPLING = 1, PROFILER_API_PM_SAMPLING = 3 };
enum { TRIGGER_BY_CLOCK = 0, TRIGGER_BY_TIME = 1 };
enum { KEEP_LATEST = 1 };
enum { STOP_OTHER = 0, STOP_COUNTER_DATA_FULL = 1, STOP_END_OF_RECORDS = 2 };

/* CUpti_Profiler_Initialize_Params */
struct initialize_parameters {
    size_t bytes;
    void *private;
};
/* CUpti_Profiler_DeviceSupported_Params; sku since 13.1 */
struct supported_parameters {
    size_t bytes;
    void *private;
    int32_t device; /* a CUdevice */
    uint32_t supported, architecture, sli, vgpu, confidential_compute, mining, wsl;
    uint32_t api;
    uint32_t sku;
};
/* CUpti_Device_GetChipName_Params */
struct chip_parameters {
    size_t bytes;
    void *private;
    size_t device;
    const char *name;
};
/* CUpti_PmSampling_GetCounterAvailability_Params */
struct availability_parameters {
    size_t bytes;
    void *private;
    size_t device;
    size_t image_bytes;
    uint8_t *image;
};
/* CUpti_Profiler_Host_Initialize_Params; pSinglePassMetricSetName since 13.2 */
struct host_parameters {
    size_t bytes;
    void *private;
    int32_t type;
    const char *chip;
    const uint8_t *availability;
    void *host; /* out */
    const char *set;
};
/* CUpti_Profiler_Host_Deinitialize_Params, and the parameters of Start, Stop and Disable */
struct object_parameters {
    size_t bytes;
    void *private;
    void *object;
};
/* CUpti_Profiler_Host_ConfigAddMetrics_Params */
struct add_parameters {
    size_t bytes;
    void *private;
    void *host;
    const char *const *names;
    size_t count;
};
/* CUpti_Profiler_Host_GetConfigImageSize_Params, CUpti_Profiler_Host_GetConfigImage_Params */
struct image_size_parameters {
    size_t bytes;
    void *private;
    void *host;
    size_t image_bytes;
};
struct image_parameters {
    size_t bytes;
    void *private;
    void *host;
    size_t image_bytes;
    uint8_t *image;
};
/* CUpti_Profiler_Host_GetNumOfPasses_Params */
struct passes_parameters {
    size_t bytes;
    void *private;
    size_t image_bytes;
    uint8_t *image;
    size_t passes;
};
/* CUpti_Profiler_Host_GetMetricProperties_Params; metricCollectionScope since 13.1 */
struct properties_parameters {
    size_t bytes;
    void *private;
    void *host;
    const char *name;
    const char *description, *hardware_unit, *unit;
    int32_t type;
    int32_t scope;
};
/* CUpti_Profiler_Host_GetBaseMetrics_Params */
struct base_parameters {
    size_t bytes;
    void *private;
    void *host;
    int32_t type;
    const char **names;
    size_t count;
};
/* CUpti_Profiler_Host_EvaluateToGpuValues_Params */
struct evaluate_parameters {
    size_t bytes;
    void *private;
    void *host;
    const uint8_t *image;
    size_t image_bytes;
    size_t index;
    const char *const *names;
    size_t count;
    double *values;
};
/* CUpti_PmSampling_Enable_Params */
struct enable_parameters {
    size_t bytes;
    void *private;
    size_t device;
    void *object; /* out */
};
/* CUpti_PmSampling_SetConfig_Params */
struct config_parameters {
    size_t bytes;
    void *private;
    void *object;
    size_t config_bytes;
    const uint8_t *config;
    size_t buffer_bytes;
    uint64_t interval;
    int32_t trigger;
    int32_t append;
};
/* CUpti_PmSampling_GetCounterDataSize_Params */
struct data_size_parameters {
    size_t bytes;
    void *private;
    void *object;
    const char *const *names;
    size_t count;
    uint32_t samples;
    size_t image_bytes; /* out */
};
/* CUpti_PmSampling_CounterDataImage_Initialize_Params */
struct image_init_parameters {
    size_t bytes;
    void *private;
    void *object;
    size_t image_bytes;
    uint8_t *image;
};
/* CUpti_PmSampling_DecodeData_Params */
struct decode_parameters {
    size_t bytes;
    void *private;
    void *object;
    uint8_t *image;
    size_t image_bytes;
    int32_t stop_reason;
    uint8_t overflow;
};
/* CUpti_PmSampling_GetCounterDataInfo_Params */
struct data_info_parameters {
    size_t bytes;
    void *private;
    const uint8_t *image;
    size_t image_bytes;
    size_t total, populated, completed;
};
/* CUpti_PmSampling_CounterData_GetSampleInfo_Params */
struct sample_info_parameters {
    size_t bytes;
    void *private;
    void *object;
    const uint8_t *image;
    size_t image_bytes;
    size_t index;
    uint64_t start, end;
};

#define STRUCT_BYTES(type, last) (offsetof(struct type, last) + sizeof(((struct type *)0)->last))

#endif
