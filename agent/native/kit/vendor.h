/* The contract between the collector kit and a vendor's tracing library.
 *
 * Theory of operation
 *   The kit does what is the same for all vendors: the arena, the collector's thread, sizes and names of records,
 *   counts, time-outs, fork and exit. A vendor is one `struct kit_vendor`: how its library is opened, started, flushed
 *   and stopped. Records are delivered in one of two ways.
 *
 *   Lent buffers: the library asks for memory and returns it full (CUPTI, PTI, msPTI). The vendor hands
 *     host->buffer_requested and host->buffer_completed to its library, directly or wrapped in functions of the
 *     library's own type. Records lie back to back and begin with a u32 kind below 128; next_record steps through them.
 *     All records of one kind have the same size, which the kit learns from the first buffer and then relies on.
 *
 *   Pushed records: the library owns its memory (rocprofiler). The vendor calls host->push for each record, on any
 *     thread. The record is copied into the arena behind a `struct kit_header`. next_record is NULL.
 *
 *   A vendor has one collector per process. It keeps its state, including the host, in static variables; the host stays
 *   valid for the life of the process, and its functions may be called at any time, even after the end of a recording,
 *   when they do nothing.
 *
 * Threads: the kit calls one function of a vendor at a time, except next_record, flush, take_dropped and read_clock,
 *   which run on the collector's thread while start and stop may run on another. Each comment below says where it runs:
 *   "the caller's" is the agent's thread, without the GIL, or one of the program to which the agent yields.
 */
#ifndef KINETO_KIT_VENDOR_H
#define KINETO_KIT_VENDOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KIT_ABI 1u /* changes with any structure or rule below */

#define KIT_NAMES_MOST 16u
#define KIT_KINDS_MOST 16u            /* switched on in one recording */
#define KIT_TEXT_BYTES_MOST 65536u    /* of one text: longer ones are cut */
#define KIT_FIRST_SPACE 16u           /* string spaces from here on are the vendor's; those below are the arena's */
#define KIT_KIND_TEXT 0xFFFFFFFFu     /* of a pushed record: a text, which the kit handles */
#define KIT_PUSHED_BYTES_MOST 262144u /* of one record */

/* What a vendor's function returns if its library refused, with a text in `error`. The other errors are the kc_error of
 * common/export.h: -1 the library is missing, lacks a function or is unknown; -2 the system refused. */
#define KIT_VENDOR_FAILED (-3)

/* Precedes each pushed record, which begins 8 bytes later. Padding after the record is zero. */
struct kit_header {
    uint32_t kind;
    uint32_t bytes; /* to the next header: this one, the record and its padding; a multiple of 8 */
};

/* The kit's functions for vendors. */
struct kit_host {
    uint32_t abi;  /* KIT_ABI */
    uint32_t size; /* of this structure */

    /* Any thread; neither waits, locks or allocates. What the library gets when no buffer is free depends on
     * kit_library.when_full. */
    void (*buffer_requested)(uint8_t **buffer, size_t *size);
    /* `used`: bytes with records. A buffer of an earlier recording is accepted, too. */
    void (*buffer_completed)(uint8_t *buffer, size_t size, size_t used);

    /* Any thread; never waits, locks or allocates. Copies one record. False: there was no room, and it is counted as
     * dropped, or no recording is in progress. */
    bool (*push)(uint32_t kind, const void *record, uint32_t bytes);
    /* Any thread; never waits. Adds a text to the string table under `key` of `space`, unless that key has one. The
     * text is copied. On the collector's thread, that is in next_record, flush and take_dropped, it is in the table on
     * return; on any other it travels with the pushed records, and is in the table before the records that are pushed
     * after it on the same thread can be read. False: no room, or no recording is in progress. A text for which the
     * table itself has no room is counted in names_lost of the result. */
    bool (*add_text)(uint32_t space, uint64_t key, const char *text, uint32_t length);
    /* Any thread; never waits. Counts records that the vendor knows to be lost, in addition to those of
     * take_dropped. */
    void (*dropped)(uint64_t records);
};

/* What the library gets when it asks for a buffer and none is free. Records written to memory outside the arena count
 * as dropped. */
enum kit_when_full {
    KIT_FULL_SPILLS,   /* one of a few buffers outside the arena; none once these are all lent */
    KIT_FULL_DECLINES, /* none (NULL, of size 0): the library drops the records and counts them */
    /* As KIT_FULL_SPILLS, then one buffer that is lent to all callers at once: for a library that must have a buffer
     * and only writes to it. Its records cannot be counted: kc_kit_stop reports it. */
    KIT_FULL_NEVER_DECLINES,
};

enum kit_name_key {
    KIT_BY_POINTER, /* one name, one pointer, for as long as the recording lasts: the pointer is the text's key */
    /* Each record has a new pointer: the key is a hash of the text, which replaces the pointer in the record. */
    KIT_BY_TEXT,
};

/* Where records of one kind hold the address of a NUL-terminated text of this process. The kit reads it when the buffer
 * has been returned, by a system call that fails if there is no such memory. */
struct kit_name {
    uint32_t kind;
    uint32_t offset; /* of the u64 address in the record; 0 in a record: no name */
    uint32_t space;  /* string space, for example ARENA_SPACE_KERNEL_NAME */
    uint32_t key;    /* kit_name_key */
};

/* Facts about the library, filled by open. */
struct kit_library {
    uint64_t version;   /* the vendor's version number, for which the Python side knows the record layouts */
    uint32_t when_full; /* kit_when_full */
    uint32_t name_count;
    struct kit_name names[KIT_NAMES_MOST]; /* for lent buffers */
};

struct kit_vendor {
    uint32_t abi;     /* KIT_ABI */
    uint32_t size;    /* of this structure */
    const char *name; /* "pti" */

    /* Caller's thread. Opens the library at `path` (the process's own copy, if it is mapped), checks that its interface
     * is known, and fills `library`, which is zero. Called again before each recording, perhaps with another path. Must
     * not start tracing. Returns 0 or a negative error with a text. */
    int (*open)(const struct kit_host *host, const char *path, struct kit_library *library, char *error,
                size_t error_bytes);
    /* Caller's thread. Starts recording: buffers are lent and push works from before this call. Switches each of
     * `kinds` on and stores the library's result in results[i], 0 for success. Returns 0 if at least one is on, else a
     * negative error with a text, with every kind off again. The collector's thread exists already, but does not call
     * flush before this has returned. */
    int (*start)(const uint32_t *kinds, uint32_t count, int32_t *results, char *error, size_t error_bytes);
    /* Caller's thread: switches off what start switched on. Not called if start failed. When the process exits: only if
     * stops_at_exit. */
    void (*stop)(void);
    /* Collector's thread: makes the library deliver its records, with buffer_completed or push called before this
     * returns, as far as possible. Called once a period, and for the last time after stop, or after a failed start,
     * with `forced`: then it must deliver everything. When the process exits, without stop and `forced`. Returns the
     * library's result, 0 for success. The kit does not wait for a call that takes too long, and reports it: no
     * function of the vendor is called in this process until it has returned. */
    int32_t (*flush)(bool forced);
    /* Collector's thread. Steps to the record after *record (NULL: the first) of a returned buffer. Returns 0, or
     * another value at the end. NULL: records are pushed. */
    int32_t (*next_record)(uint8_t *buffer, size_t used, void **record);

    /* The rest may be NULL. */

    /* Collector's thread, after each flush: the number of records lost since the last call; also called before start,
     * on the caller's thread, so that losses between recordings are not counted. */
    uint64_t (*take_dropped)(void);
    /* Collector's thread, when recording begins and after each flush: the current time of the records' clock. The kit
     * reads CLOCK_REALTIME before and after it, and keeps the closest pair in the string table: space
     * ARENA_SPACE_CLOCK_PAIR, key Unix ns, text the u64 that this returned. NULL: times in records are Unix ns. */
    uint64_t (*read_clock)(void);
    /* Caller's thread, after a stop that ended in time, if the library holds no buffer of ours. Restores what other
     * users of the library need (their callbacks). */
    void (*release)(void);
    /* Caller's thread, after stop. Explains to people why less was recorded than requested. Returns the length of the
     * text, 0 if nothing is missing. */
    int64_t (*problem)(char *text, size_t text_bytes);
    /* In a forked child, in its fork handler: no call into the library, no lock, only our own memory. */
    void (*forked)(void);
    /* Caller's thread, after open. Facts for the capture's metadata as one JSON object, NUL-terminated. Returns its
     * length without the NUL, or -1 if it does not fit. */
    int64_t (*describe)(char *text, size_t text_bytes);
    /* Caller's thread, after open. The library's own text for one of its results; NULL: none. */
    const char *(*result_text)(int32_t result);
    /* Whether stop is called on the thread that exits the process, before the last flush: for a library that cannot be
     * flushed while it records. Its own exit handlers have not run yet. */
    bool stops_at_exit;
};

/* The only symbol of a plug-in's shared library; it returns its vendor, or NULL if it does not know `kit_abi`. */
#define KIT_PLUGIN_SYMBOL "kineto_vendor"
typedef const struct kit_vendor *(*kit_plugin)(uint32_t kit_abi);

#endif
