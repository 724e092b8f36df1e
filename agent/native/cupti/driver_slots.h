/* The pointers through which the exported functions of libcuda call their implementation.
 *
 * They lie in the library's own data and the library never changes them (seen in driver 580): one store of eight bytes
 * interposes our function, and another one removes it. CUDA's runtime and cuGetProcAddress use the same ones.
 */
#ifndef KINETO_DRIVER_SLOTS_H
#define KINETO_DRIVER_SLOTS_H

#include <stdbool.h>
#include <stdint.h>

/* Our function in place of an implementation. The original stays known: a thread may still be inside ours. */
struct in_between {
    void **slot; /* NULL: none, or that of another entry */
    void *original;
};

/* The pointer of an exported function; NULL: none that may be changed. */
void **driver_slot(uint8_t *function);
/* False: it points to a later tool's function that may lead to ours, so ours cannot lead to it. */
bool in_between_may(const struct in_between *between, const void *ours);
void in_between_place(struct in_between *between, void *ours);
/* Leaves a pointer that a later tool has changed. A thread inside our function goes on: this library is never
 * unloaded. */
void in_between_remove(struct in_between *between, void *ours);
void *in_between_original(const struct in_between *between);

#endif
