/* Records of several kinds to one array per field. See codec.h.
 *
 * Theory of operation
 *     The walk collects the addresses of the records of each kind in small batches; a full batch is copied
 *     column by column, in loops whose width is a compile-time constant. A batch stays in the cache, so that
 *     memory is read once. Kinds are looked up in a table of 64: real ones are below that.
 *
 * Threads: the caller's, without the GIL; it works on the caller's arrays and interners alone.
 * Blocks: never.
 */
#include <string.h>

#include "codec/codec.h"

#define BATCH 1024 /* records: long runs into each column, still within the second-level cache */
#define KIND_LIMIT 64
#define CACHE_LINE_BYTES 64
#define PREFETCH_BYTES 1024 /* ahead of the walk, which itself touches only the first line of a record */
#define MAX_KINDS 16

typedef struct {
    const uint8_t *records[BATCH];
    uint32_t count;
} batch;

static uint64_t load64(const uint8_t *p) {
    uint64_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

static uint32_t load32(const uint8_t *p) {
    uint32_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

#define COPY_LOOP(type)                                         \
    do {                                                        \
        type *restrict out = (type *)column->out + row;         \
        for (uint32_t i = 0; i < count; i++)                    \
            memcpy(out + i, records[i] + offset, sizeof(type)); \
    } while (0)

static void copy_field(const kc_column *column, const uint8_t *const *restrict records, uint32_t count, uint64_t row) {
    const uint32_t offset = column->offset;
    switch (column->width) {
    case 1: COPY_LOOP(uint8_t); break;
    case 2: COPY_LOOP(uint16_t); break;
    case 4: COPY_LOOP(uint32_t); break;
    default: COPY_LOOP(uint64_t); break;
    }
}

/* Several 32-bit fields at once: one look at each record for all of them. */
static void copy_four(const kc_column *columns, const uint8_t *const *restrict records, uint32_t count, uint64_t row) {
    uint32_t *restrict a = (uint32_t *)columns[0].out + row, *restrict b = (uint32_t *)columns[1].out + row;
    uint32_t *restrict c = (uint32_t *)columns[2].out + row, *restrict d = (uint32_t *)columns[3].out + row;
    const uint32_t at_a = columns[0].offset, at_b = columns[1].offset;
    const uint32_t at_c = columns[2].offset, at_d = columns[3].offset;
    for (uint32_t i = 0; i < count; i++) {
        const uint8_t *record = records[i];
        a[i] = load32(record + at_a);
        b[i] = load32(record + at_b);
        c[i] = load32(record + at_c);
        d[i] = load32(record + at_d);
    }
}

static void copy_three(const kc_column *columns, const uint8_t *const *restrict records, uint32_t count, uint64_t row) {
    uint32_t *restrict a = (uint32_t *)columns[0].out + row, *restrict b = (uint32_t *)columns[1].out + row;
    uint32_t *restrict c = (uint32_t *)columns[2].out + row;
    const uint32_t at_a = columns[0].offset, at_b = columns[1].offset, at_c = columns[2].offset;
    for (uint32_t i = 0; i < count; i++) {
        const uint8_t *record = records[i];
        a[i] = load32(record + at_a);
        b[i] = load32(record + at_b);
        c[i] = load32(record + at_c);
    }
}

/* How many columns from here on are plain 32-bit copies, at most four. */
static uint32_t group_size(const kc_column *columns, uint32_t rest) {
    uint32_t size = 0;
    while (size < rest && size < 4 && columns[size].operation == KC_COPY && columns[size].width == 4) {
        size++;
    }
    return size;
}

static void copy_span(const kc_column *column, const uint8_t *const *restrict records, uint32_t count, uint64_t row) {
    uint64_t *restrict starts = (uint64_t *)column->out + row, *restrict durations = (uint64_t *)column->out_2 + row;
    const uint32_t offset = column->offset, offset_2 = column->offset_2;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t start = load64(records[i] + offset), end = load64(records[i] + offset_2);
        starts[i] = start;
        durations[i] = end > start ? end - start : 0;
    }
}

static int copy_number(const kc_column *column, const uint8_t *const *records, uint32_t count, uint64_t row) {
    uint32_t *out = (uint32_t *)column->out + row;
    for (uint32_t i = 0; i < count; i++) {
        const uint8_t *field = records[i] + column->offset;
        out[i] = kc_intern_one(column->interner, column->width == 8 ? load64(field) : load32(field));
        if (out[i] == UINT32_MAX) {
            return -1;
        }
    }
    return 0;
}

/* Copies a batch into the columns of its kind. KC_OK, KC_FULL or KC_NO_MEMORY. */
static uint32_t flush(kc_kind *kind, const kc_column *columns, batch *b) {
    uint32_t count = b->count;
    b->count = 0;
    if (kind->column_count && count > kind->capacity - kind->rows) {
        return KC_FULL;
    }
    const kc_column *column = columns + kind->first_column, *end = column + (count ? kind->column_count : 0);
    while (column < end) {
        uint32_t group = group_size(column, (uint32_t)(end - column));
        if (group == 4) {
            copy_four(column, b->records, count, kind->rows);
        } else if (group == 3) {
            copy_three(column, b->records, count, kind->rows);
        } else if (column->operation == KC_COPY) {
            copy_field(column, b->records, count, kind->rows);
        } else if (column->operation == KC_SPAN) {
            copy_span(column, b->records, count, kind->rows);
        } else if (copy_number(column, b->records, count, kind->rows)) {
            return KC_NO_MEMORY;
        }
        column += group >= 3 ? group : 1;
    }
    kind->rows += count;
    return KC_OK;
}

/* The kinds by number, with what the walk needs in one place. */
typedef struct {
    uint32_t record_bytes[KIND_LIMIT]; /* 0: unknown kind */
    uint8_t index[KIND_LIMIT];
} kind_table;

static void make_table(kind_table *table, const kc_kind *kinds, uint32_t kind_count) {
    memset(table, 0, sizeof *table);
    for (uint32_t k = 0; k < kind_count; k++) {
        if (kinds[k].kind < KIND_LIMIT && kinds[k].record_bytes >= 8) {
            table->record_bytes[kinds[k].kind] = kinds[k].record_bytes;
            table->index[kinds[k].kind] = (uint8_t)k;
        }
    }
}

void kc_decode(const uint8_t *data, uint64_t size, kc_kind *kinds, uint32_t kind_count, const kc_column *columns,
               kc_decoded *result) {
    batch batches[MAX_KINDS];
    kind_table table;
    uint64_t at = 0, records = 0;
    if (kind_count > MAX_KINDS) {
        kind_count = MAX_KINDS;
    }
    make_table(&table, kinds, kind_count);
    memset(result, 0, sizeof *result);
    for (uint32_t k = 0; k < kind_count; k++) {
        batches[k].count = 0;
    }
    while (at < size) {
        const uint8_t *record = data + at;
        if (size - at < 8) {
            result->status = KC_TORN;
            break;
        }
        uint32_t number = load32(record);
        uint32_t record_bytes = number < KIND_LIMIT ? table.record_bytes[number] : 0;
        if (!record_bytes || record_bytes > size - at) {
            result->status = record_bytes ? KC_TORN : KC_UNKNOWN_KIND;
            result->kind = number;
            break;
        }
        for (uint32_t line = 0; line < record_bytes; line += CACHE_LINE_BYTES) {
            __builtin_prefetch(record + PREFETCH_BYTES + line);
        }
        batch *b = batches + table.index[number];
        b->records[b->count++] = record;
        at += record_bytes;
        records++;
        if (b->count == BATCH) {
            result->status = flush(kinds + table.index[number], columns, b);
            if (result->status) {
                break;
            }
        }
    }
    for (uint32_t k = 0; k < kind_count; k++) {
        uint32_t status = flush(kinds + k, columns, batches + k);
        if (status) {
            result->status = status;
        }
    }
    result->consumed = at;
    result->records = records;
    kc_spill_settle();
}
