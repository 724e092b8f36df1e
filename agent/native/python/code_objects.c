/* Code objects and texts, see frame_walk.h. Objects are trusted only if their type is right, and no pointer is followed
 * directly.
 *
 * Threads: the sampler's without the GIL, or the agent's (kc_sampler_look, _read_text) with it.
 * Blocks: never; one system call for each read.
 */
#include "python/frame_walk.h"

#define CODE_BYTES_MOST 256u
#define CODES_AT_ONCE 32u
#define TEXT_BYTES_MOST 64u  /* bytes read before the characters of a text */
#define CHARACTERS_MOST 256u /* where the characters may begin, at most */
#define NAMES_AT_ONCE 32u

bool code_fits(const struct kc_sampler_layout *layout) {
    const uint32_t in_code[] = {layout->object_type, layout->object_size,     layout->code_filename,
                                layout->code_name,   layout->code_first_line, layout->code_lines,
                                layout->code_names,  layout->code_variables};
    const uint32_t characters = FARTHER(FARTHER(layout->text_ascii, layout->text_compact),
                                        FARTHER(layout->bytes_value, layout->tuple_items));
    return offsets_fit(in_code, sizeof in_code / sizeof *in_code, CODE_BYTES_MOST) &&
           FARTHER(layout->text_length, layout->text_state) <= TEXT_BYTES_MOST - sizeof(uint64_t) &&
           characters <= CHARACTERS_MOST && layout->text_kind_shift < 32 && layout->code_bytecode <= CODE_BYTES_MOST;
}

static uint32_t code_bytes(const struct kc_sampler_layout *layout) {
    const uint32_t last = FARTHER(FARTHER(layout->code_filename, layout->code_name),
                                  FARTHER(layout->code_lines, layout->code_first_line));
    const uint32_t names = FARTHER(layout->code_names, layout->code_variables);
    return FARTHER(FARTHER(last, names), FARTHER(layout->object_type, layout->object_size)) +
           (uint32_t)sizeof(uint64_t);
}

/* Freed memory keeps its contents until it is reused; only the word of the reference count is overwritten at once by
 * the allocators: with zero, or with a pointer, which is larger. Bits 48 to 63 are flags from 3.14 on. Builds without a
 * GIL have no such count, and another place for the type. */
static bool is_alive(const struct kc_sampler_layout *layout, const uint8_t *object) {
    const uint64_t references = word_in(object, 0);
    return layout->object_type != sizeof references || ((uint32_t)references != 0 && (uint16_t)(references >> 32) == 0);
}

static bool read_code(const struct kc_sampler_layout *layout, const uint8_t *object, struct code_identity *code) {
    code->filename = word_in(object, layout->code_filename);
    code->name = word_in(object, layout->code_name);
    code->lines = word_in(object, layout->code_lines);
    code->names = layout->code_names != 0 ? word_in(object, layout->code_names) : 0;
    code->variables = layout->code_names != 0 ? word_in(object, layout->code_variables) : 0;
    memcpy(&code->first_line, object + layout->code_first_line, sizeof code->first_line);
    code->units = layout->code_bytecode != 0 ? (uint32_t)word_in(object, layout->object_size) : 0;
    return word_in(object, layout->object_type) == layout->code_type && is_alive(layout, object);
}

static uint64_t mix(uint64_t value, uint64_t with) { return (value ^ with) * 0x9E3779B97F4A7C15u + (value >> 29); }

/* Reads length and hash of each code's name and file; the hash follows the length in all versions. */
static bool read_texts(const struct walker_of_stacks *walker, struct code_identity *codes, uint32_t count) {
    uint64_t addresses[2 * CODES_AT_ONCE];
    uint64_t words[2 * CODES_AT_ONCE][2];
    uint32_t of_file[CODES_AT_ONCE];
    uint32_t pieces = count;
    for (uint32_t i = 0; i < count; i++) {
        addresses[i] = codes[i].name + walker->layout->text_length;
        if (i == 0 || codes[i].filename != codes[i - 1].filename) { /* neighbours often have the same file */
            addresses[pieces++] = codes[i].filename + walker->layout->text_length;
        }
        of_file[i] = pieces - 1;
    }
    if (!memory_gather(&walker->memory, words, addresses, pieces, sizeof words[0])) {
        return false;
    }
    for (uint32_t i = 0; i < count; i++) {
        const uint64_t name = mix(words[i][0], words[i][1]);
        codes[i].texts = mix(mix(name, words[of_file[i]][0]), words[of_file[i]][1]);
    }
    return true;
}

bool walk_codes(struct walker_of_stacks *walker, const struct stack *stack, struct code_identity *codes) {
    const uint32_t size = code_bytes(walker->layout);
    uint8_t bytes[CODES_AT_ONCE * CODE_BYTES_MOST];
    uint64_t addresses[CODES_AT_ONCE];
    for (uint32_t done = 0; done < stack->depth;) {
        const uint32_t left = stack->depth - done;
        const uint32_t count = left < CODES_AT_ONCE ? left : CODES_AT_ONCE;
        for (uint32_t i = 0; i < count; i++) {
            addresses[i] = stack->frames[done + i].code;
        }
        if (!memory_gather(&walker->memory, bytes, addresses, count, size)) {
            return false;
        }
        for (uint32_t i = 0; i < count; i++) {
            codes[done + i].address = addresses[i];
            if (!read_code(walker->layout, bytes + (size_t)i * size, &codes[done + i])) {
                return false;
            }
        }
        if (!read_texts(walker, codes + done, count)) {
            return false;
        }
        done += count;
    }
    return true;
}

int32_t walk_instruction(const struct kc_sampler_layout *layout, const struct walked_frame *frame,
                         const struct code_identity *code) {
    if (layout->frames == KC_FRAME_OBJECTS) {
        const int64_t unit = (int64_t)frame->instruction;
        return unit < 0 || unit > INT32_MAX / 2 ? -1 : (int32_t)(unit * layout->instruction_scale);
    }
    const int64_t offset = (int64_t)(frame->instruction - code->address - layout->code_bytecode);
    return offset < 0 || offset >= 2 * (int64_t)code->units || offset > INT32_MAX ? -1 : (int32_t)offset;
}

/* ---- texts ---- */

static uint32_t put_utf8(char *text, uint32_t character) {
    if (character >= 0xD800 && character < 0xE000) { /* a byte that was not UTF-8 when Python read it */
        character = '?';
    }
    if (character < 0x80) {
        text[0] = (char)character;
        return 1;
    }
    const uint32_t more = character < 0x800 ? 1 : character < 0x10000 ? 2 : 3;
    for (uint32_t i = more; i > 0; i--) {
        text[i] = (char)(0x80 | (character & 0x3F));
        character >>= 6;
    }
    text[0] = (char)((0xFF00u >> (more + 1) & 0xFF) | character);
    return more + 1;
}

int32_t walk_text(const struct walker_of_stacks *walker, uint64_t address, char *text, uint32_t most) {
    const struct kc_sampler_layout *layout = walker->layout;
    uint8_t head[TEXT_BYTES_MOST];
    uint8_t characters[1024];
    uint32_t state;
    const uint32_t last = FARTHER(layout->text_state, layout->text_length) + (uint32_t)sizeof(uint64_t);
    if (!memory_read(&walker->memory, head, address, last)) {
        return -1;
    }
    memcpy(&state, head + layout->text_state, sizeof state);
    state >>= layout->text_kind_shift;
    const uint32_t kind = state & 7;
    if ((kind != 1 && kind != 2 && kind != 4) || (state & 8) == 0) {
        return -1;
    }
    const uint64_t length = word_in(head, layout->text_length);
    uint64_t from = address + ((state & 16) != 0 ? layout->text_ascii : layout->text_compact);
    uint32_t used = 0;
    for (uint64_t done = 0; done < length;) {
        const uint64_t room = sizeof characters / kind;
        const uint32_t count = (uint32_t)(length - done < room ? length - done : room);
        if (!memory_read(&walker->memory, characters, from, (size_t)count * kind)) {
            return -1;
        }
        for (uint32_t i = 0; i < count; i++) {
            uint32_t character = 0;
            memcpy(&character, characters + (size_t)i * kind, kind); /* little-endian */
            if (used + 4 > most || character > 0x10FFFF) {
                return character > 0x10FFFF ? -1 : (int32_t)used;
            }
            used += put_utf8(text + used, character);
        }
        done += count;
        from += (uint64_t)count * kind;
    }
    return (int32_t)used;
}

int32_t walk_bytes(const struct walker_of_stacks *walker, uint64_t address, uint8_t *data, uint32_t most) {
    const struct kc_sampler_layout *layout = walker->layout;
    const uint64_t size = memory_word(&walker->memory, address + layout->object_size);
    const uint32_t kept = size > most ? most : (uint32_t)size;
    if (kept > 0 && !memory_read(&walker->memory, data, address + layout->bytes_value, kept)) {
        return -1;
    }
    return (int32_t)kept;
}

int32_t walk_names(const struct walker_of_stacks *walker, uint64_t address, char *texts, uint32_t most) {
    const struct kc_sampler_layout *layout = walker->layout;
    const uint64_t count = memory_word(&walker->memory, address + layout->object_size);
    uint64_t items[NAMES_AT_ONCE];
    uint32_t used = 0;
    for (uint64_t i = 0; i < count; i++) {
        const uint32_t place = i % NAMES_AT_ONCE;
        if (place == 0) {
            const uint64_t left = count - i < NAMES_AT_ONCE ? count - i : NAMES_AT_ONCE;
            if (!memory_read(&walker->memory, items, address + layout->tuple_items + i * sizeof *items,
                             left * sizeof *items)) {
                return -1;
            }
        }
        const int32_t length = walk_text(walker, items[place], texts + used, most - used);
        if (length < 0 || used + (uint32_t)length + 4 > most) { /* 4: otherwise it may have been cut */
            return -1;
        }
        used += (uint32_t)length;
        texts[used++] = '\0';
    }
    return (int32_t)used;
}

int32_t walk_bytecode(const struct walker_of_stacks *walker, const struct code_identity *code, uint8_t *data,
                      uint32_t most) {
    const uint64_t bytes = 2 * (uint64_t)code->units;
    return bytes <= most && memory_read(&walker->memory, data, code->address + walker->layout->code_bytecode, bytes)
               ? (int32_t)bytes
               : -1;
}
