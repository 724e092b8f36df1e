/* Columns to rows of text, and lanes for overlapping events. See codec.h.
 *
 * Threads: the caller's, without the GIL; it works on the caller's arrays alone.
 * Blocks: never.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codec/codec.h"

#define NUMBER_BYTES 32 /* the longest number: sign, 20 digits, point, six decimals; 17 digits and an exponent */

static const char PAIRS[] =
    "0001020304050607080910111213141516171819202122232425262728293031323334353637383940414243444546474849"
    "5051525354555657585960616263646566676869707172737475767778798081828384858687888990919293949596979899";

/* 10^n for n >= 1; 0 for n = 0, so that 0 has one digit */
static const uint64_t POWERS[] = {0,
                                  10,
                                  100,
                                  1000,
                                  10000,
                                  100000,
                                  1000000,
                                  10000000,
                                  100000000,
                                  1000000000,
                                  10000000000,
                                  100000000000,
                                  1000000000000,
                                  10000000000000,
                                  100000000000000,
                                  1000000000000000,
                                  10000000000000000,
                                  100000000000000000,
                                  1000000000000000000,
                                  10000000000000000000u};

static unsigned digits_of(uint64_t value) {
    unsigned guess = (64 - (unsigned)__builtin_clzll(value | 1)) * 1233 >> 12; /* log10(2) = 1233 / 4096 */
    return guess + (value >= POWERS[guess]);
}

static char *put_unsigned(char *p, uint64_t value) {
    if (value < 10) {
        *p = (char)('0' + value);
        return p + 1;
    }
    char *end = p + digits_of(value), *at = end;
    while (value >= 100) {
        at -= 2;
        memcpy(at, PAIRS + 2 * (value % 100), 2);
        value /= 100;
    }
    if (value >= 10) {
        memcpy(p, PAIRS + 2 * value, 2);
    } else {
        *p = (char)('0' + value);
    }
    return end;
}

static char *put_signed(char *p, int64_t value) {
    if (value < 0) {
        *p++ = '-';
        return put_unsigned(p, 0 - (uint64_t)value);
    }
    return put_unsigned(p, (uint64_t)value);
}

static char *put_microseconds(char *p, int64_t ns) {
    uint64_t value = ns < 0 ? 0 : (uint64_t)ns;
    unsigned rest = (unsigned)(value % 1000);
    p = put_unsigned(p, value / 1000);
    *p++ = '.';
    *p++ = (char)('0' + rest / 100);
    memcpy(p, PAIRS + 2 * (rest % 100), 2);
    return p + 2;
}

/* Not a number or beyond 10^12 (nothing that we write is): 0. */
static char *put_decimal(char *p, double value) {
    if (!(value > -1e12 && value < 1e12)) {
        *p = '0';
        return p + 1;
    }
    if (value < 0) {
        *p++ = '-';
        value = -value;
    }
    uint64_t millionths = (uint64_t)(value * 1e6 + 0.5);
    unsigned rest = (unsigned)(millionths % 1000000);
    p = put_unsigned(p, millionths / 1000000);
    if (!rest) {
        return p;
    }
    *p++ = '.';
    memcpy(p, PAIRS + 2 * (rest / 10000), 2);
    memcpy(p + 2, PAIRS + 2 * (rest / 100 % 100), 2);
    memcpy(p + 4, PAIRS + 2 * (rest % 100), 2);
    p += 6;
    while (p[-1] == '0') {
        p--;
    }
    return p;
}

static char *put_time(char *p, int64_t ns) {
    if (ns >= 0) {
        return put_microseconds(p, ns);
    }
    *p++ = '-';
    uint64_t value = 0 - (uint64_t)ns;
    unsigned rest = (unsigned)(value % 1000);
    p = put_unsigned(p, value / 1000);
    *p++ = '.';
    *p++ = (char)('0' + rest / 100);
    memcpy(p, PAIRS + 2 * (rest % 100), 2);
    return p + 2;
}

/* The shortest text that gives the double back, with a point or an exponent; what JSON has no number for: null. */
static char *put_real(char *p, double value) {
    if (!isfinite(value)) {
        memcpy(p, "null", 4);
        return p + 4;
    }
    double size = fabs(value), millionths = size < 9e9 ? rint(size * 1e6) : 0;
    if (size < 9e9 && millionths / 1e6 == size) { /* both are exact: the division rounds as reading the text does */
        if (signbit(value)) {
            *p++ = '-';
        }
        uint64_t whole = (uint64_t)millionths / 1000000;
        unsigned rest = (unsigned)((uint64_t)millionths % 1000000);
        p = put_unsigned(p, whole);
        *p++ = '.';
        memcpy(p, PAIRS + 2 * (rest / 10000), 2);
        memcpy(p + 2, PAIRS + 2 * (rest / 100 % 100), 2);
        memcpy(p + 4, PAIRS + 2 * (rest % 100), 2);
        p += 6;
        while (p[-1] == '0' && p[-2] != '.') {
            p--;
        }
        return p;
    }
    int length = 0, plain = 1;
    for (int digits = 15; digits <= 17; digits++) {
        length = snprintf(p, NUMBER_BYTES, "%.*g", digits, value);
        if (strtod(p, NULL) == value) {
            break;
        }
    }
    for (int i = 0; i < length; i++) {
        if (p[i] == 'e') {
            plain = 0;
        } else if (p[i] != '-' && p[i] != '+' && (p[i] < '0' || p[i] > '9')) {
            p[i] = '.', plain = 0; /* whatever the program's locale has for it */
        }
    }
    p += length;
    if (plain) {
        memcpy(p, ".0", 2);
        p += 2;
    }
    return p;
}

static inline uint64_t get_unsigned(const kc_field *f, uint64_t row) {
    switch (f->width) {
    case 1: return ((const uint8_t *)f->column)[row];
    case 2: return ((const uint16_t *)f->column)[row];
    case 4: return ((const uint32_t *)f->column)[row];
    default: return ((const uint64_t *)f->column)[row];
    }
}

static inline int64_t get_signed(const kc_field *f, uint64_t row) {
    switch (f->width) {
    case 1: return ((const int8_t *)f->column)[row];
    case 2: return ((const int16_t *)f->column)[row];
    case 4: return ((const int32_t *)f->column)[row];
    default: return ((const int64_t *)f->column)[row];
    }
}

/* Copies in whole blocks: texts may be read, and the output written, up to KC_PADDING bytes past their ends. */
static inline __attribute__((always_inline)) char *put_bytes(char *p, const char *end, const char *bytes,
                                                             uint64_t size) {
    if (end - p < KC_PADDING || size > (uint64_t)(end - p - KC_PADDING)) {
        return NULL;
    }
    for (uint64_t at = 0; at < size; at += KC_PADDING) {
        memcpy(p + at, bytes + at, KC_PADDING);
    }
    return p + size;
}

/* Writes one field; NULL if it does not fit. */
static inline __attribute__((always_inline)) char *put_field(const kc_field *f, uint64_t row, char *p,
                                                             const char *end) {
    if (f->operation == KC_OPTIONAL && get_signed(f, row) == f->base) {
        return p;
    }
    p = put_bytes(p, end, f->literal, f->literal_bytes);
    if (!p || f->operation == KC_END) {
        return p;
    }
    if (f->operation == KC_TEXT) {
        uint64_t n = get_unsigned(f, row);
        if (n >= f->text_count) {
            return p;
        }
        return put_bytes(p, end, f->text + f->text_ends[n], f->text_ends[n + 1] - f->text_ends[n]);
    }
    if (end - p < NUMBER_BYTES) {
        return NULL;
    }
    switch (f->operation) {
    case KC_UNSIGNED: return put_unsigned(p, get_unsigned(f, row));
    case KC_SIGNED:
    case KC_OPTIONAL: return put_signed(p, get_signed(f, row));
    case KC_MICROSECONDS: return put_microseconds(p, (int64_t)(((const uint64_t *)f->column)[row] - (uint64_t)f->base));
    case KC_REAL: return put_real(p, ((const double *)f->column)[row]);
    case KC_TIME: return put_time(p, (int64_t)(((const uint64_t *)f->column)[row] - (uint64_t)f->base));
    case KC_WHOLE: return put_signed(p, (int64_t)(((const uint64_t *)f->column)[row] - (uint64_t)f->base) / 1000);
    default: return put_decimal(p, ((const double *)f->column)[row]);
    }
}

void kc_write(const kc_field *fields, uint32_t field_count, uint64_t first, uint64_t count, char *out,
              uint64_t capacity, kc_written *result) {
    const char *end = out + capacity;
    char *p = out;
    uint64_t done = 0;
    for (; done < count; done++) {
        char *at = p;
        for (uint32_t i = 0; i < field_count && at; i++) {
            at = put_field(fields + i, first + done, at, end);
        }
        if (!at) {
            break;
        }
        p = at;
    }
    result->rows = done;
    result->bytes = (uint64_t)(p - out);
    kc_spill_settle();
}

void kc_write_mixed(const kc_field *fields, const kc_row_group *groups, const uint32_t *group, const uint32_t *row,
                    uint64_t first, uint64_t count, char *out, uint64_t capacity, kc_written *result) {
    const char *end = out + capacity;
    char *p = out;
    uint64_t done = 0;
    for (; done < count; done++) {
        const kc_row_group *form = groups + group[first + done];
        const kc_field *field = fields + form->first_field, *last = field + form->field_count;
        char *at = p;
        for (; field < last && at; field++) {
            at = put_field(field, row[first + done], at, end);
        }
        if (!at) {
            break;
        }
        p = at;
    }
    result->rows = done;
    result->bytes = (uint64_t)(p - out);
    kc_spill_settle();
}

void kc_lanes(const uint32_t *track, const int64_t *start, const int64_t *end, uint64_t count, uint32_t lane_limit,
              uint8_t *lane) {
    int64_t free_at[256];
    uint32_t limit = lane_limit < 256 ? lane_limit : 256, used = 0;
    for (uint64_t i = 0; i < count; i++) {
        if (i == 0 || track[i] != track[i - 1]) {
            used = 0;
        }
        uint32_t n = 0;
        while (n < used && free_at[n] > start[i]) {
            n++;
        }
        if (n >= limit) {
            n = limit - 1;
        } else if (n == used) {
            used++;
        }
        free_at[n] = end[i];
        lane[i] = (uint8_t)n;
    }
}
