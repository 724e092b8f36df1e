/* Records of several kinds to one array per field. See codec.h.
 *
 * Theory of operation
 *     The walk collects the addresses of the records of each kind in small batches; a full batch is copied
 *     column by column, in loops whose width is a compile-time constant. A batch stays in the second-level
 *     cache, so that memory is read once. Kinds are looked up in a table of 64: real ones are below that.
 */
#include <string.h>

#include "codec.h"

#define BATCH 256
#define KIND_LIMIT 64
#define MAX_KINDS 16

typedef struct {
    const uint8_t *records[BATCH];
    uint32_t count;
} batch;

static uint64_t load64(const uint8_t *p)
{
    uint64_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

static uint32_t load32(const uint8_t *p)
{
    uint32_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

#define COPY_LOOP(type)                                                       \
    do {                                                                      \
        type *out = (type *)column->out + row;                                \
        for (uint32_t i = 0; i < count; i++)                                  \
            memcpy(out + i, records[i] + column->offset, sizeof(type));       \
    } while (0)

static void copy_field(const kc_column *column, const uint8_t *const *records, uint32_t count, uint64_t row)
{
    switch (column->width) {
    case 1: COPY_LOOP(uint8_t); break;
    case 2: COPY_LOOP(uint16_t); break;
    case 4: COPY_LOOP(uint32_t); break;
    default: COPY_LOOP(uint64_t); break;
    }
}

static void copy_duration(const kc_column *column, const uint8_t *const *records, uint32_t count, uint64_t row)
{
    uint64_t *out = (uint64_t *)column->out + row;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t start = load64(records[i] + column->offset), end = load64(records[i] + column->offset_2);
        out[i] = end > start ? end - start : 0;
    }
}

static int copy_number(const kc_column *column, const uint8_t *const *records, uint32_t count, uint64_t row)
{
    uint32_t *out = (uint32_t *)column->out + row;
    for (uint32_t i = 0; i < count; i++) {
        const uint8_t *field = records[i] + column->offset;
        out[i] = kc_intern_one(column->interner, column->width == 8 ? load64(field) : load32(field));
        if (out[i] == UINT32_MAX)
            return -1;
    }
    return 0;
}

static int flush(kc_kind *kind, const kc_column *columns, batch *b)
{
    for (uint32_t c = 0; c < kind->column_count; c++) {
        const kc_column *column = columns + kind->first_column + c;
        if (column->operation == KC_COPY)
            copy_field(column, b->records, b->count, kind->rows);
        else if (column->operation == KC_DURATION)
            copy_duration(column, b->records, b->count, kind->rows);
        else if (copy_number(column, b->records, b->count, kind->rows))
            return -1;
    }
    kind->rows += b->count;
    b->count = 0;
    return 0;
}

void kc_decode(const uint8_t *data, uint64_t size, kc_kind *kinds, uint32_t kind_count, const kc_column *columns,
               kc_decoded *result)
{
    batch batches[MAX_KINDS];
    uint8_t index[KIND_LIMIT];
    memset(index, 0xFF, sizeof index);
    memset(result, 0, sizeof *result);
    for (uint32_t k = 0; k < kind_count && k < MAX_KINDS; k++) {
        batches[k].count = 0;
        if (kinds[k].kind < KIND_LIMIT && kinds[k].record_bytes >= 8)
            index[kinds[k].kind] = (uint8_t)k;
    }
    uint64_t at = 0, records = 0;
    while (at < size) {
        if (size - at < 8) {
            result->status = KC_TORN;
            break;
        }
        const uint8_t *record = data + at;
        result->kind = load32(record);
        if (result->kind >= KIND_LIMIT || index[result->kind] == 0xFF) {
            result->status = KC_UNKNOWN_KIND;
            break;
        }
        kc_kind *kind = kinds + index[result->kind];
        if (kind->record_bytes > size - at) {
            result->status = KC_TORN;
            break;
        }
        if (kind->column_count) {
            batch *b = batches + index[result->kind];
            if (kind->rows + b->count >= kind->capacity) {
                result->status = KC_FULL;
                break;
            }
            b->records[b->count++] = record;
            if (b->count == BATCH && flush(kind, columns, b)) {
                result->status = KC_NO_MEMORY;
                return;
            }
        } else {
            kind->rows++;
        }
        at += kind->record_bytes;
        records++;
    }
    result->consumed = at;
    result->records = records;
    for (uint32_t k = 0; k < kind_count && k < MAX_KINDS; k++)
        if (batches[k].count && flush(kinds + k, columns, batches + k))
            result->status = KC_NO_MEMORY;
}
