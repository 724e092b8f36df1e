/* See frame_walk.h.
 *
 * Theory of operation
 *   The threads keep running while their frames are read, so nothing read here is certain: every pointer is only an
 *   argument of a system call, every object is checked by its type, every chain is bounded, a thread state must point
 *   to the interpreter in whose list it was found.
 *
 *   The inner end of a stack changes fast. It is read between two reads of the innermost frame pointer, all in one
 *   system call (`hold`, some 0.3 us): the frames below both of these were there all the time. The rest is walked once
 *   before and once after that, and must be the same. Only a call shorter than the hold can be missing; its time goes
 *   to its caller.
 *
 *   A thread that calls and returns too fast even for that is walked three times: the sample is what the first and the
 *   last walk have in common, plus the call from there that the middle one saw. Waiting until the thread stands still
 *   would favour code that makes few calls: functions of 20 us had shares 5 points too low that way. The price: the
 *   bytes of a callee that has returned stay where its caller's next callee will be, so that in code that calls every
 *   50 ns 2 to 7 % of the samples, on a busy machine, have a callee below the wrong caller.
 *
 * Threads: the sampler's without the GIL, or the agent's (kc_sampler_look, _runs, _change_item) with it.
 * Blocks: never: no lock of the interpreter, bounded chains, one system call for each read.
 */
#define _GNU_SOURCE
#include "python/frame_walk.h"

#include <string.h>
#include <time.h>

#include "common/wake.h"

#define ATTEMPTS 6u
#define HOLD_FRAMES 8u
#define HOLD_BYTES MEMORY_PAGE_BYTES
#define HELD_FRAMES_MOST (HOLD_BYTES / 64u) /* none is shorter; a torn chain may be a circle */
#define HOLD_TIMES_SHORTEST 3
#define HOLD_LEAST_LIMIT_NS 1500
#define THREAD_BYTES_MOST 512u
#define FRAME_BYTES_MOST 160u
#define GIL_BYTES_MOST 64u
#define OFFSET_MOST (1u << 20) /* for data read by itself: interpreters have some 300 KB */
#define TAGS 3u                /* low bits of the reference to the code in a frame, from 3.14 on */

/* ---- offsets ---- */

bool offsets_fit(const uint32_t *offsets, size_t count, uint32_t bytes) {
    for (size_t i = 0; i < count; i++) {
        if (offsets[i] > bytes - sizeof(uint64_t)) {
            return false;
        }
    }
    return true;
}

bool walk_fits(const struct kc_sampler_layout *layout) {
    const uint32_t in_thread[] = {layout->thread_next, layout->thread_interpreter, layout->thread_frame,
                                  layout->thread_id, layout->thread_native_id};
    const uint32_t in_frame[] = {layout->frame_code, layout->frame_previous, layout->frame_instruction,
                                 layout->frame_owner, layout->object_type};
    const uint32_t in_gil[] = {layout->gil_holder, layout->gil_locked};
    const uint32_t alone[] = {layout->runtime_interpreters, layout->interpreter_next, layout->interpreter_threads,
                              layout->cframe_frame,         layout->gil_offset,       layout->interpreter_collecting};
#define FIT(offsets, bytes) offsets_fit(offsets, sizeof(offsets) / sizeof *(offsets), bytes)
    return FIT(in_thread, THREAD_BYTES_MOST) && FIT(in_frame, FRAME_BYTES_MOST) && FIT(in_gil, GIL_BYTES_MOST) &&
           FIT(alone, OFFSET_MOST) && code_fits(layout);
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
    const struct kc_sampler_layout *layout = walker->layout;
    uint8_t bytes[THREAD_BYTES_MOST];
    const uint32_t last = FARTHER(FARTHER(layout->thread_native_id, layout->thread_id),
                                  FARTHER(layout->thread_frame, layout->thread_interpreter));
    if (!memory_read(&walker->memory, bytes, address, FARTHER(last, layout->thread_next) + sizeof(uint64_t))) {
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
    case KC_GIL_IN_RUNTIME: return walker->layout->runtime + walker->layout->gil_offset;
    case KC_GIL_BY_POINTER: return memory_word(&walker->memory, interpreter + walker->layout->gil_offset);
    default: return 0;
    }
}

uint64_t walk_gil_holder(const struct walker_of_stacks *walker, uint64_t gil) {
    uint8_t bytes[GIL_BYTES_MOST];
    int32_t locked;
    const uint32_t last = FARTHER(walker->layout->gil_holder, walker->layout->gil_locked);
    if (gil == 0 || !memory_read(&walker->memory, bytes, gil, last + sizeof(uint64_t))) {
        return 0;
    }
    memcpy(&locked, bytes + walker->layout->gil_locked, sizeof locked);
    const uint64_t holder = locked == 1 ? word_in(bytes, walker->layout->gil_holder) : 0;
    return holder == 0 ? 0 : memory_word(&walker->memory, holder + walker->layout->thread_id);
}

bool walk_collects(const struct walker_of_stacks *walker, uint64_t interpreter) {
    int32_t collecting;
    const uint32_t offset = walker->layout->interpreter_collecting;
    return offset != 0 && memory_read(&walker->memory, &collecting, interpreter + offset, sizeof collecting) &&
           collecting == 1;
}

/* ---- frames ---- */

static uint64_t innermost(const struct walker_of_stacks *walker, const struct python_thread *thread) {
    const struct kc_sampler_layout *layout = walker->layout;
    const uint64_t found = memory_word(&walker->memory, thread->address + layout->thread_frame);
    if (layout->frames != KC_FRAMES_BY_CFRAME) {
        return found;
    }
    return found == 0 ? 0 : memory_word(&walker->memory, found + layout->cframe_frame);
}

static uint32_t frame_bytes(const struct kc_sampler_layout *layout) {
    return FARTHER(FARTHER(layout->frame_code, layout->frame_previous),
                   FARTHER(layout->frame_instruction, layout->frame_owner)) +
           (uint32_t)sizeof(uint64_t);
}

/* Returns false if these bytes are no frame. */
static bool decode_frame(const struct kc_sampler_layout *layout, const uint8_t *bytes, uint64_t address,
                         struct walked_frame *frame) {
    frame->address = address;
    frame->previous = word_in(bytes, layout->frame_previous);
    frame->code = word_in(bytes, layout->frame_code);
    if (layout->frames == KC_FRAME_OBJECTS) {
        int32_t instruction;
        memcpy(&instruction, bytes + layout->frame_instruction, sizeof instruction);
        frame->instruction = (uint64_t)(int64_t)instruction;
        return word_in(bytes, layout->object_type) == layout->frame_type && frame->code != 0;
    }
    frame->code &= ~(uint64_t)TAGS;
    frame->instruction = word_in(bytes, layout->frame_instruction);
    if (bytes[layout->frame_owner] >= layout->least_shim_owner) {
        frame->code = 0;
        return true;
    }
    return frame->code != 0;
}

/* Follows the chain from `address`, appending to `stack`. Returns false if it breaks. */
static bool walk_on(struct walker_of_stacks *walker, uint64_t address, struct stack *stack) {
    uint8_t bytes[FRAME_BYTES_MOST];
    const uint32_t size = frame_bytes(walker->layout);
    memory_forget(&walker->memory);
    while (address != 0) {
        if (stack->depth == FRAMES_MOST) {
            stack->truncated = true;
            return true;
        }
        struct walked_frame *frame = &stack->frames[stack->depth];
        if (!memory_peek(&walker->memory, bytes, address, size) ||
            !decode_frame(walker->layout, bytes, address, frame)) {
            return false;
        }
        stack->depth++;
        address = frame->previous;
    }
    return true;
}

/* ---- the inner end ---- */

/* Bytes that were read while `from` and `to` were the innermost frames, one after the other. */
struct hold {
    uint64_t from;
    uint64_t to;
    uint32_t pieces;
    uint64_t addresses[HOLD_FRAMES];
    uint32_t bytes_each;
    uint8_t bytes[HOLD_BYTES];
};

/* A frame object lies alone, frames since 3.11 lie side by side: then the innermost one's page is read. */
static void choose_pieces(const struct walker_of_stacks *walker, uint64_t innermost, struct hold *hold) {
    const struct stack *stack = &walker->stack;
    if (walker->layout->frames != KC_FRAME_OBJECTS) {
        hold->pieces = 1;
        hold->bytes_each = MEMORY_PAGE_BYTES;
        hold->addresses[0] = innermost & ~(uint64_t)(MEMORY_PAGE_BYTES - 1);
        return;
    }
    hold->pieces = stack->depth < HOLD_FRAMES ? stack->depth : HOLD_FRAMES;
    hold->bytes_each = frame_bytes(walker->layout);
    for (uint32_t i = 0; i < hold->pieces; i++) {
        hold->addresses[i] = stack->frames[i].address;
    }
}

/* Whether the call was not interrupted: after an interruption the same frame may be innermost again. */
static bool in_time(struct walker_of_stacks *walker, int64_t took_ns) {
    if (walker->shortest_hold_ns == 0 || took_ns < walker->shortest_hold_ns) {
        walker->shortest_hold_ns = took_ns;
    }
    return took_ns <= HOLD_LEAST_LIMIT_NS || took_ns <= HOLD_TIMES_SHORTEST * walker->shortest_hold_ns;
}

static bool take_hold(struct walker_of_stacks *walker, const struct python_thread *thread, struct hold *hold) {
    const struct kc_sampler_layout *layout = walker->layout;
    const uint64_t pointer = thread->address + layout->thread_frame;
    uint64_t cframe = 0;
    struct memory_piece pieces[HOLD_FRAMES + 4];
    uint64_t outer[2] = {0, 0}; /* the thread's _PyCFrame before and after */
    uint32_t count = 0;
    uint64_t innermost_at = pointer;
    if (layout->frames == KC_FRAMES_BY_CFRAME) {
        cframe = memory_word(&walker->memory, pointer);
        innermost_at = cframe + layout->cframe_frame;
    }
    choose_pieces(walker, memory_word(&walker->memory, innermost_at), hold);
    if (layout->frames == KC_FRAMES_BY_CFRAME) {
        pieces[count++] = (struct memory_piece){&outer[0], pointer, sizeof outer[0]};
    }
    pieces[count++] = (struct memory_piece){&hold->from, innermost_at, sizeof hold->from};
    for (uint32_t i = 0; i < hold->pieces; i++) {
        pieces[count++] = (struct memory_piece){hold->bytes + (size_t)i * hold->bytes_each, hold->addresses[i],
                                                hold->bytes_each};
    }
    pieces[count++] = (struct memory_piece){&hold->to, innermost_at, sizeof hold->to};
    if (layout->frames == KC_FRAMES_BY_CFRAME) {
        pieces[count++] = (struct memory_piece){&outer[1], pointer, sizeof outer[1]};
    }
    const int64_t began = clock_ns(CLOCK_MONOTONIC);
    const bool read = memory_read_pieces(&walker->memory, pieces, count) && outer[0] == cframe && outer[1] == cframe;
    return read && in_time(walker, clock_ns(CLOCK_MONOTONIC) - began);
}

static bool held_frame(const struct walker_of_stacks *walker, const struct hold *hold, uint64_t address,
                       struct walked_frame *frame) {
    const uint32_t size = frame_bytes(walker->layout);
    for (uint32_t i = 0; i < hold->pieces; i++) {
        const uint64_t offset = address - hold->addresses[i];
        if (offset < hold->bytes_each && hold->bytes_each - offset >= size) {
            return decode_frame(walker->layout, hold->bytes + (size_t)i * hold->bytes_each + offset, address, frame);
        }
    }
    return false;
}

/* Whether `address` is below `from` in the held bytes, or the next frame below it. */
static bool is_below(const struct walker_of_stacks *walker, const struct hold *hold, uint64_t from, uint64_t address) {
    struct walked_frame frame;
    for (uint32_t i = 0; i < HELD_FRAMES_MOST && from != address; i++) {
        const bool held = held_frame(walker, hold, from, &frame);
        if (!held && i == 0) { /* just called, in the next page: it may still be there */
            uint8_t bytes[FRAME_BYTES_MOST];
            if (!memory_read(&walker->memory, bytes, from, frame_bytes(walker->layout)) ||
                !decode_frame(walker->layout, bytes, from, &frame)) {
                return false;
            }
        } else if (!held) {
            return false;
        }
        from = frame.previous;
    }
    return from == address && address != 0;
}

/* Copies the frames that were there during the whole hold to walker->second. `*next` is the frame below them. False:
 * none. */
static bool keep_held(struct walker_of_stacks *walker, const struct hold *hold, uint64_t *next) {
    struct stack *kept = &walker->second;
    uint64_t address = hold->from;
    struct walked_frame frame;
    kept->depth = 0;
    kept->truncated = false;
    for (uint32_t i = 0; i < HELD_FRAMES_MOST && address != 0 && held_frame(walker, hold, address, &frame); i++) {
        if (kept->depth > 0 || address == hold->to || is_below(walker, hold, hold->to, address)) {
            kept->frames[kept->depth++] = frame;
        }
        address = frame.previous;
    }
    *next = address;
    return kept->depth > 0 || (address != 0 && is_below(walker, hold, hold->to, address));
}

/* ---- a whole stack ---- */

/* Whether the outer parts of both stacks, from `address` on, are equal. 0: both whole stacks. */
static bool same_below(const struct stack *before, const struct stack *now, uint32_t from_now, uint64_t address) {
    uint32_t i = 0;
    while (i < before->depth && before->frames[i].address != address) {
        i++;
    }
    if (address == 0) {
        return true;
    }
    for (uint32_t j = from_now; i < before->depth && j < now->depth; i++, j++) {
        if (before->frames[i].address != now->frames[j].address || before->frames[i].code != now->frames[j].code) {
            return false;
        }
        if (i + 1 == before->depth || j + 1 == now->depth) {
            return before->truncated || now->truncated || (i + 1 == before->depth && j + 1 == now->depth);
        }
    }
    return false;
}

/* Stores the visible frames in walker->stack. */
static void show(struct walker_of_stacks *walker) {
    const struct stack *from = &walker->second;
    struct stack *to = &walker->stack;
    to->depth = 0;
    to->truncated = from->truncated;
    for (uint32_t i = 0; i < from->depth; i++) {
        if (from->frames[i].code == 0) {
            continue;
        }
        if (to->depth == STACK_DEPTH_MOST) {
            to->truncated = true;
            return;
        }
        to->frames[to->depth++] = from->frames[i];
    }
}

/* How many outer frames both have in the same places. */
static uint32_t agreed(const struct stack *one, const struct stack *other) {
    uint32_t a = one->depth;
    uint32_t b = other->depth;
    if (one->truncated || other->truncated) { /* perhaps at different frames: from the outermost common one */
        while (a > 0 && one->frames[a - 1].address != other->frames[b - 1].address) {
            a--;
        }
        for (a = a > 0 ? a : one->depth; b > 0 && other->frames[b - 1].address != one->frames[a - 1].address;) {
            b--;
        }
    }
    const uint32_t ends = b;
    while (a > 0 && b > 0 && one->frames[a - 1].address == other->frames[b - 1].address &&
           one->frames[a - 1].code == other->frames[b - 1].code) {
        a--;
        b--;
    }
    return ends - b;
}

static bool walk_anew(struct walker_of_stacks *walker, const struct python_thread *thread, struct stack *stack) {
    stack->depth = 0;
    stack->truncated = false;
    const uint64_t from = innermost(walker, thread);
    return from != 0 && walk_on(walker, from, stack) && stack->depth > 0;
}

/* For a thread that is too fast for a hold: frames that it had both before and after a middle walk were there all the
 * time, and the call from there that the middle walk saw is real. Stores them in walker->second. */
static bool keep_agreed(struct walker_of_stacks *walker, const struct python_thread *thread) {
    const struct stack *before = &walker->stack;
    struct stack *middle = &walker->third;
    struct stack *after = &walker->second;
    if (!walk_anew(walker, thread, middle) || !walk_anew(walker, thread, after)) {
        return false;
    }
    const uint32_t kept = agreed(before, after);
    if (kept == 0 || after->frames[after->depth - 1].address != before->frames[before->depth - 1].address) {
        return false;
    }
    const struct walked_frame *inner = &after->frames[after->depth - kept];
    uint32_t at = 0;
    while (at < middle->depth &&
           (middle->frames[at].address != inner->address || middle->frames[at].code != inner->code)) {
        at++;
    }
    uint32_t called = at == middle->depth ? 0 : at > 0 && middle->frames[at - 1].code != 0 ? 1 : 2;
    called = called > at ? 0 : called; /* with the interpreter's own frame in between */
    memmove(after->frames + called, inner, kept * sizeof *inner);
    memcpy(after->frames, middle->frames + (at - called), called * sizeof *inner);
    after->depth = kept + called;
    return true;
}

static bool keep_whole(struct walker_of_stacks *walker, const struct python_thread *thread, uint64_t outermost,
                       bool *partial) {
    const struct stack *before = &walker->stack;
    struct stack *now = &walker->second;
    struct hold hold;
    uint64_t next;
    if (!take_hold(walker, thread, &hold) || !keep_held(walker, &hold, &next)) {
        return false;
    }
    const uint32_t held = now->depth;
    if (!walk_on(walker, next, now) || !same_below(before, now, held, next)) {
        return false;
    }
    const uint64_t last = now->frames[now->depth - 1].address;
    *partial = hold.from != hold.to;
    /* A frame under construction has no caller yet. */
    return now->truncated || last == outermost || last == before->frames[before->depth - 1].address;
}

static enum walk attempt(struct walker_of_stacks *walker, const struct python_thread *thread, uint64_t *outermost) {
    const struct stack *found = &walker->second;
    bool partial = true;
    if (innermost(walker, thread) == 0) {
        return WALK_EMPTY;
    }
    if (!walk_anew(walker, thread, &walker->stack) ||
        (!keep_whole(walker, thread, *outermost, &partial) && !keep_agreed(walker, thread))) {
        return WALK_TORN;
    }
    *outermost = found->truncated ? 0 : found->frames[found->depth - 1].address;
    show(walker);
    if (walker->stack.depth == 0) {
        return WALK_EMPTY;
    }
    return partial ? WALK_PARTIAL : WALK_WHOLE;
}

enum walk walk_stack(struct walker_of_stacks *walker, const struct python_thread *thread, uint64_t *outermost) {
    enum walk found = WALK_TORN;
    for (uint32_t i = 0; i < ATTEMPTS && found == WALK_TORN; i++) {
        found = attempt(walker, thread, outermost);
    }
    return found;
}
