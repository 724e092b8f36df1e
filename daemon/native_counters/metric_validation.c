/* What CUPTI's host side knows of metrics: names, units, passes. Nothing here touches a GPU. Run by the threads of
 * kinetod-counters; blocks in the lock `setup` while another thread configures. */
#define _GNU_SOURCE
#include "cupti_library.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int kn_host_open(struct kn_library *library, uint32_t device, const char *const *metrics, uint32_t count, void **host,
                 kn_failure *failure) {
    *host = NULL;
    if (device >= library->device_count || library->gpus[device].chip[0] == '\0') {
        return kn_fail(failure, KN_SYSTEM, EINVAL, "cuptiDeviceGetChipName",
                       "CUPTI does not know the chip of this GPU");
    }
    struct host_parameters begin = {
        .bytes = library->host_bytes,
        .type = PROFILER_TYPE_PM_SAMPLING,
        .chip = library->gpus[device].chip,
        .availability = library->gpus[device].image,
    };
    int result = library->cuptiProfilerHostInitialize(&begin);
    if (result != CUPTI_OK) {
        return kn_fail_cupti(library, failure, result, "cuptiProfilerHostInitialize");
    }
    *host = begin.host;
    if (count == 0) {
        return 0;
    }
    struct add_parameters add = {.bytes = sizeof add, .host = *host, .names = metrics, .count = count};
    result = library->cuptiProfilerHostConfigAddMetrics(&add);
    return result == CUPTI_OK ? 0 : kn_fail_cupti(library, failure, result, "cuptiProfilerHostConfigAddMetrics");
}

void kn_host_close(struct kn_library *library, void *host) {
    if (host != NULL) {
        struct object_parameters end = {.bytes = sizeof end, .object = host};
        library->cuptiProfilerHostDeinitialize(&end);
    }
}

int kn_configuration(struct kn_library *library, void *host, uint8_t **image, size_t *bytes, uint64_t *passes,
                     kn_failure *failure) {
    *image = NULL;
    struct image_size_parameters size = {.bytes = sizeof size, .host = host};
    int result = library->cuptiProfilerHostGetConfigImageSize(&size);
    if (result != CUPTI_OK) {
        return kn_fail_cupti(library, failure, result, "cuptiProfilerHostGetConfigImageSize");
    }
    *bytes = size.image_bytes;
    if ((*image = calloc(1, size.image_bytes > 0 ? size.image_bytes : 1)) == NULL) {
        return kn_fail(failure, KN_SYSTEM, ENOMEM, "calloc", strerror(ENOMEM));
    }
    struct image_parameters get = {.bytes = sizeof get, .host = host, .image_bytes = *bytes, .image = *image};
    if ((result = library->cuptiProfilerHostGetConfigImage(&get)) != CUPTI_OK) {
        return kn_fail_cupti(library, failure, result, "cuptiProfilerHostGetConfigImage");
    }
    struct passes_parameters count = {.bytes = sizeof count, .image_bytes = *bytes, .image = *image};
    if ((result = library->cuptiProfilerHostGetNumOfPasses(&count)) != CUPTI_OK) {
        return kn_fail_cupti(library, failure, result, "cuptiProfilerHostGetNumOfPasses");
    }
    *passes = count.passes;
    return 0;
}

int kn_passes(kn_library *library, uint32_t device, const char *const *metrics, uint32_t count, uint64_t *passes,
              kn_failure *failure) {
    void *host;
    uint8_t *image = NULL;
    size_t bytes;
    pthread_mutex_lock(&library->setup);
    int failed = kn_host_open(library, device, metrics, count, &host, failure) ||
                 kn_configuration(library, host, &image, &bytes, passes, failure);
    kn_host_close(library, host);
    pthread_mutex_unlock(&library->setup);
    free(image);
    return failed ? -1 : 0;
}

static int properties_of(kn_library *library, void *host, const char *name, kn_metric *found, kn_failure *failure) {
    struct properties_parameters asked = {.bytes = library->properties_bytes, .host = host, .name = name};
    int result = library->cuptiProfilerHostGetMetricProperties(&asked);
    if (result != CUPTI_OK) {
        return kn_fail_cupti(library, failure, result, "cuptiProfilerHostGetMetricProperties");
    }
    snprintf(found->unit, sizeof found->unit, "%s", asked.unit != NULL ? asked.unit : "");
    snprintf(found->description, sizeof found->description, "%s", asked.description != NULL ? asked.description : "");
    found->type = (uint32_t)asked.type;
    return 0;
}

int kn_metric_of(kn_library *library, uint32_t device, const char *name, kn_metric *found, kn_failure *failure) {
    memset(found, 0, sizeof *found);
    void *host;
    pthread_mutex_lock(&library->setup);
    int failed = kn_host_open(library, device, NULL, 0, &host, failure) ||
                 properties_of(library, host, name, found, failure);
    kn_host_close(library, host);
    pthread_mutex_unlock(&library->setup);
    return failed ? -1 : 0;
}

/* Copies what fits, and returns what all of it needs. */
static int64_t joined(const struct base_parameters *listed, char *names, size_t bytes) {
    size_t used = 0;
    for (size_t i = 0; i < listed->count; i++) {
        size_t length = strlen(listed->names[i]);
        if (used + length + 2 <= bytes) {
            memcpy(names + used, listed->names[i], length);
            names[used + length] = '\n';
            names[used + length + 1] = '\0';
        }
        used += length + 1;
    }
    return (int64_t)used + 1;
}

int64_t kn_base_metrics(kn_library *library, uint32_t device, uint32_t type, char *names, size_t bytes,
                        kn_failure *failure) {
    int64_t needed = -1;
    void *host;
    if (bytes > 0) {
        names[0] = '\0';
    }
    pthread_mutex_lock(&library->setup);
    if (kn_host_open(library, device, NULL, 0, &host, failure) == 0) {
        struct base_parameters listed = {.bytes = sizeof listed, .host = host, .type = (int32_t)type};
        int result = library->cuptiProfilerHostGetBaseMetrics(&listed);
        if (result == CUPTI_OK) {
            needed = joined(&listed, names, bytes);
        } else {
            kn_fail_cupti(library, failure, result, "cuptiProfilerHostGetBaseMetrics");
        }
    }
    kn_host_close(library, host);
    pthread_mutex_unlock(&library->setup);
    return needed;
}
