/* The controls of the fake libcupti: what a test programs and what a "CUDA" program calls. See fake_cupti.c. */
#ifndef FAKE_CUPTI_H
#define FAKE_CUPTI_H

#include <stdint.h>

/* Programmable: version, subscribe_result, refuse_kind (with refuse_result), drop_next, extra_kernel_bytes,
 * one_wide_kernel, hold_a_buffer, names_result, flush_delay_ms, enable_delay_ms (of Kineto), enter_delay_ms (of what
 * takes CUPTI into use), finalize_result, finalize_delay_ms, subscribe_delay_ms, starved (both, while launches go on), drop_at_finalize, return_at_finalize (of the buffer that it holds),
 * graph_recorded, newer_than_driver. -1 for an unknown key. */
int fake_set(const char *key, long value);

/* Each makes the CUDA API call of that name: a runtime record on the calling thread, the device's record with
 * the same correlation id, callbacks to a subscriber on enter and exit. Times in ns; streams are 0-63. */
uint32_t fake_launch(const char *name, const int32_t grid[3], const int32_t block[3], uint64_t duration_ns,
                     uint32_t stream);
uint32_t fake_memcpy(uint64_t bytes, int to_device, uint64_t duration_ns, uint32_t stream);
uint32_t fake_memset(uint64_t bytes, uint64_t duration_ns, uint32_t stream);
uint32_t fake_graph_launch(const char *const *names, uint32_t count, uint64_t duration_ns, uint32_t stream);
uint32_t fake_driver_launch(const char *name, uint64_t duration_ns, uint32_t stream);
uint32_t fake_sync(uint32_t stream); /* waits until the stream's work is over */
/* `count` kernels of one name, each launched as by fake_launch. */
void fake_launch_many(const char *name, uint32_t count, uint64_t duration_ns, uint32_t stream);
/* On each of so many threads, all at once, while kernels are recorded. */
uint32_t fake_storm(uint32_t threads, uint32_t launches);

uint64_t fake_written(uint32_t kind); /* records put into buffers since the library was loaded */
uint64_t fake_entered(void);          /* how often it was taken into use, or was about to be */
int fake_is_enabled(uint32_t kind);
uint64_t fake_single_calls(void); /* how often single calls were switched on or off */
uint64_t fake_dropped(void);
uint64_t fake_finalized(void); /* successful cuptiFinalize calls */
uint64_t fake_misused(void);   /* cuptiFinalize outside the exit of a call, or after a graph was
                                     * launched while GPU activities were recorded; a first subscription after recording
                                     * began; copies or sets enabled while kernels are not; what takes something
                                     * from the program's own Kineto */
int fake_subscribed(void);     /* somebody has the subscriber */
void fake_unregister(void);    /* whoever has registered callbacks is gone */
int fake_attached(void);       /* any kind enabled or callbacks registered */

/* The program's own Kineto begins to profile; ends, and gives the number of kernels it got. */
void fake_kineto_begin(void);
uint64_t fake_kineto_end(void);

#endif
