// Level Zero's Sysman over GPUs that do not exist, with the public headers' structures. Built in two ways: as
// libze_loader.so.1 itself, or as a driver library that the real loader loads (ZE_ENABLE_ALT_DRIVERS), together with
// fake_driver.c and empty_tables.c. What its GPUs do stands in the file that FAKE_SYSMAN names, one "key value" a line,
// read anew at each call:
//   gpus N          how many there are (default 2)
//   init CODE       what zesInit answers
//   lost INDEX      this GPU is lost
//   poor 1          no power domain of the card, no engine groups but those of tiles, no PCIe counters, no sensors
//   hang 1          zesMemoryGetState does not return as long as this stands there
// Engines are busy for a quarter of the time (tiles: an eighth and a half), 300 W are drawn, and 3 GB/s are received.
#include <level_zero/ze_api.h>
#include <level_zero/zes_api.h>
#include <level_zero/zes_ddi.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef AS_DRIVER
#include "tables.h"
#endif

enum { MAX_GPUS = 16, PARTS = 4, GIB = 1 << 30 };
// The handle of a GPU or of one of its parts is the address of such a word; a loader may read the first word behind it.
typedef struct {
    void *none[8];
    uint32_t gpu, part;
} Thing;
static Thing driver, things[MAX_GPUS][1 + PARTS];

static long said(const char *key, long otherwise) {
    const char *path = getenv("FAKE_SYSMAN");
    FILE *file = path ? fopen(path, "r") : NULL;
    char word[64];
    long value, found = otherwise;
    while (file && fscanf(file, "%63s %ld", word, &value) == 2) {
        if (strcmp(word, key) == 0) {
            found = value;
        }
    }
    if (file) {
        fclose(file);
    }
    return found;
}

static uint64_t now_us(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000 + (uint64_t)time.tv_nsec / 1000;
}

static Thing *thing(uint32_t gpu, uint32_t part) {
    Thing *found = &things[gpu][part];
    found->gpu = gpu;
    found->part = part;
    return found;
}

static ze_result_t list(uint32_t gpu, uint32_t there, uint32_t *count, void **handles) {
    if (handles != NULL) {
        for (uint32_t i = 0; i < *count && i < there; i++) {
            handles[i] = thing(gpu, i + 1);
        }
    }
    if (*count == 0 || *count > there) {
        *count = there;
    }
    return ZE_RESULT_SUCCESS;
}

static Thing *of(void *handle) { return handle; }

static int is_lost(void *handle) { return said("lost", -1) == (long)of(handle)->gpu; }

#define ALIVE(handle)    \
    if (is_lost(handle)) \
    return ZE_RESULT_ERROR_DEVICE_LOST

#define API __attribute__((visibility("default"))) ze_result_t

API zesInit(zes_init_flags_t flags) {
    (void)flags;
    return (ze_result_t)said("init", 0);
}

API zesDriverGet(uint32_t *count, zes_driver_handle_t *drivers) {
    if (drivers != NULL && *count > 0) {
        drivers[0] = (zes_driver_handle_t)&driver;
    }
    *count = 1;
    return ZE_RESULT_SUCCESS;
}

API zesDeviceGet(zes_driver_handle_t asked, uint32_t *count, zes_device_handle_t *devices) {
    (void)asked;
    uint32_t there = (uint32_t)said("gpus", 2);
    for (uint32_t i = 0; devices != NULL && i < *count && i < there; i++) {
        devices[i] = (void *)thing(i, 0);
    }
    if (*count == 0 || *count > there) {
        *count = there;
    }
    return ZE_RESULT_SUCCESS;
}

API zesDeviceGetProperties(zes_device_handle_t device, zes_device_properties_t *properties) {
    if (properties->stype != ZES_STRUCTURE_TYPE_DEVICE_PROPERTIES) {
        return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    }
    properties->core.type = ZE_DEVICE_TYPE_GPU;
    properties->core.vendorId = 0x8086;
    properties->core.deviceId = 0x0bd5;
    memset(properties->core.uuid.id, 0xa0 + (int)of(device)->gpu, sizeof properties->core.uuid.id);
    strcpy(properties->core.name, "Intel(R) Data Center GPU Max 1550");
    strcpy(properties->driverVersion, "1.6.33578");
    properties->numSubdevices = 2;
    return ZE_RESULT_SUCCESS;
}

API zesDevicePciGetProperties(zes_device_handle_t device, zes_pci_properties_t *properties) {
    if (properties->stype != ZES_STRUCTURE_TYPE_PCI_PROPERTIES) {
        return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    }
    properties->address.bus = 0x29 + 0x10 * of(device)->gpu;
    return ZE_RESULT_SUCCESS;
}

API zesDevicePciGetStats(zes_device_handle_t device, zes_pci_stats_t *stats) {
    ALIVE(device);
    memset(stats, 0, sizeof *stats);
    stats->timestamp = now_us();
    stats->rxCounter = said("poor", 0) ? 0 : 3000 * stats->timestamp;
    stats->txCounter = said("poor", 0) ? 0 : 1000 * stats->timestamp;
    return ZE_RESULT_SUCCESS;
}

API zesDeviceEnumMemoryModules(zes_device_handle_t device, uint32_t *count, zes_mem_handle_t *memories) {
    ALIVE(device);
    return list(of(device)->gpu, 3, count, (void **)memories);
}

API zesMemoryGetProperties(zes_mem_handle_t memory, zes_mem_properties_t *properties) {
    if (properties->stype != ZES_STRUCTURE_TYPE_MEM_PROPERTIES) {
        return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    }
    properties->type = ZES_MEM_TYPE_HBM;
    properties->location = of(memory)->part == 3 ? ZES_MEM_LOC_SYSTEM : ZES_MEM_LOC_DEVICE;
    properties->physicalSize = 64ull * GIB;
    return ZE_RESULT_SUCCESS;
}

API zesMemoryGetState(zes_mem_handle_t memory, zes_mem_state_t *state) {
    ALIVE(memory);
    while (said("hang", 0)) {
        poll(NULL, 0, 5);
    }
    if (state->stype != ZES_STRUCTURE_TYPE_MEM_STATE) {
        return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    }
    state->size = 64ull * GIB;
    state->free = 60ull * GIB;
    return ZE_RESULT_SUCCESS;
}

API zesDeviceEnumEngineGroups(zes_device_handle_t device, uint32_t *count, zes_engine_handle_t *engines) {
    return list(of(device)->gpu, 4, count, (void **)engines);
}

// All engines of the device, those that compute, and those that compute of its two tiles.
API zesEngineGetProperties(zes_engine_handle_t engine, zes_engine_properties_t *properties) {
    if (properties->stype != ZES_STRUCTURE_TYPE_ENGINE_PROPERTIES) {
        return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    }
    properties->type = of(engine)->part == 1 ? ZES_ENGINE_GROUP_ALL : ZES_ENGINE_GROUP_COMPUTE_ALL;
    properties->onSubdevice = of(engine)->part > 2;
    properties->subdeviceId = of(engine)->part == 4;
    return ZE_RESULT_SUCCESS;
}

API zesEngineGetActivity(zes_engine_handle_t engine, zes_engine_stats_t *stats) {
    static const uint64_t DIVISORS[] = {0, 3, 4, 8, 2};
    ALIVE(engine);
    if (of(engine)->part <= 2 && said("poor", 0)) {
        return ZE_RESULT_ERROR_UNSUPPORTED_FEATURE;
    }
    stats->timestamp = now_us();
    stats->activeTime = stats->timestamp / DIVISORS[of(engine)->part];
    return ZE_RESULT_SUCCESS;
}

API zesDeviceGetCardPowerDomain(zes_device_handle_t device, zes_pwr_handle_t *power) {
    if (said("poor", 0)) {
        return ZE_RESULT_ERROR_UNSUPPORTED_FEATURE;
    }
    *power = (void *)thing(of(device)->gpu, 1);
    return ZE_RESULT_SUCCESS;
}

API zesDeviceEnumPowerDomains(zes_device_handle_t device, uint32_t *count, zes_pwr_handle_t *powers) {
    return list(of(device)->gpu, 2, count, (void **)powers);
}

API zesPowerGetProperties(zes_pwr_handle_t power, zes_power_properties_t *properties) {
    if (properties->stype != ZES_STRUCTURE_TYPE_POWER_PROPERTIES) {
        return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    }
    properties->onSubdevice = of(power)->part == 1;
    return ZE_RESULT_SUCCESS;
}

API zesPowerGetEnergyCounter(zes_pwr_handle_t power, zes_power_energy_counter_t *energy) {
    ALIVE(power);
    energy->timestamp = now_us();
    energy->energy = (of(power)->part == 1 ? 300 : 290) * energy->timestamp;
    return ZE_RESULT_SUCCESS;
}

API zesPowerGetLimits(zes_pwr_handle_t power, zes_power_sustained_limit_t *sustained, zes_power_burst_limit_t *burst,
                      zes_power_peak_limit_t *peak) {
    ALIVE(power);
    if (sustained == NULL || burst != NULL || peak != NULL) {
        return ZE_RESULT_ERROR_INVALID_NULL_POINTER;
    }
    sustained->enabled = 1;
    sustained->power = 600000;
    return ZE_RESULT_SUCCESS;
}

API zesDeviceEnumTemperatureSensors(zes_device_handle_t device, uint32_t *count, zes_temp_handle_t *sensors) {
    return list(of(device)->gpu, said("poor", 0) ? 0 : 3, count, (void **)sensors);
}

API zesTemperatureGetProperties(zes_temp_handle_t sensor, zes_temp_properties_t *properties) {
    static const zes_temp_sensors_t TYPES[] = {ZES_TEMP_SENSORS_GLOBAL, ZES_TEMP_SENSORS_GLOBAL, ZES_TEMP_SENSORS_GPU,
                                               ZES_TEMP_SENSORS_MEMORY};
    if (properties->stype != ZES_STRUCTURE_TYPE_TEMP_PROPERTIES) {
        return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    }
    properties->type = TYPES[of(sensor)->part];
    return ZE_RESULT_SUCCESS;
}

API zesTemperatureGetState(zes_temp_handle_t sensor, double *celsius) {
    ALIVE(sensor);
    *celsius = 40.5 + of(sensor)->part;
    return ZE_RESULT_SUCCESS;
}

API zesDeviceEnumFrequencyDomains(zes_device_handle_t device, uint32_t *count, zes_freq_handle_t *domains) {
    return list(of(device)->gpu, 2, count, (void **)domains);
}

API zesFrequencyGetProperties(zes_freq_handle_t domain, zes_freq_properties_t *properties) {
    if (properties->stype != ZES_STRUCTURE_TYPE_FREQ_PROPERTIES) {
        return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    }
    properties->type = of(domain)->part == 1 ? ZES_FREQ_DOMAIN_GPU : ZES_FREQ_DOMAIN_MEMORY;
    return ZE_RESULT_SUCCESS;
}

API zesFrequencyGetState(zes_freq_handle_t domain, zes_freq_state_t *state) {
    ALIVE(domain);
    if (state->stype != ZES_STRUCTURE_TYPE_FREQ_STATE) {
        return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    }
    state->actual = of(domain)->part == 1 ? 1550.0 : -1.0;
    return ZE_RESULT_SUCCESS;
}

#ifdef AS_DRIVER
#define TABLE(function, type, ...)                        \
    API function(ze_api_version_t version, type *table) { \
        (void)version;                                    \
        fill_table(table, sizeof *table);                 \
        __VA_ARGS__;                                      \
        return ZE_RESULT_SUCCESS;                         \
    }

TABLE(zesGetGlobalProcAddrTable, zes_global_dditable_t, table->pfnInit = zesInit)
TABLE(zesGetDriverProcAddrTable, zes_driver_dditable_t, table->pfnGet = zesDriverGet)
TABLE(zesGetDeviceProcAddrTable, zes_device_dditable_t, table->pfnGet = zesDeviceGet,
      table->pfnGetProperties = zesDeviceGetProperties, table->pfnPciGetProperties = zesDevicePciGetProperties,
      table->pfnPciGetStats = zesDevicePciGetStats, table->pfnEnumMemoryModules = zesDeviceEnumMemoryModules,
      table->pfnEnumEngineGroups = zesDeviceEnumEngineGroups,
      table->pfnGetCardPowerDomain = zesDeviceGetCardPowerDomain,
      table->pfnEnumPowerDomains = zesDeviceEnumPowerDomains,
      table->pfnEnumTemperatureSensors = zesDeviceEnumTemperatureSensors,
      table->pfnEnumFrequencyDomains = zesDeviceEnumFrequencyDomains)
TABLE(zesGetMemoryProcAddrTable, zes_memory_dditable_t, table->pfnGetProperties = zesMemoryGetProperties,
      table->pfnGetState = zesMemoryGetState)
TABLE(zesGetEngineProcAddrTable, zes_engine_dditable_t, table->pfnGetProperties = zesEngineGetProperties,
      table->pfnGetActivity = zesEngineGetActivity)
TABLE(zesGetPowerProcAddrTable, zes_power_dditable_t, table->pfnGetProperties = zesPowerGetProperties,
      table->pfnGetEnergyCounter = zesPowerGetEnergyCounter, table->pfnGetLimits = zesPowerGetLimits)
TABLE(zesGetTemperatureProcAddrTable, zes_temperature_dditable_t, table->pfnGetProperties = zesTemperatureGetProperties,
      table->pfnGetState = zesTemperatureGetState)
TABLE(zesGetFrequencyProcAddrTable, zes_frequency_dditable_t, table->pfnGetProperties = zesFrequencyGetProperties,
      table->pfnGetState = zesFrequencyGetState)
#endif
