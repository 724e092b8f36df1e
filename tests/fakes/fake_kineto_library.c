/* What the gate works on: a library that calls CUPTI as libtorch_cpu.so's Kineto does. */
#include <stdint.h>

int cuptiActivityEnable(uint32_t kind);
int cuptiActivityDisable(uint32_t kind);
int cuptiActivityEnableDriverApi(uint32_t call, uint8_t on);
int cuptiActivityRegisterCallbacks(void *requested, void *completed);

int kineto_enable(uint32_t kind);
int kineto_disable(uint32_t kind);
int kineto_single_call(uint32_t call, uint8_t on);
int kineto_register(void *requested, void *completed);
int kineto_enable(uint32_t kind) { return cuptiActivityEnable(kind); }
int kineto_disable(uint32_t kind) { return cuptiActivityDisable(kind); }
int kineto_single_call(uint32_t call, uint8_t on) { return cuptiActivityEnableDriverApi(call, on); }
int kineto_register(void *requested, void *completed) { return cuptiActivityRegisterCallbacks(requested, completed); }
