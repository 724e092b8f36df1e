/* AMD's rocprofiler-sdk as a vendor of the collector kit. */
#ifndef KINETO_ROCPROFILER_VENDOR_H
#define KINETO_ROCPROFILER_VENDOR_H

#include "kit/vendor.h"

/* Kinds that can be switched on: the buffer kinds of rocprofiler_api.h, those of hip_calls.h, and */
#define ROCPROFILER_ALL_ALLOCATIONS 62u /* HIP's calls that allocate in stream order, too */

/* Spaces of the string table, as in kineto_trace/decode/rocprofiler_records.py. */
#define ROCPROFILER_SPACE_KERNEL 16u    /* kernel id */
#define ROCPROFILER_SPACE_FUNCTION 17u  /* hip_call.function */
#define ROCPROFILER_SPACE_OPERATION 18u /* kind << 32 | operation */

extern const struct kit_vendor rocprofiler_vendor;

#endif
