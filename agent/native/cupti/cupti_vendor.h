/* CUPTI as a vendor of the kit: the state of one recording. */
#ifndef KINETO_CUPTI_VENDOR_H
#define KINETO_CUPTI_VENDOR_H

#include <stdbool.h>

#include "cupti/activity_kinds.h"
#include "cupti/call_filter.h"
#include "cupti/cupti_api.h"
#include "kit/collector.h"

struct cupti_recording {
    struct cupti_api api;
    struct calls calls;
    struct kinds kinds;
    bool graphs_watched; /* the subscriber reports graph launches */
};

extern struct cupti_recording cupti;
extern struct kit_collector cupti_collector;

/* The buffer callbacks that CUPTI gets. */
void cupti_buffer_requested(uint8_t **buffer, size_t *size, size_t *max_records);
void cupti_buffer_completed(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid);

#endif
