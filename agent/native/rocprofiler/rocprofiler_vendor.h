/* AMD's rocprofiler-sdk as a vendor of the collector kit. */
#ifndef KINETO_ROCPROFILER_VENDOR_H
#define KINETO_ROCPROFILER_VENDOR_H

#include "kit/vendor.h"

/* Kinds that are switched on: those of rocprofiler's buffers that rocprofiler_api.h names, those of hip_calls.h, and */
#define ROCPROFILER_ALL_ALLOCATIONS 62u /* HIP's calls that allocate in stream order, too */

/* Spaces of the string table. kineto_trace/decode/rocprofiler/rocm_schema.py has the same. */
#define ROCPROFILER_SPACE_KERNEL 16u    /* kernel id */
#define ROCPROFILER_SPACE_FUNCTION 17u  /* hip_call.function */
#define ROCPROFILER_SPACE_OPERATION 18u /* kind << 32 | operation */

extern const struct kit_vendor rocprofiler_vendor;

#endif
