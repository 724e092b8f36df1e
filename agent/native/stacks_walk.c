/* See stacks_walk.h.
 *
 * Theory of operation
 *   The threads run on while their frames are read, so that nothing read here is true for sure: every pointer is only
 *   an argument of a system call, every object is checked by its type, every chain is bounded, a thread state must name
 *   the interpreter in whose list it was found.
 *
 *   A walk counts as whole if the thread's innermost frame was the same before and after it, and if it ended at the
 *   frame where the thread's stack ended last time (a frame that is just being made has no caller yet). Otherwise a
 *   second walk tells what of the first is true: frames that both found in the same places were there all the time in
 *   between. These are the stack then, and the call that the first walk saw made from the innermost of them. Only calls
 *   that were shorter than a walk (some microseconds) can be missing; their time goes to their callers.
 *
 *   It is always the first walk that counts. To drop such samples, or to repeat until the thread holds still, would be a
 *   choice in favour of code that makes few calls: functions of 20 us were found with shares 5 points too low that way.
 */
#include "stacks_walk.h"

#include <string.h>

#define ATTEMPTS 4u
#define CHAIN_MOST 2048u /* frames of all kinds */
#define FRAME_BYTES_MOST 160u
#define CODE_BYTES_MOST 256u
#define CODES_AT_ONCE 32u
#define FARTHER(a, b) ((a) > (b) ? (a) : (b))
#define TAGS 3u /* low bits of the reference to the code in a frame, from 3.14 on */

static uint64_t word_in(const uint8_t *bytes, uint32_t offset) {
    uint64_t word;
    memcpy(&word, bytes + offset, sizeof word);
    return word;
}

/* ---- interpreters and threads ---- */

uint64_t walk_interpreters(const struct walker_of_stacks *walker) {
    return memory_word(&walker->memory, walker->layout->runtime + walker->layout->runtime_interpreters);
}

uint64_t walk_next_interpreter(const struct walker_of_stacks *walker, uint64_t interpreter) {
    return memory_word(&walker->memory, interpreter + walker->layout->interpreter_next);
}

uint64_t walk_threads(const struct walker_of_stacks *walker, uint64_t interpreter) {
    return memory_word(&walker->memory, interpreter + walker->layout->interpreter_threads);
}

bool walk_thread(const struct walker_of_stacks *walker, uint64_t address, uint64_t interpreter,
                 struct python_thread *thread) {
    const struct ks_layout *layout = walker->layout;
    uint8_t bytes[512];
    const uint32_t last = FARTHER(FARTHER(layout->thread_native_id, layout->thread_id),
                                        FARTHER(layout->thread_frame, layout->thread_interpreter));
    if (last + sizeof(uint64_t) > sizeof bytes || !memory_read(&walker->memory, bytes, address, last + sizeof(uint64_t))) {
        return false;
    }
    thread->address = address;
    thread->next = word_in(bytes, layout->thread_next);
    thread->interpreter = word_in(bytes, layout->thread_interpreter);
    thread->frame = word_in(bytes, layout->thread_frame);
    thread->id = word_in(bytes, layout->thread_id);
    thread->native_id = layout->thread_native_id != 0 ? word_in(bytes, layout->thread_native_id) : 0;
    return thread->interpreter == interpreter;
}

uint64_t walk_gil(const struct walker_of_stacks *walker, uint64_t interpreter) {
    switch (walker->layout->gil) {
    case KS_GIL_IN_RUNTIME:
        return walker->layout->runtime + walker->layout->gil_offset;
    case KS_GIL_BY_POINTER:
        return memory_word(&walker->memory, interpreter + walker->layout->gil_offset);
    default:
        return 0;
    }
}

uint64_t walk_gil_holder(const struct walker_of_stacks *walker, uint64_t gil) {
    uint8_t bytes[64];
    int32_t locked;
    const uint32_t last = FARTHER(walker->layout->gil_holder, walker->layout->gil_locked);
    if (gil == 0 || last + sizeof(uint64_t) > sizeof bytes ||
        !memory_read(&walker->memory, bytes, gil, last + sizeof(uint64_t))) {
        return 0;
    }
    memcpy(&locked, bytes + walker->layout->gil_locked, sizeof locked);
    return locked == 1 ? word_in(bytes, walker->layout->gil_holder) : 0;
}

/* ---- frames ---- */

static uint64_t innermost(const struct walker_of_stacks *walker, const struct python_thread *thread) {
    const struct ks_layout *layout = walker->layout;
    const uint64_t found = memory_word(&walker->memory, thread->address + layout->thread_frame);
    if (layout->frames != KS_FRAMES_BY_CFRAME) {
        return found;
    }
    return found == 0 ? 0 : memory_word(&walker->memory, found + layout->cframe_frame);
}

/* One frame; `*shown` is false for one of the interpreter's own. */
static bool read_frame(struct walker_of_stacks *walker, uint64_t address, struct walked_frame *frame, uint64_t *previous,
                       bool *shown) {
    const struct ks_layout *layout = walker->layout;
    uint8_t bytes[FRAME_BYTES_MOST];
    const uint32_t last = FARTHER(FARTHER(layout->frame_code, layout->frame_previous),
                                        FARTHER(layout->frame_instruction, layout->frame_owner));
    const uint32_t size = last + (uint32_t)sizeof(uint64_t);
    if (size > sizeof bytes || !memory_peek(&walker->memory, bytes, address, size)) {
        return false;
    }
    *shown = true;
    *previous = word_in(bytes, layout->frame_previous);
    frame->address = address;
    frame->code = word_in(bytes, layout->frame_code);
    if (layout->frames == KS_FRAME_OBJECTS) {
        int32_t instruction;
        memcpy(&instruction, bytes + layout->frame_instruction, sizeof instruction);
        frame->instruction = (uint64_t)(int64_t)instruction;
        return word_in(bytes, layout->object_type) == layout->frame_type && frame->code != 0;
    }
    frame->code &= ~(uint64_t)TAGS;
    frame->instruction = word_in(bytes, layout->frame_instruction);
    *shown = bytes[layout->frame_owner] < layout->least_shim_owner;
    return !*shown || frame->code != 0;
}

static bool walk_once(struct walker_of_stacks *walker, uint64_t from, struct stack *stack) {
    uint64_t address = from;
    stack->depth = 0;
    stack->truncated = false;
    stack->outermost = 0;
    memory_forget(&walker->memory);
    for (uint32_t i = 0; address != 0; i++) {
        uint64_t previous;
        bool shown;
        if (i >= CHAIN_MOST || stack->depth == STACK_DEPTH_MOST) {
            stack->truncated = true;
            stack->outermost = 0;
            return true;
        }
        if (!read_frame(walker, address, &stack->frames[stack->depth], &previous, &shown)) {
            return false;
        }
        stack->depth += shown;
        stack->outermost = address;
        address = previous;
    }
    return true;
}

static bool same_place(const struct walked_frame *a, const struct walked_frame *b) {
    return a->address == b->address && a->code == b->code;
}

/* Cuts walker->stack down to what walker->second has found too. False: nothing. */
static bool keep_common(struct walker_of_stacks *walker) {
    const struct stack *second = &walker->second;
    struct stack *first = &walker->stack;
    if (first->depth == 0 || second->depth == 0) {
        return false;
    }
    /* From the outside in; each of the two may be truncated at another frame. */
    uint32_t a = first->depth;
    uint32_t b = second->depth;
    while (a > 0 && first->frames[a - 1].address != second->frames[second->depth - 1].address) {
        a--;
    }
    while (a == 0 && b > 0 && second->frames[b - 1].address != first->frames[first->depth - 1].address) {
        b--;
    }
    a = a == 0 ? first->depth : a;
    if (b == 0 || !same_place(&first->frames[a - 1], &second->frames[b - 1])) {
        return false;
    }
    while (a > 0 && b > 0 && same_place(&first->frames[a - 1], &second->frames[b - 1])) {
        a--;
        b--;
    }
    const uint32_t cut = a > 1 ? a - 1 : 0; /* the call that was seen made stays */
    first->depth -= cut;
    memmove(first->frames, first->frames + cut, first->depth * sizeof first->frames[0]);
    return true;
}

/* A second look at what walker->stack is the first of. */
static enum walk confirm(struct walker_of_stacks *walker, const struct python_thread *thread, bool still,
                         uint64_t *outermost) {
    if (!walk_once(walker, innermost(walker, thread), &walker->second)) {
        return WALK_TORN;
    }
    const struct stack *first = &walker->stack;
    if (first->outermost != walker->second.outermost && !first->truncated && !walker->second.truncated) {
        return WALK_TORN;
    }
    *outermost = first->outermost;
    if (still) {
        return first->depth == 0 ? WALK_EMPTY : WALK_WHOLE;
    }
    return keep_common(walker) ? WALK_PARTIAL : WALK_TORN;
}

enum walk walk_stack(struct walker_of_stacks *walker, const struct python_thread *thread, uint64_t *outermost) {
    enum walk found = WALK_TORN;
    for (uint32_t i = 0; i < ATTEMPTS && found == WALK_TORN; i++) {
        const uint64_t before = innermost(walker, thread);
        if (!walk_once(walker, before, &walker->stack)) {
            continue;
        }
        const bool still = innermost(walker, thread) == before;
        if (still && (walker->stack.truncated || walker->stack.outermost == *outermost)) {
            return walker->stack.depth == 0 ? WALK_EMPTY : WALK_WHOLE;
        }
        found = confirm(walker, thread, still, outermost);
    }
    return found;
}

/* ---- code objects ---- */

static uint32_t code_bytes(const struct ks_layout *layout) {
    const uint32_t last = FARTHER(FARTHER(layout->code_filename, layout->code_name),
                                        FARTHER(layout->code_lines, layout->code_first_line));
    return last + (uint32_t)sizeof(uint64_t);
}

static bool read_code(const struct ks_layout *layout, const uint8_t *object, struct code_identity *code) {
    code->filename = word_in(object, layout->code_filename);
    code->name = word_in(object, layout->code_name);
    code->lines = word_in(object, layout->code_lines);
    memcpy(&code->first_line, object + layout->code_first_line, sizeof code->first_line);
    code->units = layout->code_bytecode != 0 ? (uint32_t)word_in(object, layout->object_size) : 0;
    return word_in(object, layout->object_type) == layout->code_type;
}

static uint64_t mix(uint64_t value, uint64_t with) { return (value ^ with) * 0x9E3779B97F4A7C15u + (value >> 29); }

/* Length and hash of each code's name and file; the hash follows the length in all versions. */
static bool read_texts(const struct walker_of_stacks *walker, struct code_identity *codes, uint32_t count) {
    uint64_t addresses[2 * CODES_AT_ONCE];
    uint64_t words[2 * CODES_AT_ONCE][2];
    uint32_t of_file[CODES_AT_ONCE];
    uint32_t pieces = count;
    for (uint32_t i = 0; i < count; i++) {
        addresses[i] = codes[i].name + walker->layout->text_length;
        if (i == 0 || codes[i].filename != codes[i - 1].filename) { /* neighbours are often of one file */
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
        if (size > CODE_BYTES_MOST || !memory_gather(&walker->memory, bytes, addresses, count, size)) {
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

int32_t walk_instruction(const struct ks_layout *layout, const struct walked_frame *frame,
                         const struct code_identity *code) {
    if (layout->frames == KS_FRAME_OBJECTS) {
        const int64_t unit = (int64_t)frame->instruction;
        return unit < 0 || unit > INT32_MAX / 2 ? -1 : (int32_t)(unit * layout->instruction_scale);
    }
    const int64_t offset = (int64_t)(frame->instruction - code->address - layout->code_bytecode);
    return offset < 0 || offset >= 2 * (int64_t)code->units || offset > INT32_MAX ? -1 : (int32_t)offset;
}

/* ---- texts ---- */

static uint32_t put_utf8(char *text, uint32_t character) {
    if (character >= 0xD800 && character < 0xE000) { /* a byte that was no UTF-8 when Python read it */
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
    const struct ks_layout *layout = walker->layout;
    uint8_t head[64];
    uint8_t characters[1024];
    uint32_t state;
    const uint32_t last = FARTHER(layout->text_state, layout->text_length) + (uint32_t)sizeof(uint64_t);
    if (last > sizeof head || !memory_read(&walker->memory, head, address, last)) {
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
    const struct ks_layout *layout = walker->layout;
    const uint64_t size = memory_word(&walker->memory, address + layout->object_size);
    const uint32_t kept = size > most ? most : (uint32_t)size;
    if (kept > 0 && !memory_read(&walker->memory, data, address + layout->bytes_value, kept)) {
        return -1;
    }
    return (int32_t)kept;
}
