/* What the gate of kinds works on: a library that calls cuptiActivityEnable as libtorch_cpu.so's Kineto does. */
#include <stdint.h>

int cuptiActivityEnable(uint32_t kind);

int kineto_enable(uint32_t kind);
int kineto_enable(uint32_t kind) { return cuptiActivityEnable(kind); }
