/* The pointers through which the exported functions of libcuda call their implementation.
 *
 * They lie in the library's own data and are never changed by it (seen in driver 580): one store of eight bytes puts a
 * function of ours in between, and another one takes it out. CUDA's runtime and cuGetProcAddress lead to the same ones.
 */
#ifndef KINETO_DRIVER_SLOTS_H
#define KINETO_DRIVER_SLOTS_H

#include <stdint.h>

/* The pointer of an exported function; NULL: there is none that may be changed. */
void **driver_slot(uint8_t *function);

#endif
