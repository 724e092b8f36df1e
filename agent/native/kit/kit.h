/* The kit's interface: what libkineto_collector.so exports for vendors of every kind, driven by
 * sources/kit/kit_binding.py. CUPTI has its own, since it does more (cupti/collector.h).
 *
 * A vendor has one collector per process; several vendors record at the same time. Each of them, on one thread at a
 * time (the agent's):
 *
 *   kc_kit_open -> kc_kit_prepare -> kc_kit_start -> kc_kit_counts* -> kc_kit_stop -> kc_kit_problem? -> kc_kit_close
 *
 * kc_kit_stop may be called on any thread at any time: that of a program about to use the library itself. Functions
 * return 0 (or what their comments say) on success and a negative kc_error otherwise; those with an `error` buffer put
 * a text into it. In a forked child everything returns KC_FORKED and does nothing.
 */
#ifndef KINETO_KIT_H
#define KINETO_KIT_H

#include <stddef.h>
#include <stdint.h>

#include "common/export.h"

#define KC_KIT_ABI 1 /* changes with any signature or structure below */

enum { KC_VENDOR = -3 }; /* the vendor's library refused: KIT_VENDOR_FAILED */

struct kit_config {
    uint64_t buffer_limit_bytes; /* cap on all buffers; two is the least */
    uint64_t buffer_bytes;
    uint64_t strings_bytes;
    uint64_t prefault_bytes; /* buffers backed by memory before kc_kit_prepare returns */
    uint32_t flush_period_ms;
    uint32_t reserved;
};

struct kit_stop_result {
    struct kc_counts counts;
    uint64_t cpu_ns;            /* of the collector's thread */
    uint64_t names_lost;        /* that did not fit the string table or could not be read */
    uint64_t irregular_records; /* dropped because their sizes contradict each other */
    uint32_t withheld;          /* buffers that the library did not give back */
    uint32_t timed_out;         /* 1: its last flush did not return in time; the arena is not closed */
    uint32_t flushes;
    int32_t flush_result; /* the library's answer to the last flush */
    uint32_t uncounted;   /* buffers of lost records that could not be counted: not in counts.dropped */
    uint32_t reserved;
};

KC_EXPORT uint32_t kc_kit_abi(void);
/* Finds a vendor in this library by its name, or in a plug-in's shared library by the plug-in's path (with a slash),
 * and opens the vendor's library at `path`. Returns the collector's number, which the other functions take; *version:
 * kit_library's. May be called again. */
KC_EXPORT int kc_kit_open(const char *vendor, const char *path, uint64_t *version, char *error, size_t error_bytes);
/* Facts for the metadata: a JSON object, or an empty text. After kc_kit_open. */
KC_EXPORT int kc_kit_describe(int collector, char *text, size_t text_bytes);
/* Makes the arena; returns its descriptor, which stays the collector's. */
KC_EXPORT int kc_kit_prepare(int collector, const struct kit_config *config, char *error, size_t error_bytes);
/* Starts the thread and the vendor, and stores the library's result for each kind in results[i]. After a failure
 * kc_kit_close is still due. */
KC_EXPORT int kc_kit_start(int collector, const uint32_t *kinds, uint32_t count, int32_t *results, char *error,
                           size_t error_bytes);
KC_EXPORT int kc_kit_counts(int collector, struct kc_counts *counts);
/* Stops the vendor, flushes and makes everything READY, within `limit_ms`. A repeated call returns the same result. */
KC_EXPORT int kc_kit_stop(int collector, uint32_t limit_ms, struct kit_stop_result *result);
/* Why less was recorded than requested, in the vendor's words; empty if nothing is missing. After kc_kit_stop. */
KC_EXPORT int kc_kit_problem(int collector, char *text, size_t text_bytes);
KC_EXPORT int kc_kit_close(int collector);
/* The library's own text for one of its results. */
KC_EXPORT void kc_kit_result_text(int collector, int32_t result, char *text, size_t text_bytes);

#endif
