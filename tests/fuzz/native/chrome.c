/* The reader of Chrome traces.
 *
 * The last byte says how large the pieces are in which the rest is fed, each from a heap block that is not a byte longer
 * than promised. Then all columns and texts are read.
 */
#include "chrome/chrome.h"
#include "input.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))
#define ARG(key, type, column) {key, sizeof key - 1, type, KC_FIXED_COLUMNS + (column), 0, -1}

static const kc_chrome_arg ARGS[] = {
    ARG("External id", KC_T_I64, 0),
    ARG("external id", KC_T_I64, 0),
    ARG("Record function id", KC_T_U64, 1),
    ARG("Sequence number", KC_T_I32, 2),
    ARG("Fwd thread id", KC_T_U32, 3),
    ARG("finished", KC_T_BOOL, 4),
    ARG("Ev Idx", KC_T_U16, 5),
    ARG("External id", KC_T_I64, 0),
    ARG("grid", KC_T_I32X3, 1),
    ARG("block", KC_T_I32X3, 4),
    ARG("stream", KC_T_SIGNED_U32, 7),
    ARG("blocks per SM", KC_T_F64, 8),
    ARG("Addr", KC_T_U64, 0),
    ARG("", KC_T_F64, 0),
};
static const kc_chrome_kind KINDS[] = {{0, 7}, {7, 5}, {12, 1}, {13, 0}, {13, 0}, {13, 1}};
static const kc_chrome_category CATEGORIES[] = {
    {"cpu_op", 6, 0, 0, 0},
    {"kernel", 6, 0, 1, 0},
    {"_runtime", 8, 1, 0, 0},
    {",hardware_counter", 17, 1, 5, 0},
    {",hardware_counter_none", 22, 1, 5, 0},
};
static const kc_chrome_plan PLAN = {KINDS, ARGS, CATEGORIES, COUNT(KINDS), COUNT(CATEGORIES), 2, 3, 4, 5};
static const uint8_t WIDTHS[] = {8, 8, 8, 4, 4, 4, 4, 4, 4, 1, 8, 8, 8};

static volatile uint64_t sink;

static void touch(const void *bytes, uint64_t size) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < size; i++) {
        sum += ((const uint8_t *)bytes)[i];
    }
    sink += sum;
}

static void look(kc_chrome *parser, uint64_t size) {
    kc_chrome_counts counts;
    kc_chrome_count(parser, &counts);
    uint64_t rows = 0;
    for (uint32_t kind = 0; kind < COUNT(KINDS); kind++) {
        uint64_t own = kc_chrome_rows(parser, kind);
        rows += own;
        for (uint32_t column = 0; column < KC_MAX_COLUMNS; column++) {
            void *data = kc_chrome_take(parser, kind, column);
            if (data && column == KC_COLUMN_NAME) {
                for (uint64_t i = 0; i < own; i++) {
                    if (((int32_t *)data)[i] >= (int64_t)counts.strings) {
                        abort();
                    }
                }
            }
            if (data && column < COUNT(WIDTHS)) {
                touch(data, own * WIDTHS[column]);
            }
            kc_chrome_release(data);
        }
    }
    const uint64_t *ends;
    const char *strings = kc_chrome_strings(parser, &ends);
    if (counts.strings) {
        touch(strings, ends[counts.strings]);
    }
    touch(kc_chrome_tracks(parser), counts.tracks * 16);
    if (rows != counts.events || rows > size) {
        abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const uint64_t PIECES[] = {1, 7, 64, 300, 4096, 1u << 20};
    uint64_t length = size ? size - 1 : 0;
    uint64_t limit = size ? PIECES[data[length] % COUNT(PIECES)] : 1;
    kc_chrome *parser = kc_chrome_new(&PLAN);
    if (!parser) {
        abort();
    }
    uint64_t begin = 0, end = 0;
    for (uint64_t calls = 0;; calls++) {
        int final = end == length;
        char *piece = room(end - begin + KC_SCAN_PADDING, 1);
        memcpy(piece, data + begin, end - begin);
        memset(piece + end - begin, 0, KC_SCAN_PADDING);
        kc_chrome_fed fed;
        kc_chrome_feed(parser, piece, end - begin, (uint32_t) final, end - begin > 2000, &fed);
        if (fed.consumed > end - begin || fed.value_end > end - begin || calls > 8 * length + 1000) {
            abort();
        }
        begin += fed.consumed;
        free(piece);
        if (fed.status == KC_CHROME_MEMBER || fed.status == KC_CHROME_DAMAGE) {
            continue;
        }
        if (fed.status != KC_CHROME_MORE || final) {
            break;
        }
        end = end + limit < length ? end + limit : length;
    }
    look(parser, length);
    kc_chrome_free(parser);
    return 0;
}
