/* See stack_names.h.
 *
 * A code object is identified by its address together with its pointers and the hashes that Python keeps of its name
 * and file, all read for this very sample: a program that makes and frees code gets the same addresses again and again,
 * for the code and for its texts. The texts are read once, and only trusted if everything is the same afterwards.
 *
 * From the bytecode of the running code object and the names that it loads, the decoder finds what a line calls. They
 * are written once, too, when the code is first seen as the innermost one. Its instructions may be specialised
 * since: these are 16-bit words that change one by one, and the decoder knows all of them.
 *
 * A stack is a chain of nodes: (parent node, code number, offset of the instruction). Both tables are open-addressed
 * and of a fixed size; their memory is only touched as far as it is used. If one is full, the sample is lost and
 * counted.
 *
 * Threads: the sampler's, under the lock of the string table; the agent's makes and frees it.
 * Blocks: never; a system call for each read of a code object that is new.
 */
#define _GNU_SOURCE
#include "python/stack_names.h"

#include <string.h>
#include <sys/mman.h>

#define CODES (1u << 15)
#define NODES (1u << 18)
#define FILE_BYTES_MOST 1024u
#define NAME_BYTES_MOST 512u
#define LINES_BYTES_MOST (64u << 10) /* some 10,000 lines; beyond that the decoder shows the first line */
#define ENTRY_HEAD_BYTES 13u
#define BYTECODE_BYTES_MOST (16u << 10) /* no callees for larger code */
#define NAMES_BYTES_MOST (4u << 10)     /* of attributes and globals, and the same again for variables */
#define BYTECODE_HEAD_BYTES 8u

struct code_entry {
    struct code_identity code;
    uint32_t number;   /* 0: free */
    bool has_bytecode; /* it has been written, or cannot be */
};

struct node_entry {
    uint32_t parent;
    uint32_t code;
    int32_t instruction;
    uint32_t number; /* 0: free */
};

struct stack_names {
    uint32_t codes;
    uint32_t nodes;
    struct code_identity found[STACK_DEPTH_MOST];
    uint8_t entry[ENTRY_HEAD_BYTES + FILE_BYTES_MOST + NAME_BYTES_MOST + LINES_BYTES_MOST];
    struct code_entry code[CODES];
    struct node_entry node[NODES];
};

struct stack_names *stack_names_create(void) {
    void *memory = mmap(NULL, sizeof(struct stack_names), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        return NULL;
    }
    (void)madvise(memory, sizeof(struct stack_names), MADV_DONTFORK);
    return memory;
}

void stack_names_destroy(struct stack_names *names) {
    if (names != NULL) {
        munmap(names, sizeof *names);
    }
}

static uint32_t mix(uint64_t value) {
    value = (value ^ value >> 33) * 0xff51afd7ed558ccdULL;
    return (uint32_t)(value ^ value >> 29);
}

static bool same_code(const struct code_identity *a, const struct code_identity *b) {
    return a->address == b->address && a->filename == b->filename && a->name == b->name && a->lines == b->lines &&
           a->texts == b->texts && a->first_line == b->first_line && a->units == b->units;
}

static void put_u32(uint8_t *to, uint32_t value) {
    for (uint32_t i = 0; i < 4; i++) {
        to[i] = (uint8_t)(value >> 8 * i);
    }
}

static bool code_is_still(struct walker_of_stacks *walker, const struct code_identity *code) {
    struct stack *one = &walker->second; /* free between two walks */
    struct code_identity now;
    one->depth = 1;
    one->frames[0].code = code->address;
    return walk_codes(walker, one, &now) && same_code(&now, code);
}

static enum named write_code(struct stack_names *names, struct walker_of_stacks *walker, struct arena *arena,
                             const struct code_identity *code, uint32_t number) {
    uint8_t *entry = names->entry;
    uint8_t *text = entry + ENTRY_HEAD_BYTES;
    const int32_t file = walk_text(walker, code->filename, (char *)text, FILE_BYTES_MOST);
    const int32_t name = file < 0 ? -1 : walk_text(walker, code->name, (char *)text + file, NAME_BYTES_MOST);
    const int32_t lines = name < 0 ? -1 : walk_bytes(walker, code->lines, text + file + name, LINES_BYTES_MOST);
    if (lines < 0 || !code_is_still(walker, code)) {
        return NAMED_TORN;
    }
    put_u32(entry, code->first_line);
    entry[4] = lines > 0 ? (uint8_t)walker->layout->line_table_kind : 0;
    put_u32(entry + 5, (uint32_t)file);
    put_u32(entry + 9, (uint32_t)name);
    const uint32_t named = ENTRY_HEAD_BYTES + (uint32_t)(file + name);
    return arena_add_string(arena, number, ARENA_SPACE_PYTHON_CODE, (const char *)entry, named + (uint32_t)lines) ||
                   arena_add_string(arena, number, ARENA_SPACE_PYTHON_CODE, (const char *)entry, named)
               ? NAMED
               : NAMED_FULL;
}

/* Only for code seen as the innermost one: callees of the others are never shown. */
static void write_bytecode(struct stack_names *names, struct walker_of_stacks *walker, struct arena *arena,
                           struct code_entry *code) {
    uint8_t *entry = names->entry;
    uint8_t *units = entry + BYTECODE_HEAD_BYTES;
    const int32_t bytes = walk_bytecode(walker, &code->code, units, BYTECODE_BYTES_MOST);
    char *text = bytes < 0 ? NULL : (char *)units + bytes;
    const int32_t others = bytes < 0 ? -1 : walk_names(walker, code->code.names, text, NAMES_BYTES_MOST);
    const int32_t variables = others < 0 ? -1
                                         : walk_names(walker, code->code.variables, text + others, NAMES_BYTES_MOST);
    if (!code_is_still(walker, &code->code)) {
        return;
    }
    code->has_bytecode = true;
    if (variables >= 0) {
        put_u32(entry, (uint32_t)bytes);
        put_u32(entry + 4, (uint32_t)others);
        (void)arena_add_string(arena, code->number, ARENA_SPACE_PYTHON_BYTECODE, (const char *)entry,
                               BYTECODE_HEAD_BYTES + (uint32_t)(bytes + others + variables));
    }
}

static enum named code_number(struct stack_names *names, struct walker_of_stacks *walker, struct arena *arena,
                              const struct code_identity *code, struct code_entry **found) {
    uint32_t at = mix(code->address ^ code->lines << 1) % CODES;
    for (; names->code[at].number != 0; at = (at + 1) % CODES) {
        if (same_code(&names->code[at].code, code)) {
            *found = &names->code[at];
            return NAMED;
        }
    }
    if (names->codes >= CODES / 4 * 3) {
        return NAMED_FULL;
    }
    const enum named written = write_code(names, walker, arena, code, names->codes + 1);
    if (written == NAMED) {
        *found = &names->code[at];
        **found = (struct code_entry){.code = *code, .number = ++names->codes, .has_bytecode = code->names == 0};
    }
    return written;
}

static enum named child(struct stack_names *names, struct arena *arena, uint32_t *node, uint32_t code,
                        int32_t instruction) {
    uint32_t at = mix((uint64_t)*node << 40 ^ (uint64_t)code << 20 ^ (uint32_t)instruction) % NODES;
    for (; names->node[at].number != 0; at = (at + 1) % NODES) {
        const struct node_entry *entry = &names->node[at];
        if (entry->parent == *node && entry->code == code && entry->instruction == instruction) {
            *node = entry->number;
            return NAMED;
        }
    }
    uint8_t bytes[12];
    put_u32(bytes, *node);
    put_u32(bytes + 4, code);
    put_u32(bytes + 8, (uint32_t)instruction);
    if (names->nodes >= NODES / 4 * 3 ||
        !arena_add_string(arena, names->nodes + 1, ARENA_SPACE_STACK_NODE, (const char *)bytes, sizeof bytes)) {
        return NAMED_FULL;
    }
    names->node[at] = (struct node_entry){*node, code, instruction, ++names->nodes};
    *node = names->nodes;
    return NAMED;
}

enum named stack_names_node(struct stack_names *names, struct walker_of_stacks *walker, struct arena *arena,
                            uint32_t *node) {
    const struct stack *stack = &walker->stack;
    *node = 0;
    if (!walk_codes(walker, stack, names->found)) {
        return NAMED_TORN;
    }
    for (uint32_t i = stack->depth; i > 0; i--) {
        const struct code_identity *code = &names->found[i - 1];
        struct code_entry *entry = NULL;
        enum named done = code_number(names, walker, arena, code, &entry);
        if (done == NAMED && i == 1 && !entry->has_bytecode) {
            write_bytecode(names, walker, arena, entry);
        }
        if (done == NAMED) {
            done = child(names, arena, node, entry->number,
                         walk_instruction(walker->layout, &stack->frames[i - 1], code));
        }
        if (done != NAMED) {
            return done;
        }
    }
    return NAMED;
}
