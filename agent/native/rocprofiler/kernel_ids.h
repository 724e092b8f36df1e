/* The names of kernels by rocprofiler's kernel ids, from its code-object callbacks. */
#ifndef KINETO_KERNEL_IDS_H
#define KINETO_KERNEL_IDS_H

#include <stdint.h>

#include "kit/vendor.h"

#define KERNEL_IDS_MOST 262144u /* a program that keeps compiling kernels must not use up memory */

/* On any thread: keeps the name of a kernel for all future recordings. */
void kernel_ids_add(uint64_t kernel_id, const char *name);
/* Marks all names as new for the next recording. */
void kernel_ids_rewind(void);
/* On the collector's thread: adds the new names to `space`. */
void kernel_ids_tell(const struct kit_host *host, uint32_t space);
/* Kernels whose names were not kept. */
uint64_t kernel_ids_lost(void);

#endif
