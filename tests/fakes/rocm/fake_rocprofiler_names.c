/* Names of kinds and operations of the fake rocprofiler-sdk, with the numbers of 1.0.0. */
#include <string.h>

#include "fake_rocprofiler.h"

static const char *const CALLBACK_KINDS[CB_KINDS] = {
    "NONE",
    "HSA_CORE_API",
    "HSA_AMD_EXT_API",
    "HSA_IMAGE_EXT_API",
    "HSA_FINALIZE_EXT_API",
    "HIP_RUNTIME_API",
    "HIP_COMPILER_API",
    "MARKER_CORE_API",
    "MARKER_CONTROL_API",
    "MARKER_NAME_API",
    "CODE_OBJECT",
    "SCRATCH_MEMORY",
    "KERNEL_DISPATCH",
    "MEMORY_COPY",
    "RCCL_API",
    "OMPT",
    "MEMORY_ALLOCATION",
    "RUNTIME_INITIALIZATION",
    "ROCDECODE_API",
    "ROCJPEG_API",
    "HIP_STREAM",
    "MARKER_CORE_RANGE_API",
};

static const char *const BUFFER_KINDS[BUF_KINDS] = {
    "NONE",
    "HSA_CORE_API",
    "HSA_AMD_EXT_API",
    "HSA_IMAGE_EXT_API",
    "HSA_FINALIZE_EXT_API",
    "HIP_RUNTIME_API",
    "HIP_COMPILER_API",
    "MARKER_CORE_API",
    "MARKER_CONTROL_API",
    "MARKER_NAME_API",
    "MEMORY_COPY",
    "KERNEL_DISPATCH",
    "SCRATCH_MEMORY",
    "CORRELATION_ID_RETIREMENT",
    "RCCL_API",
    "OMPT",
    "MEMORY_ALLOCATION",
    "RUNTIME_INITIALIZATION",
};

/* Every function has a name in the real library; those that nobody asks for have one of no meaning here. */
static const char *const HIP_RUNTIME[478] = {
    [66] = "hipDeviceSynchronize",
    [82] = "hipEventSynchronize",
    [81] = "hipEventRecord",
    [84] = "hipExtLaunchKernel",
    [90] = "hipFree",
    [102] = "hipGetDevice",
    [166] = "hipGraphLaunch",
    [208] = "hipKernelNameRef",
    [209] = "hipKernelNameRefByPtr",
    [211] = "hipLaunchCooperativeKernel",
    [214] = "hipLaunchKernel",
    [215] = "hipMalloc",
    [259] = "hipMemcpy",
    [268] = "hipMemcpyAsync",
    [288] = "hipMemset",
    [293] = "hipMemsetAsync",
    [308] = "hipModuleLaunchKernel",
    [310] = "hipModuleLoadData",
    [316] = "hipModuleUnload",
    [327] = "hipSetDevice",
    [334] = "hipStreamCreate",
    [346] = "hipStreamSynchronize",
    [348] = "hipStreamWaitEvent",
    [388] = "hipExtModuleLaunchKernel",
    [419] = "hipLaunchKernel_spt",
    [474] = "hipLaunchKernelExC",
    [475] = "hipDrvLaunchKernelEx",
};
static const char *const HIP_COMPILER[9] = {
    "__hipPopCallConfiguration", "__hipPushCallConfiguration", "__hipRegisterFatBinary",
    "__hipRegisterFunction",     "__hipRegisterManagedVar",    "__hipRegisterSurface",
    "__hipRegisterTexture",      "__hipRegisterVar",           "__hipUnregisterFatBinary",
};
static const char *const HSA_CORE[4] = {
    "hsa_init",
    "hsa_queue_load_write_index_relaxed",
    "hsa_memory_allocate",
    "hsa_signal_wait_scacquire",
};
static const char *const HSA_AMD_EXT[2] = {"hsa_amd_memory_pool_allocate", "hsa_amd_memory_pool_free"};
static const char *const COPIES[5] = {
    "NONE", "HOST_TO_HOST", "HOST_TO_DEVICE", "DEVICE_TO_HOST", "DEVICE_TO_DEVICE",
};
static const char *const ALLOCATIONS[5] = {
    "NONE", "ALLOCATE", "VMEM_ALLOCATE", "FREE", "VMEM_FREE",
};
static const char *const SCRATCH[4] = {"NONE", "ALLOC", "FREE", "ASYNC_RECLAIM"};

static const char *pick(const char *const *names, size_t count, int32_t number, const char *unnamed) {
    if (number < 0 || number >= (int32_t)count) {
        return NULL;
    }
    return names[number] == NULL ? unnamed : names[number];
}

#define PICK(names, number, unnamed) pick(names, sizeof(names) / sizeof *(names), number, unnamed)

const char *sdk_callback_kind_name(int kind) { return PICK(CALLBACK_KINDS, kind - (int)sdk.shifted_kinds, "LATER"); }

const char *sdk_buffer_kind_name(int kind) { return PICK(BUFFER_KINDS, kind - (int)sdk.shifted_kinds, "LATER"); }

const char *sdk_operation_name(bool buffered, int kind, int32_t operation) {
    const char *name = buffered ? sdk_buffer_kind_name(kind) : sdk_callback_kind_name(kind);
    if (name == NULL) {
        return NULL;
    }
    if (strcmp(name, "HIP_RUNTIME_API") == 0) {
        return PICK(HIP_RUNTIME, operation, "hipOther");
    }
    if (strcmp(name, "HIP_COMPILER_API") == 0) {
        return PICK(HIP_COMPILER, operation, NULL);
    }
    if (strcmp(name, "HSA_CORE_API") == 0) {
        return PICK(HSA_CORE, operation, NULL);
    }
    if (strcmp(name, "HSA_AMD_EXT_API") == 0) {
        return PICK(HSA_AMD_EXT, operation, NULL);
    }
    if (strcmp(name, "MEMORY_COPY") == 0) {
        return PICK(COPIES, operation, NULL);
    }
    if (strcmp(name, "MEMORY_ALLOCATION") == 0) {
        return PICK(ALLOCATIONS, operation, NULL);
    }
    return strcmp(name, "SCRATCH_MEMORY") == 0 ? PICK(SCRATCH, operation, NULL) : NULL;
}
