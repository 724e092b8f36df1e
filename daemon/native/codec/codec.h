/* The trace codec: the loops that Python cannot run at memory speed. Called through ctypes by kineto_trace.arrays.codec.
 *
 * Theory of operation
 *     Nothing in here knows a kernel from a copy. Python describes what to do in tables of plain numbers
 *     (which bytes of which record go into which column; which columns and literals make up a row of text),
 *     and these functions run the tables. Structures have fixed-width members in an order without padding,
 *     so that ctypes declares them word for word; kc_abi_version guards against a stale library.
 *
 *     No global state but that of spilling, no allocation but there, in the interner and kc_longest, no calls back into
 *     Python: the interpreter lock is free while they run, and threads may work on separate objects. Input bytes are untrusted: every read is
 *     checked against the end of the buffer, every write against the capacity given.
 */
#ifndef KINETO_CODEC_H
#define KINETO_CODEC_H

#include <stddef.h>
#include <stdint.h>

#define KC_ABI_VERSION 11
#define KC_EXPORT __attribute__((visibility("default")))

/* ---- interning: 64-bit keys -> dense numbers in order of first appearance ---- */

typedef struct kc_interner kc_interner;

KC_EXPORT uint32_t kc_abi_version(void);
KC_EXPORT kc_interner *kc_interner_new(void); /* NULL: out of memory */
KC_EXPORT void kc_interner_free(kc_interner *interner);
KC_EXPORT uint64_t kc_interner_count(const kc_interner *interner);
KC_EXPORT void kc_interner_keys(const kc_interner *interner, uint64_t *keys);
/* numbers[i] = number of keys[i]. 0, or -1 when out of memory. */
KC_EXPORT int kc_intern(kc_interner *interner, const uint64_t *keys, uint64_t count, uint32_t *numbers);
/* One key; UINT32_MAX when out of memory. */
uint32_t kc_intern_one(kc_interner *interner, uint64_t key);

/* ---- decoding: records of several kinds -> one array per field ---- */

enum { KC_COPY = 0, KC_SPAN = 1, KC_INTERN = 2 };

typedef struct {
    uint32_t operation; /* KC_COPY: the field; KC_SPAN: u64 at offset into out, and u64 at offset_2 minus it, not
                              below 0, into out_2; KC_INTERN: the number of the field, as u32 */
    uint32_t width;     /* bytes of the field: 1, 2, 4 or 8 */
    uint32_t offset;    /* byte offset in the record */
    uint32_t offset_2;
    void *out; /* array with room for `capacity` rows */
    void *out_2;
    kc_interner *interner; /* KC_INTERN */
} kc_column;

typedef struct {
    uint32_t kind; /* first u32 of the record */
    uint32_t record_bytes;
    uint32_t first_column; /* columns[first_column .. + column_count]; 0 columns: skipped, but counted */
    uint32_t column_count;
    uint64_t capacity; /* rows that fit */
    uint64_t rows;     /* in: rows so far; out: rows now */
} kc_kind;

enum { KC_OK = 0, KC_TORN = 1, KC_UNKNOWN_KIND = 2, KC_FULL = 3, KC_NO_MEMORY = 4 };

typedef struct {
    uint64_t consumed; /* bytes of whole records that were read */
    uint64_t records;
    uint32_t status; /* KC_OK: all of the buffer was read; else why it stopped */
    uint32_t kind;   /* of the record that it stopped at */
} kc_decoded;

/* Table columns must lie inside record_bytes, and record_bytes must be >= 8; the caller checks that. */
KC_EXPORT void kc_decode(const uint8_t *data, uint64_t size, kc_kind *kinds, uint32_t kind_count,
                         const kc_column *columns, kc_decoded *result);

/* ---- walking: where records begin, however they are framed ---- */

enum {
    KC_BY_KIND = 0, /* u32 kind first, the size follows from it */
    KC_BY_HEAD = 1, /* before the record u32 kind, u32 bytes to the next one, a multiple of 8 */
    KC_BY_SIZE = 2, /* u64 bytes, u32 kind first; the next record is at a multiple of 8 from this one */
};

typedef struct {
    uint32_t kind;
    uint32_t record_bytes; /* 8 or more */
} kc_size;

/* Arrays with room for `capacity` records. */
typedef struct {
    uint64_t capacity;
    uint64_t *begin; /* byte offset in the data of what the vendor wrote */
    uint32_t *bytes; /* of it, padding included where that cannot be told apart */
    uint32_t *kind;
} kc_places;

/* sizes: in the order of kinds, for KC_BY_KIND. places: NULL, to count only. */
KC_EXPORT void kc_walk(const uint8_t *data, uint64_t size, uint32_t framing, const kc_size *sizes, uint32_t size_count,
                       const kc_places *places, kc_decoded *result);

/* ---- writing: columns -> rows of text ---- */

enum {
    KC_END = 0, /* literal only */
    KC_UNSIGNED = 1,
    KC_SIGNED = 2,
    KC_MICROSECONDS = 3, /* int64 ns, minus `base`, as microseconds with three decimals; below 0: 0 */
    KC_DECIMAL = 4,      /* double, up to six decimals */
    KC_TEXT = 5,         /* a number into a table of ready texts */
    KC_OPTIONAL = 6,     /* signed; neither literal nor value where the value is `base` */
    KC_REAL = 7,         /* double, the shortest text that gives it back */
    KC_TIME = 8,         /* like KC_MICROSECONDS, but also below 0 */
    KC_WHOLE = 9,        /* int64 ns, minus `base`, as whole microseconds */
};

#define KC_PADDING 32 /* bytes that must be readable after every literal and after the last text */

typedef struct {
    const char *literal; /* comes before the value */
    uint32_t literal_bytes;
    uint32_t operation;
    const void *column;
    uint32_t width;      /* bytes of one value of the column */
    uint32_t text_count; /* KC_TEXT */
    const char *text;
    const uint64_t *text_ends; /* text n is text[text_ends[n] .. text_ends[n + 1]]; text_count + 1 entries */
    int64_t base;
} kc_field;

typedef struct {
    uint64_t rows;  /* rows written */
    uint64_t bytes; /* their length */
} kc_written;

/* Writes rows first, first + 1, …: at most `count`, and as many as fit as a whole. */
KC_EXPORT void kc_write(const kc_field *fields, uint32_t field_count, uint64_t first, uint64_t count, char *out,
                        uint64_t capacity, kc_written *result);

typedef struct {
    uint32_t first_field;
    uint32_t field_count;
} kc_row_group;

/* Rows of several forms in one order: the i-th one is row[i] of the columns of groups[group[i]]. */
KC_EXPORT void kc_write_mixed(const kc_field *fields, const kc_row_group *groups, const uint32_t *group,
                              const uint32_t *row, uint64_t first, uint64_t count, char *out, uint64_t capacity,
                              kc_written *result);

/* ---- tracks: events of one track that overlap get separate lanes ---- */

/* Rows are sorted by (track, start). lane[i] = the first lane whose last event has ended; at most lane_limit - 1. */
KC_EXPORT void kc_lanes(const uint32_t *track, const int64_t *start, const int64_t *end, uint64_t count,
                        uint32_t lane_limit, uint8_t *lane);

/* ---- trees: which event of a thread runs inside which ---- */

#define KC_NEVER INT64_MAX /* the end of an event that was still running when the recording ended */

typedef struct {
    uint64_t count; /* below 2^31 */
    const uint32_t *track;
    const int64_t *start; /* ns */
    const int64_t *end;   /* ns */
    const uint8_t *rank;
} kc_events;

#define KC_OVERLAPS (-2)

typedef struct {
    int32_t *parent;   /* place of the enclosing event; -1: none */
    int32_t *depth;    /* 0: outermost */
    int32_t *children; /* direct ones */
    int32_t *stop;     /* the place after its last descendant */
    int64_t *end;      /* ns; not after the parent's */
    int64_t *self;     /* ns in which no child ran */
} kc_tree;

/* order = the places sorted by (track, start, end from late to early, rank, place). Without end or rank (NULL) these
   do not count. scratch: room for `count`. Fast where the events are nearly sorted already. */
KC_EXPORT void kc_order(const kc_events *events, uint32_t *order, uint32_t *scratch);
/* Events are in that order. An outermost event that never ended ends at window_end. */
KC_EXPORT void kc_nest(const kc_events *events, int64_t window_end, const kc_tree *tree);
/* Events are in that order. parent[i] = place of the innermost event around it; -1: none; KC_OVERLAPS: it begins in
   another event and outlives it, so that it has no place in a tree of strict containment, nor becomes a parent. */
KC_EXPORT void kc_contain(const kc_events *events, int32_t *parent);
/* Events are in that order, with the ends and parents of kc_nest; moments are sorted by (track, start). found[i] = place
   of the innermost event of the same track that runs at moments->start[i]; -1: none. */
KC_EXPORT void kc_enclosing(const kc_events *events, const int32_t *parent, const kc_events *moments, int32_t *found);

/* ---- paths through graphs of dependencies ---- */

typedef struct {
    uint64_t nodes;
    uint64_t edges;
    const int64_t *from; /* of each edge: a node; edges into one node in the order in which they count */
    const int64_t *to;
    const int64_t *weight; /* 0 or more */
} kc_graph;

enum { KC_PATH_FOUND = 0, KC_PATH_CYCLE = 1, KC_PATH_NO_MEMORY = 2 };

/* nodes = node, before[node], … until there is none (below 0); at most `count` of them. nodes: NULL, or room for
   them. Returns how many. */
KC_EXPORT uint64_t kc_trail(const int64_t *before, uint64_t count, int64_t node, int64_t *nodes);
/* via[n] = the edge by which the path of the largest weight reaches node n, -1: it begins there; last = where the
   largest of all ends. Returns KC_PATH_…. */
KC_EXPORT int kc_longest(const kc_graph *graph, int64_t *via, int64_t *last);

/* ---- memory for large arrays: used again, or in a file ---- */

/* Theory of operation
 *     Arrays of `least` bytes and more come out of two regions, first fit, in units of 64 KiB: a pool of anonymous memory
 *     and, when that is full, a sparse file that is mapped as a whole. What the pool gets back stays mapped, so that the
 *     next array costs no page faults. In the file the blocks of an array are reserved when it is made. Large arrays give
 *     them back at once; smaller ones leave theirs, with what is in them, to the next array.
 *
 *     A signal (SIGALRM) every millisecond looks at the process's resident files, and when they are above the limit unmaps
 *     all of the file from the page tables: the kernel keeps the pages as long as it has room, and writes them out when
 *     not. So what is needed at the same time may exceed memory, and only time is lost. A signal, because on a busy machine
 *     a thread of its own comes too late, and of real time, because ticks of processor time come every 4 ms: whoever reads
 *     here and there maps 64 KiB with each page fault, 250 MiB in 4 ms. The functions are numpy's (PyDataMem_Handler);
 *     there is one pool and one such file in a process, for good.
 */
#define KC_SPILL_WATCHED 32
/* 0, or -1: without it. */
KC_EXPORT int kc_spill_pool(uint64_t room, uint64_t least);
/* The same. statm: /proc/self/statm, open. */
KC_EXPORT int kc_spill_open(int file, int statm, uint64_t room, uint64_t least, uint64_t resident_limit);
/* A file's read-only mapping, which is unmapped from the page tables too; it must stay. 1, or 0: not watched. */
KC_EXPORT int kc_spill_watch(void *mapping, uint64_t size);
/* One look, by whoever is about to touch much. */
void kc_spill_settle(void);
KC_EXPORT void *kc_spill_malloc(void *context, size_t size);
KC_EXPORT void *kc_spill_calloc(void *context, size_t count, size_t size);
KC_EXPORT void *kc_spill_realloc(void *context, void *data, size_t size);
KC_EXPORT void kc_spill_free(void *context, void *data, size_t size);

#endif
