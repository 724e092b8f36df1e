/* Theory of operation
 *
 * A caller that looked a function up before us calls its entry, so calls can only be seen in the function itself. Its
 * first instructions are short (push %rbp), and a thread may have been preempted between any two of them: nothing may
 * be written over them. But they lead to a direct call within the library, and its displacement is one operand.
 * Changing that is one store: a thread takes the old path or the new one, wherever it is at the moment. The new path is
 * a stub (call_stub.c), which preserves all registers, calls us and goes on to the target of the call. The function's
 * own instructions stay in place, so nothing has to be moved.
 *
 * The instructions before the call are decoded, for their lengths and for what they push: that gives the function's
 * return address, hence its caller. An unknown instruction ends the search. Only the displacement of a call found this
 * way is ever changed.
 *
 * Threads: the agent's.
 * Blocks: never. The instructions are only read here.
 */
#include "patching/call_site.h"

#include <string.h>

#if defined(__x86_64__)

#define INSTRUCTIONS_MOST 64u
#define INSTRUCTION_BYTES 15u /* the longest possible */
#define WINDOW_BYTES 32u      /* read to decode one: prefixes, and the bytes after them */
#define PATHS_MOST 8u
#define FRAME_MOST (1 << 20) /* bytes: no function allocates this much at once, and sums fit in an int32_t */
#define RSP 4u

/* ---- decoding ---- */

/* NEAR_JUMP: a displacement of one byte; CALL_THROUGH: a pointer, at `distance` from the next instruction */
enum flow { NEXT, BRANCH, JUMP, NEAR_JUMP, CALL, CALL_THROUGH, RETURN, END };

struct instruction {
    enum flow flow;
    uint32_t length;
    int32_t pushed;   /* bytes; negative: popped */
    int32_t distance; /* BRANCH, both JUMPs and both CALLs: from the next instruction */
};

struct operand {
    uint32_t length; /* with its ModRM byte */
    uint32_t mode;
    uint32_t reg;
    uint32_t rm;
};

static int32_t read_i32(const uint8_t *at) {
    int32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static struct operand operand_at(const uint8_t *at, uint32_t rex) {
    struct operand operand = {1, at[0] >> 6, ((at[0] >> 3) & 7) | (rex & 4) << 1, (at[0] & 7) | (rex & 1) << 3};
    const uint32_t low = at[0] & 7;
    if (operand.mode == 3) {
        return operand;
    }
    const bool no_base = operand.mode == 0 && (low == 5 || (low == 4 && (at[1] & 7) == 5));
    operand.length += (low == 4) + (operand.mode == 1 ? 1 : operand.mode == 2 || no_base ? 4 : 0);
    return operand;
}

/* The kinds of instructions with a ModRM byte: what they write, and what follows the operand. */
enum form { UNKNOWN, TO_RM, TO_REG, READS, TO_RM_8, READS_8 };

// clang-format off: a row for each form
static enum form form_of(uint8_t opcode) {
    switch (opcode) {
    case 0x01: case 0x09: case 0x21: case 0x29: case 0x31: case 0x88: case 0x89: return TO_RM;
    case 0x03: case 0x0b: case 0x23: case 0x2b: case 0x33: case 0x63: case 0x8a: case 0x8b: case 0x8d: return TO_REG;
    case 0x38: case 0x39: case 0x3a: case 0x3b: case 0x84: case 0x85: return READS;
    case 0x80: case 0xc0: case 0xc1: case 0xc6: return TO_RM_8;
    default: return UNKNOWN;
    }
}

static enum form form_of_0f(uint8_t opcode) {
    switch (opcode) {
    case 0x10: case 0x11: case 0x12: case 0x13: case 0x16: case 0x17: case 0x1e: case 0x1f: case 0x28: case 0x29:
    case 0x57: case 0x6c: case 0x6f: case 0x7f: case 0xd6: case 0xef: case 0xa3: return READS;
    case 0xb6: case 0xb7: case 0xbe: case 0xbf: return TO_REG;
    case 0xba: return READS_8;
    default:
        return opcode >= 0x40 && opcode <= 0x4f ? TO_REG /* cmov */ : opcode >= 0x90 && opcode <= 0x9f ? READS : UNKNOWN;
    }
}
// clang-format on

static struct instruction with_operand(enum form form, const uint8_t *at, uint32_t before, uint32_t rex) {
    const struct operand operand = operand_at(at, rex);
    const bool to_stack_pointer = (form == TO_REG && operand.reg == RSP) ||
                                  ((form == TO_RM || form == TO_RM_8) && operand.mode == 3 && operand.rm == RSP);
    const uint32_t more = form == TO_RM_8 || form == READS_8;
    return (struct instruction){form == UNKNOWN || to_stack_pointer ? END : NEXT, before + operand.length + more, 0, 0};
}

/* 81 and 83: an operation with an immediate. */
static struct instruction with_number(const uint8_t *at, uint32_t before, uint32_t rex, bool narrow) {
    const struct operand operand = operand_at(at, rex);
    const uint8_t *number = at + operand.length;
    const int32_t value = narrow ? (int8_t)*number : read_i32(number);
    struct instruction result = {NEXT, before + operand.length + (narrow ? 1 : 4), 0, 0};
    const uint32_t operation = operand.reg & 7;
    if (operand.mode == 3 && operand.rm == RSP && operation != 7) { /* 7 compares */
        const bool known = (operation == 5 || operation == 0) && value > -FRAME_MOST && value < FRAME_MOST;
        result.pushed = !known ? 0 : operation == 5 ? value : -value;
        result.flow = known ? NEXT : END;
    }
    return result;
}

static struct instruction after_0f(const uint8_t *at, uint32_t before, uint32_t rex) {
    if (*at >= 0x80 && *at <= 0x8f) {
        return (struct instruction){BRANCH, before + 5, 0, read_i32(at + 1)};
    }
    return with_operand(form_of_0f(*at), at + 1, before + 1, rex);
}

/* ff: only push, and a call through a RIP-relative pointer. */
static struct instruction of_pointer(const uint8_t *at, uint32_t before, uint32_t rex, bool narrow) {
    const struct operand operand = operand_at(at, rex);
    if (*at == 0x15) {
        return (struct instruction){CALL_THROUGH, before + operand.length, 0, read_i32(at + 1)};
    }
    return (operand.reg & 7) == 6 && !narrow ? (struct instruction){NEXT, before + operand.length, 8, 0}
                                             : (struct instruction){END, 0, 0, 0};
}

static struct instruction decode(const uint8_t *at) {
    uint32_t n = 0;
    uint32_t rex = 0;
    bool narrow = false; /* 16 bits: then no immediate may follow */
    for (; n < INSTRUCTION_BYTES && (at[n] == 0x66 || at[n] == 0xf2 || at[n] == 0xf3); n++) {
        narrow |= at[n] == 0x66;
    }
    if ((at[n] & 0xf0) == 0x40) {
        rex = at[n++];
    }
    const uint8_t opcode = at[n++];
    if (opcode >= 0x50 && opcode <= 0x57) {
        return (struct instruction){NEXT, n, 8, 0};
    }
    if (opcode >= 0x58 && opcode <= 0x5f) {
        return (struct instruction){opcode == 0x58 + RSP && !(rex & 1) ? END : NEXT, n, -8, 0};
    }
    if (opcode >= 0x70 && opcode <= 0x7f) {
        return (struct instruction){BRANCH, n + 1, 0, (int8_t)at[n]};
    }
    if (opcode >= 0xb8 && opcode <= 0xbf && !narrow) {
        return (struct instruction){opcode == 0xb8 + RSP && !(rex & 1) ? END : NEXT, n + (rex & 8 ? 8 : 4), 0, 0};
    }
    switch (opcode) {
    case 0x0f: return after_0f(at + n, n, rex);
    case 0x3c:
    case 0xa8: return (struct instruction){NEXT, n + 1, 0, 0};
    case 0x3d:
    case 0xa9: return (struct instruction){narrow ? END : NEXT, n + 4, 0, 0};
    case 0x81: return narrow ? (struct instruction){END, 0, 0, 0} : with_number(at + n, n, rex, false);
    case 0x83: return with_number(at + n, n, rex, true);
    case 0x90: return (struct instruction){NEXT, n, 0, 0};
    case 0xc3: return (struct instruction){RETURN, n, 0, 0};
    case 0xc7: {
        struct instruction stored = with_operand(TO_RM, at + n, n, rex);
        stored.length += 4;
        stored.flow = narrow ? END : stored.flow;
        return stored;
    }
    case 0xe8: return (struct instruction){CALL, n + 4, 0, read_i32(at + n)};
    case 0xe9: return (struct instruction){JUMP, n + 4, 0, read_i32(at + n)};
    case 0xeb: return (struct instruction){NEAR_JUMP, n + 1, 0, (int8_t)at[n]};
    case 0xff: return of_pointer(at + n, n, rex, narrow);
    default: return with_operand(form_of(opcode), at + n, n, rex);
    }
}

/* ---- finding ---- */

struct search {
    uint8_t *begin;
    uint8_t *end;
    struct call_site *sites;
    uint32_t most;
    uint32_t count;
    struct {
        uint8_t *at;
        int32_t depth;
    } paths[PATHS_MOST];
    uint32_t paths_count;
    bool lost; /* on one of its paths */
};

static bool within(const struct search *search, const uint8_t *at) { return at >= search->begin && at < search->end; }

static void add_path(struct search *search, uint8_t *at, int32_t depth) {
    for (uint32_t i = 0; i < search->paths_count; i++) {
        if (search->paths[i].at == at) {
            return;
        }
    }
    if (search->paths_count < PATHS_MOST && within(search, at)) {
        search->paths[search->paths_count].at = at;
        search->paths[search->paths_count++].depth = depth;
    }
}

static void add_site(struct search *search, uint8_t *next, int32_t distance, int32_t depth) {
    for (uint32_t i = 0; i < search->count; i++) {
        if (search->sites[i].next == next) {
            return;
        }
    }
    if (search->count < search->most && depth >= 0) {
        search->sites[search->count++] = (struct call_site){next - 4, next, next + distance, (uint32_t)depth, NULL};
    }
}

/* The function may end where its memory does: bytes after its end read as zeros. */
static struct instruction decode_within(const struct search *search, const uint8_t *at) {
    uint8_t window[WINDOW_BYTES] = {0};
    const size_t left = (size_t)(search->end - at);
    const size_t bytes = left < INSTRUCTION_BYTES ? left : INSTRUCTION_BYTES;
    memcpy(window, at, bytes);
    const struct instruction found = decode(window);
    return found.length > bytes ? (struct instruction){END, 0, 0, 0} : found;
}

static void follow(struct search *search, uint8_t *at, int32_t depth) {
    for (uint32_t n = 0; n < INSTRUCTIONS_MOST && within(search, at); n++) {
        const struct instruction found = decode_within(search, at);
        uint8_t *next = at + found.length;
        uint8_t *target = next + found.distance;
        if (found.flow == RETURN) {
            return;
        }
        if (found.flow == END || found.flow == CALL_THROUGH) {
            break;
        }
        const bool jumps = found.flow == JUMP || found.flow == NEAR_JUMP;
        if (found.flow == CALL || (jumps && !within(search, target))) {
            if (found.flow != NEAR_JUMP) {
                add_site(search, next, found.distance, depth + (found.flow == CALL ? 8 : 0));
            }
            return;
        }
        if (found.flow == BRANCH) {
            add_path(search, target, depth);
        }
        depth += found.pushed;
        at = jumps ? target : next;
    }
    search->lost = true;
}

uint32_t call_sites_find(uint8_t *function, size_t bytes, struct call_site *sites, uint32_t most) {
    struct search search = {.begin = function, .end = function + bytes, .sites = sites, .most = most};
    follow(&search, function, 0);
    const bool on_main_path = search.count > 0;
    for (uint32_t i = 0; i < search.paths_count; i++) {
        follow(&search, search.paths[i].at, search.paths[i].depth);
    }
    return on_main_path || !search.lost ? search.count : 0;
}

void **call_pointer_find(uint8_t *function, size_t bytes) {
    const struct search search = {.begin = function, .end = function + bytes};
    uint8_t *at = function;
    for (uint32_t n = 0; n < INSTRUCTIONS_MOST && within(&search, at); n++) {
        const struct instruction found = decode_within(&search, at);
        at += found.length;
        if (found.flow == CALL_THROUGH) {
            return (void **)(void *)(at + found.distance);
        }
        if (found.flow != NEXT && found.flow != BRANCH) {
            break;
        }
    }
    return NULL;
}

#else /* no decoder for this architecture */

void **call_pointer_find(uint8_t *function, size_t bytes) {
    (void)function;
    (void)bytes;
    return NULL;
}

uint32_t call_sites_find(uint8_t *function, size_t bytes, struct call_site *sites, uint32_t most) {
    (void)function;
    (void)bytes;
    (void)sites;
    (void)most;
    return 0;
}

#endif
