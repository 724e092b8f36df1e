/* JSON text: where things end, what they say, and how broken texts are mended. See chrome.h.
 *
 * Threads: the caller's, without the GIL; numbers are read in a locale of the thread's own.
 * Blocks: never.
 */
#define _GNU_SOURCE
#include <locale.h>
#include <stdlib.h>
#include <string.h>

#include "chrome/chrome.h"

#define ONES 0x0101010101010101ull
#define HIGHS 0x8080808080808080ull
#define MAX_DEPTH 512
#define MAX_LENIENT 65536 /* bytes of a text whose end is guessed */
#define MAX_DIGITS 19

static const char *fail(kc_scan *s, const char *p, uint32_t why) {
    s->why = p >= s->end ? KC_WHY_END : why;
    return NULL;
}

static int hex(char c) {
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    c |= 32;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static int hex4(const char *p) {
    int value = 0;
    for (int i = 0; i < 4; i++) {
        int digit = hex(p[i]);
        if (digit < 0) {
            return -1;
        }
        value = value << 4 | digit;
    }
    return value;
}

/* Bytes of the escape at p (a backslash) if it is one of JSON's, else 0. */
static unsigned escape_bytes(const char *p) {
    switch (p[1]) {
    case '"':
    case '\\':
    case '/':
    case 'b':
    case 'f':
    case 'n':
    case 'r':
    case 't': return 2;
    case 'u': return hex4(p + 2) >= 0 ? 6 : 0;
    default: return 0;
    }
}

/* Whether what follows the quote at p shows that the text ends there. */
static int closes(const char *p, uint32_t in_list) {
    p = kc_space(p + 1);
    if (in_list && *p == ']') {
        return 1;
    }
    if (!in_list && *p == '}') {
        p = kc_space(p + 1);
        return *p == ',' || *p == ']' || *p == '}' || !*p;
    }
    if (*p != ',') {
        return 0;
    }
    p = kc_space(p + 1);
    if (in_list) {
        return *p == '"' || *p == '{' || *p == '[' || *p == '-' || (*p >= '0' && *p <= '9');
    }
    if (*p != '"') {
        return 0;
    }
    const char *key = ++p;
    while (*p && *p != '"' && *p != '\\' && *p != '\n' && p - key < 64) {
        p++;
    }
    return *p == '"' && *kc_space(p + 1) == ':';
}

int kc_like_event(const char *p) {
    static const char *const keys[] = {"ph", "name", "cat", "pid", "tid", "ts", "dur", "id", "args", "s", "bp"};
    p = kc_space(p + 1);
    if (*p != '"') {
        return 0;
    }
    for (unsigned i = 0; i < sizeof keys / sizeof *keys; i++) {
        size_t bytes = strlen(keys[i]);
        if (!strncmp(p + 1, keys[i], bytes) && p[1 + bytes] == '"') {
            return *kc_space(p + 2 + bytes) == ':';
        }
    }
    return 0;
}

/* Whether the quote at p is that of the next event's first member: the text that began at `begin` never ended. */
static int next_event(const char *begin, const char *p) {
    while (p > begin && (p[-1] == ' ' || p[-1] == '\n' || p[-1] == '\r' || p[-1] == '\t')) {
        p--;
    }
    return p > begin && p[-1] == '{' && kc_like_event(p - 1);
}

const char *kc_scan_string(kc_scan *s, const char *p, uint32_t in_list) {
    const char *begin = p;
    for (;;) {
        while (s->end - p >= 8) {
            uint64_t word;
            memcpy(&word, p, 8);
            uint64_t quote = word ^ 0x22 * ONES, slash = word ^ 0x5C * ONES;
            uint64_t hit = ((quote - ONES) & ~quote) | ((slash - ONES) & ~slash) | ((word - 0x20 * ONES) & ~word);
            hit &= HIGHS;
            if (hit) {
                p += __builtin_ctzll(hit) >> 3;
                break;
            }
            p += 8;
        }
        if (p >= s->end || (s->lenient && p - begin > MAX_LENIENT)) {
            return fail(s, p, KC_WHY_NO_VALUE);
        }
        unsigned char c = (unsigned char)*p;
        if (c == '"') {
            if (!s->lenient || closes(p, in_list)) {
                return p;
            }
            if (next_event(begin, p)) {
                return fail(s, p, KC_WHY_NO_VALUE);
            }
            s->flags |= KC_ODD;
            p++;
        } else if (c == '\\') {
            s->flags |= KC_ESCAPES;
            unsigned bytes = escape_bytes(p);
            if (s->lenient && p[1] == '"' && closes(p + 1, in_list)) {
                s->flags |= KC_ODD; /* a path that ends with a backslash */
                return p + 1;
            }
            if (bytes > (uint64_t)(s->end - p) || (!bytes && s->end - p < 6 && !s->final)) {
                return fail(s, s->end, KC_WHY_END);
            }
            if (!bytes) {
                s->flags |= KC_ODD;
            }
            p += bytes ? bytes : 1;
        } else {
            if (c == '\n' && s->lenient && s->flags & KC_ODD) {
                return fail(s, p, KC_WHY_NO_VALUE); /* not both: quotes inside and more than one line */
            }
            if (c < 0x20) {
                s->flags |= KC_ODD;
            }
            p++;
        }
    }
}

/* Copies the inside of a string so that it is valid JSON. */
static int mend_string(kc_text *out, const char *p, const char *end) {
    static const char digits[] = "0123456789abcdef";
    for (; p < end; p++) {
        unsigned char c = (unsigned char)*p;
        if (kc_text_reserve(out, 8)) {
            return -1;
        }
        char *to = out->data + out->size;
        if (c == '\\') {
            unsigned bytes = escape_bytes(p);
            if (bytes && p + bytes <= end) {
                memcpy(to, p, bytes);
                out->size += bytes;
                p += bytes - 1;
            } else {
                memcpy(to, "\\\\", 2);
                out->size += 2;
            }
        } else if (c == '"') {
            memcpy(to, "\\\"", 2);
            out->size += 2;
        } else if (c < 0x20) {
            memcpy(to, "\\u00", 4);
            to[4] = digits[c >> 4];
            to[5] = digits[c & 15];
            out->size += 6;
        } else {
            *to = (char)c;
            out->size++;
        }
    }
    return 0;
}

static const struct {
    const char *text, *json;
    uint8_t bytes, odd;
} WORDS[] = {
    {"true", "true", 4, 0},    {"false", "false", 5, 0},       {"null", "null", 4, 0},
    {"NaN", "NaN", 3, 0},      {"Infinity", "Infinity", 8, 0}, {"-Infinity", "-Infinity", 9, 0},
    {"N/A", "\"N/A\"", 3, 1},  {"nan", "NaN", 3, 1},           {"-nan", "NaN", 4, 1},
    {"inf", "Infinity", 3, 1}, {"-inf", "-Infinity", 4, 1},    {"None", "null", 4, 1},
};

/* Whether the end of the data may have cut what is no value: a word, or a number behind its point or exponent. */
static int may_be_cut(const kc_scan *s, const char *p) {
    if (s->end - p < 12) {
        return 1;
    }
    while (p < s->end && ((*p >= '0' && *p <= '9') || *p == '.' || *p == '-' || *p == '+' || *p == 'e' || *p == 'E')) {
        p++;
    }
    return p >= s->end;
}

/* A word or number. */
static const char *scan_plain(kc_scan *s, const char *p, kc_text *out) {
    for (unsigned i = 0; i < sizeof WORDS / sizeof *WORDS; i++) {
        if (*p != *WORDS[i].text || memcmp(p, WORDS[i].text, WORDS[i].bytes)) {
            continue;
        }
        if (WORDS[i].odd) {
            s->flags |= KC_ODD;
        }
        if (out && kc_text_append(out, WORDS[i].json, strlen(WORDS[i].json))) {
            return fail(s, s->end - 1, KC_WHY_NO_MEMORY);
        }
        return p + WORDS[i].bytes;
    }
    kc_number number;
    const char *end = kc_scan_number(p, &number);
    if (!end) {
        return fail(s, !s->final && may_be_cut(s, p) ? s->end : p, KC_WHY_NO_VALUE);
    }
    if (out && kc_text_append(out, p, (uint64_t)(end - p))) {
        return fail(s, s->end - 1, KC_WHY_NO_MEMORY);
    }
    return end;
}

static const char *scan_text(kc_scan *s, const char *p, uint32_t in_list, kc_text *out) {
    const char *end = kc_scan_string(s, p + 1, in_list);
    if (!end) {
        return NULL;
    }
    if (out && (kc_text_append(out, "\"", 1) || mend_string(out, p + 1, end) || kc_text_append(out, "\"", 1))) {
        return fail(s, s->end - 1, KC_WHY_NO_MEMORY);
    }
    return end + 1;
}

const char *kc_scan_value(kc_scan *s, const char *p, kc_text *out) {
    uint8_t list[MAX_DEPTH];
    unsigned depth = 0;
    for (;;) {
        int opened = 0;
        p = kc_space(p);
        char c = *p;
        if (c == '"') {
            p = scan_text(s, p, depth && list[depth - 1], out);
        } else if (c == '{' || c == '[') {
            if (depth == MAX_DEPTH) {
                return fail(s, p, KC_WHY_DEPTH);
            }
            list[depth++] = c == '[';
            opened = 1;
            if (out && kc_text_append(out, p, 1)) {
                return fail(s, s->end - 1, KC_WHY_NO_MEMORY);
            }
            p++;
        } else {
            p = scan_plain(s, p, out);
        }
        if (!p) {
            return NULL;
        }
        for (;;) { /* to the next value, or out of all that is open */
            if (!depth) {
                return p;
            }
            p = kc_space(p);
            char close = list[depth - 1] ? ']' : '}';
            if (*p == close) {
                if (out && kc_text_append(out, p, 1)) {
                    return fail(s, s->end - 1, KC_WHY_NO_MEMORY);
                }
                p++;
                depth--;
                opened = 0;
                continue;
            }
            if (!opened) {
                if (*p != ',') {
                    return fail(s, p, KC_WHY_NO_COMMA);
                }
                if (out && kc_text_append(out, ",", 1)) {
                    return fail(s, s->end - 1, KC_WHY_NO_MEMORY);
                }
                p = kc_space(p + 1);
            }
            break;
        }
        if (list[depth - 1]) {
            continue;
        }
        if (*p != '"') {
            return fail(s, p, KC_WHY_NO_KEY);
        }
        uint32_t lenient = s->lenient;
        s->lenient = 0; /* keys are never in doubt */
        p = scan_text(s, p, 0, out);
        s->lenient = lenient;
        if (!p) {
            return NULL;
        }
        p = kc_space(p);
        if (*p != ':') {
            return fail(s, p, KC_WHY_NO_COLON);
        }
        if (out && kc_text_append(out, ":", 1)) {
            return fail(s, s->end - 1, KC_WHY_NO_MEMORY);
        }
        p++;
    }
}

const char *kc_scan_number(const char *p, kc_number *n) {
    n->mantissa = 0;
    n->exponent = 0;
    n->exact = n->integer = 1;
    n->negative = *p == '-';
    p += n->negative;
    unsigned digits = 0;
    const char *first = p;
    for (; *p >= '0' && *p <= '9'; p++) {
        if (digits < MAX_DIGITS) {
            n->mantissa = n->mantissa * 10 + (uint64_t)(*p - '0');
            digits += n->mantissa != 0;
        } else {
            unsigned digit = (unsigned)(*p - '0');
            if (digits == MAX_DIGITS && n->exponent == 0 && n->mantissa <= (UINT64_MAX - digit) / 10) {
                n->mantissa = n->mantissa * 10 + digit; /* 20 digits of a 64-bit number */
                digits++;
            } else {
                n->exact = 0;
                n->exponent += n->exponent < 100000;
            }
        }
    }
    if (p == first || (*first == '0' && p - first > 1)) {
        return NULL;
    }
    if (*p == '.') {
        n->integer = 0;
        const char *point = ++p;
        for (; *p >= '0' && *p <= '9'; p++) {
            if (digits < MAX_DIGITS) {
                n->mantissa = n->mantissa * 10 + (uint64_t)(*p - '0');
                digits += n->mantissa != 0;
                n->exponent -= n->exponent > -100000;
            } else {
                n->exact &= *p == '0';
            }
        }
        if (p == point) {
            return NULL;
        }
    }
    if (*p == 'e' || *p == 'E') {
        n->integer = 0;
        p++;
        int down = *p == '-', power = 0;
        p += *p == '-' || *p == '+';
        const char *begin = p;
        for (; *p >= '0' && *p <= '9'; p++) {
            if (power < 100000) {
                power = power * 10 + (*p - '0');
            }
        }
        if (p == begin) {
            return NULL;
        }
        n->exponent += down ? -power : power;
    }
    return p;
}

double kc_number_value(const kc_number *n, const char *begin, const char *end) {
    static const double powers[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                    1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    if (n->exact && n->mantissa <= 1ull << 53 && n->exponent >= -22 && n->exponent <= 22) {
        double value = (double)n->mantissa; /* both are exact, so that one operation rounds correctly */
        value = n->exponent < 0 ? value / powers[-n->exponent] : value * powers[n->exponent];
        return n->negative ? -value : value;
    }
    char text[512], *last;
    if (end - begin >= (ptrdiff_t)sizeof text) {
        end = begin + sizeof text - 1; /* more digits do not change a double but at ties */
    }
    memcpy(text, begin, (size_t)(end - begin));
    text[end - begin] = 0;
    locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0); /* the program's may have another decimal point */
    double value = plain ? strtod_l(text, &last, plain) : strtod(text, &last);
    if (plain) {
        freelocale(plain);
    }
    return value;
}

static char *put_utf8(char *to, unsigned code) {
    if (code < 0x80) {
        *to++ = (char)code;
    } else if (code < 0x800) {
        *to++ = (char)(0xC0 | code >> 6);
        *to++ = (char)(0x80 | (code & 63));
    } else if (code < 0x10000) {
        *to++ = (char)(0xE0 | code >> 12);
        *to++ = (char)(0x80 | (code >> 6 & 63));
        *to++ = (char)(0x80 | (code & 63));
    } else {
        *to++ = (char)(0xF0 | code >> 18);
        *to++ = (char)(0x80 | (code >> 12 & 63));
        *to++ = (char)(0x80 | (code >> 6 & 63));
        *to++ = (char)(0x80 | (code & 63));
    }
    return to;
}

int kc_unescape(kc_text *out, const char *p, const char *end) {
    int halves = 0;
    if (kc_text_reserve(out, (uint64_t)(end - p) + 8)) {
        return -1;
    }
    char *to = out->data + out->size;
    while (p < end) {
        unsigned bytes = *p == '\\' ? escape_bytes(p) : 0;
        if (!bytes || p + bytes > end) {
            *to++ = *p++;
            continue;
        }
        switch (p[1]) {
        case 'b': *to++ = '\b'; break;
        case 'f': *to++ = '\f'; break;
        case 'n': *to++ = '\n'; break;
        case 'r': *to++ = '\r'; break;
        case 't': *to++ = '\t'; break;
        case 'u': {
            unsigned code = (unsigned)hex4(p + 2);
            if (code >= 0xD800 && code < 0xE000) {
                int low = code < 0xDC00 && end - p >= 12 && p[6] == '\\' && p[7] == 'u' ? hex4(p + 8) : -1;
                if (low >= 0xDC00 && low < 0xE000) {
                    code = 0x10000 + ((code & 0x3FF) << 10) + ((unsigned)low & 0x3FF);
                    p += 6;
                } else {
                    code = 0xFFFD;
                    halves = 1;
                }
            }
            to = put_utf8(to, code);
            break;
        }
        default: *to++ = p[1];
        }
        p += bytes;
    }
    out->size = (uint64_t)(to - out->data);
    return halves;
}
