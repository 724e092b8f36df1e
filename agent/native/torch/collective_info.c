/* See collective_info.h.
 *
 * torch::ParamCommsDebugInfo belongs to the calling thread, is pushed around the op (RECORD_PARAM_COMMS), and is the
 * source of Kineto's arguments of a collective. It is read through the layout table, if the object's virtual table
 * shows that it is of this class: it must be libtorch_cpu's.
 *
 * Threads: ops_comms_describe runs on the thread of the program that begins the op; ops_comms_open on the agent's.
 * Blocks: never while describing: no lock, no allocation, no system call. Opening takes the loader's lock.
 */
#define _GNU_SOURCE
#include "torch/collective_info.h"

#include <dlfcn.h>
#include <string.h>

#include "torch/read_object.h"

#define TEXT_MOST 200u
#define NUMBERS_MOST 30u /* as many as Kineto shows */
#define NEW_STRING_BYTES 32u
#define OLD_STRING_LENGTH (-24) /* from its text */
#define FIRST_METHOD 16u        /* in a virtual table */

static struct {
    const uint8_t *(*get)(uint64_t kind); /* c10::ThreadLocalDebugInfo::get; the kind is an enum or a pointer */
    const uint64_t *kind;                 /* if it is an object */
    const uint8_t *table;
} comms_of;

static void put(struct ops_comms *comms, const void *data, uint32_t bytes) {
    memcpy(comms->text + comms->bytes, data, bytes);
    comms->bytes += bytes;
}

static void put_text(const struct kc_observer_layout *layout, const uint8_t *string, struct ops_comms *comms) {
    const uint8_t *text = ops_pointer(string);
    const uint64_t length = layout->string_bytes == NEW_STRING_BYTES ? ops_word(string + sizeof text)
                                                                     : ops_word(text + OLD_STRING_LENGTH);
    const uint8_t kept = (uint8_t)(length < TEXT_MOST ? length : TEXT_MOST);
    put(comms, &kept, sizeof kept);
    put(comms, text, kept);
}

/* If there are more than Kineto shows: the first ones and the last. */
static void put_numbers(const uint8_t *vector, struct ops_comms *comms) {
    const uint8_t *first = ops_pointer(vector), *end = ops_pointer(vector + sizeof first);
    const uint32_t count = first == NULL ? 0 : (uint32_t)((uint64_t)(end - first) / sizeof(int64_t));
    put(comms, &count, sizeof count);
    if (count > NUMBERS_MOST) {
        put(comms, first, (NUMBERS_MOST - 1) * (uint32_t)sizeof(int64_t));
        put(comms, end - sizeof(int64_t), sizeof(int64_t));
    } else if (count > 0) {
        put(comms, first, count * (uint32_t)sizeof(int64_t));
    }
}

/* They lie side by side, as int up to torch 2.4. */
static void put_elements(const struct kc_observer_layout *layout, const uint8_t *info, struct ops_comms *comms) {
    for (uint32_t i = 0; i < 2; i++) {
        const uint8_t *at = info + (i == 0 ? layout->comms_in : layout->comms_out);
        int32_t narrow;
        memcpy(&narrow, at, sizeof narrow);
        const int64_t count = layout->comms_out - layout->comms_in == sizeof narrow ? narrow : (int64_t)ops_word(at);
        put(comms, &count, sizeof count);
    }
}

void ops_comms_open(const char *path) {
    void *library = dlopen(path, RTLD_NOLOAD | RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        return;
    }
    void *get = dlsym(library, "_ZN3c1020ThreadLocalDebugInfo3getENS_13DebugInfoKindE");
    const uint8_t *table = dlsym(library, "_ZTVN5torch19ParamCommsDebugInfoE");
    memcpy(&comms_of.get, &get, sizeof get);
    comms_of.table = table == NULL ? NULL : table + FIRST_METHOD;
    comms_of.kind = dlsym(library, "_ZN3c1013DebugInfoKind16PARAM_COMMS_INFOE");
    dlclose(library);
}

bool ops_comms_describe(const struct kc_observer_layout *layout, struct ops_comms *comms) {
    const bool is_object = layout->comms_kind == 0;
    if (comms_of.get == NULL || comms_of.table == NULL || (is_object && comms_of.kind == NULL)) {
        return false;
    }
    const uint8_t *info = comms_of.get(is_object ? *comms_of.kind : layout->comms_kind);
    if (info == NULL || ops_pointer(info) != comms_of.table) {
        return false;
    }
    comms->bytes = 0;
    comms->sequence = layout->comms_sequence == 0 ? -1 : (int64_t)ops_word(info + layout->comms_sequence);
    comms->transfer = layout->comms_transfer == 0 ? 0 : info[layout->comms_transfer];
    put(comms, info + layout->comms_rank, sizeof(int32_t));
    put(comms, info + layout->comms_world, sizeof(int32_t));
    put(comms, info + layout->comms_first, sizeof(int32_t));
    put(comms, info + layout->comms_stride, sizeof(int32_t));
    put_elements(layout, info, comms);
    put(comms, info + layout->comms_dtype, sizeof(int8_t));
    put_text(layout, info + layout->comms_name, comms);
    put_text(layout, info + layout->comms_group, comms);
    put_text(layout, info + layout->comms_description, comms);
    put_numbers(info + layout->comms_in_splits, comms);
    put_numbers(info + layout->comms_out_splits, comms);
    put_numbers(info + layout->comms_ranks, comms);
    return true;
}
