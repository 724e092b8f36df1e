// What a training on an Intel GPU does, as a library that Python loads (level_zero_app.py): kernels, copies and fills on
// immediate command lists, one list and one event for each thread, and a wait after each step.
#include <level_zero/ze_api.h>
#include <stdint.h>
#include <string.h>

#define LISTS_MOST 16u
#define KERNELS 3u
#define BATCH_BYTES (1u << 20)

static const char *const kernel_names[KERNELS] = {
    "gemm_kernel<float, 128>(float const*, float const*, float*)",
    "at::native::xpu::softmax_forward",
    "layer_norm",
};

static struct {
    ze_context_handle_t context;
    ze_device_handle_t devices[4];
    uint32_t device_count;
    ze_kernel_handle_t kernels[KERNELS];
    ze_event_pool_handle_t pool;
    ze_command_list_handle_t lists[LISTS_MOST];
    ze_event_handle_t events[LISTS_MOST];
    void *host, *on_device[4];
} self;

#define TRY(call)                          \
    do {                                   \
        const ze_result_t result = (call); \
        if (result != ZE_RESULT_SUCCESS) { \
            return (int)result;            \
        }                                  \
    } while (0)

static int make_kernels(void) {
    const ze_module_desc_t how = {.stype = ZE_STRUCTURE_TYPE_MODULE_DESC};
    ze_module_handle_t module;
    TRY(zeModuleCreate(self.context, self.devices[0], &how, &module, NULL));
    for (uint32_t i = 0; i < KERNELS; i++) {
        const ze_kernel_desc_t kernel = {.stype = ZE_STRUCTURE_TYPE_KERNEL_DESC, .pKernelName = kernel_names[i]};
        TRY(zeKernelCreate(module, &kernel, &self.kernels[i]));
    }
    return 0;
}

static int make_memory(void) {
    const ze_host_mem_alloc_desc_t host = {.stype = ZE_STRUCTURE_TYPE_HOST_MEM_ALLOC_DESC};
    const ze_device_mem_alloc_desc_t device = {.stype = ZE_STRUCTURE_TYPE_DEVICE_MEM_ALLOC_DESC};
    TRY(zeMemAllocHost(self.context, &host, BATCH_BYTES, 64, &self.host));
    for (uint32_t i = 0; i < self.device_count; i++) {
        TRY(zeMemAllocDevice(self.context, &device, BATCH_BYTES, 64, self.devices[i], &self.on_device[i]));
    }
    return 0;
}

// 0, or what Level Zero answered. Lists are spread over the devices.
int program_begin(uint32_t lists) {
    const ze_context_desc_t context = {.stype = ZE_STRUCTURE_TYPE_CONTEXT_DESC};
    const ze_event_pool_desc_t pool = {
        .stype = ZE_STRUCTURE_TYPE_EVENT_POOL_DESC, .flags = ZE_EVENT_POOL_FLAG_HOST_VISIBLE, .count = LISTS_MOST};
    uint32_t one = 1;
    ze_driver_handle_t driver;
    TRY(zeInit(ZE_INIT_FLAG_GPU_ONLY));
    TRY(zeDriverGet(&one, &driver));
    self.device_count = 4;
    TRY(zeDeviceGet(driver, &self.device_count, self.devices));
    TRY(zeContextCreate(driver, &context, &self.context));
    TRY(zeEventPoolCreate(self.context, &pool, 0, NULL, &self.pool));
    for (uint32_t i = 0; i < lists && i < LISTS_MOST && self.device_count > 0; i++) {
        const ze_command_queue_desc_t queue = {.stype = ZE_STRUCTURE_TYPE_COMMAND_QUEUE_DESC};
        const ze_event_desc_t event = {.stype = ZE_STRUCTURE_TYPE_EVENT_DESC, .index = i};
        TRY(zeCommandListCreateImmediate(self.context, self.devices[i % self.device_count], &queue, &self.lists[i]));
        TRY(zeEventCreate(self.pool, &event, &self.events[i]));
    }
    if (self.device_count == 0) {
        return 0;
    }
    const int code = make_kernels();
    return code != 0 ? code : make_memory();
}

static int wait_for(uint32_t list) {
    TRY(zeEventHostSynchronize(self.events[list], UINT64_MAX));
    TRY(zeEventHostReset(self.events[list]));
    return 0;
}

// So many kernels on one list, one after the other.
int program_launch(uint32_t list, uint64_t count) {
    const ze_group_count_t groups = {16, 1, 1};
    for (uint64_t i = 0; i < count; i++) {
        ze_kernel_handle_t kernel = self.kernels[i % KERNELS];
        TRY(zeCommandListAppendLaunchKernel(self.lists[list], kernel, &groups, self.events[list], 0, NULL));
        const int code = wait_for(list);
        if (code != 0) {
            return code;
        }
    }
    return 0;
}

// So many steps of a training on one list: a batch is copied, kernels run, gradients are cleared, the loss comes back.
int program_steps(uint32_t list, uint64_t steps, uint64_t kernels) {
    const uint32_t device = list % self.device_count;
    const uint32_t zero = 0;
    for (uint64_t step = 0; step < steps; step++) {
        TRY(zeCommandListAppendMemoryCopy(self.lists[list], self.on_device[device], self.host, BATCH_BYTES,
                                          self.events[list], 0, NULL));
        int code = wait_for(list);
        code = code != 0 ? code : program_launch(list, kernels);
        if (code != 0) {
            return code;
        }
        TRY(zeCommandListAppendMemoryFill(self.lists[list], self.on_device[device], &zero, sizeof zero, BATCH_BYTES / 2,
                                          self.events[list], 0, NULL));
        code = wait_for(list);
        if (code != 0) {
            return code;
        }
        TRY(zeCommandListAppendMemoryCopy(self.lists[list], self.host, self.on_device[device], sizeof zero,
                                          self.events[list], 0, NULL));
        code = wait_for(list);
        if (code != 0) {
            return code;
        }
    }
    return 0;
}

// A copy from the first GPU's memory to the second's. -1: there is no second one.
int program_copy_between(uint32_t list) {
    if (self.device_count < 2) {
        return -1;
    }
    TRY(zeCommandListAppendMemoryCopy(self.lists[list], self.on_device[1], self.on_device[0], BATCH_BYTES,
                                      self.events[list], 0, NULL));
    return wait_for(list);
}
