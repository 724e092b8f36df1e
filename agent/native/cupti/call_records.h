/* Recording CUDA calls from a subscriber's callbacks. */
#ifndef KINETO_RECORDS_H
#define KINETO_RECORDS_H

#include "cupti/cupti_api.h"

/* Starts recording calls into the collector's stream. */
void records_open(void);
/* Calls that begin or end after this leave no record. */
void records_close(void);

/* The callbacks, on the thread that makes the call. */
void records_enter(uint32_t domain, uint32_t cbid, const struct cupti_call *call);
void records_exit(uint32_t domain, uint32_t cbid, const struct cupti_call *call);

#endif
