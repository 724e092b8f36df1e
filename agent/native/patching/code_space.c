/* Theory of operation
 *
 * /proc/self/maps lists the mappings in ascending order; the space between two of them is free. Another thread may take
 * it before us, so only MAP_FIXED_NOREPLACE may map it.
 *
 * We must not block mappings that grow in place: the main stack, downwards, and the brk() heap, upwards from sbrk(0),
 * which need not touch a mapping as long as the heap is empty. Both keep more room than any machine has memory
 * (GROWTH); if there is less, nothing is taken. Thread stacks have a fixed size, and their guard page is a part of
 * their mapping; the page left free at both ends is for those without one.
 *
 * A segment usually ends within a page, and the rest of that page belongs to no symbol and no section: no program can
 * refer to it. It contains the next bytes of the file. As long as it equals the file, no one else (a tool that changes
 * code, an older agent) uses it.
 *
 * Functions begin at multiples of 16 bytes. From the end of one, as given by its symbol, to the next multiple there is
 * only NOP or INT3, which is never reached: other bytes mean that the gap is in use.
 *
 * The dynamic loader maps a library whole first, so what lies between two of its segments is nobody else's, and takes
 * all access to it away. It goes with the library.
 *
 * Threads: the agent's.
 * Blocks: never; it reads /proc/self/maps and files of libraries.
 */
#define _GNU_SOURCE
#include "patching/code_space.h"

#include <fcntl.h>
#include <inttypes.h>
#include <link.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define GROWTH (1ull << 40)
#define ALIGNED 16u /* where functions begin */
#define PAGE_MOST 4096
#define LINE_BYTES 512 /* file names may be longer: the rest is skipped */

struct list {
    uintptr_t low, high;
    uintptr_t heap_end;
    uintptr_t page;
    struct room *rooms;
    uint32_t most;
    uint32_t count;
};

static void add(struct list *list, uintptr_t begin, uintptr_t end, bool below_stack) {
    if (list->heap_end >= begin && list->heap_end <= end) {
        begin = list->heap_end + GROWTH;
    }
    if (below_stack) {
        end = end > GROWTH ? end - GROWTH : 0;
    }
    begin = begin < list->low ? list->low : begin;
    end = end > list->high ? list->high : end;
    if (end > begin && end - begin > 2 * list->page && list->count < list->most) {
        list->rooms[list->count++] = (struct room){begin + list->page, end - list->page};
    }
}

static void read_lines(FILE *maps, struct list *list) {
    char line[LINE_BYTES];
    bool whole = true; /* the last line ended; otherwise its rest follows */
    uintptr_t last = 0, begin, end;
    while (fgets(line, sizeof line, maps) != NULL) {
        const bool starts = whole;
        whole = strchr(line, '\n') != NULL;
        if (starts && sscanf(line, "%" SCNxPTR "-%" SCNxPTR, &begin, &end) == 2) {
            add(list, last, begin, strstr(line, "[stack]") != NULL);
            last = end;
        }
    }
}

uint32_t room_between(uintptr_t low, uintptr_t high, struct room *rooms, uint32_t most) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t from = low / page * page, to = high / page * page;
    struct list list = {from < page ? page : from, to, (uintptr_t)sbrk(0), page, rooms, most, 0};
    FILE *maps = fopen("/proc/self/maps", "re");
    if (maps != NULL) {
        read_lines(maps, &list);
        (void)fclose(maps);
    }
    return list.count;
}

/* ---- in a library itself ---- */

struct segment {
    uintptr_t code;
    const char *path;
    const ElfW(Dyn) *dynamic;
    uintptr_t base;
    uintptr_t begin;
    uint64_t file_offset; /* of its end */
    struct room rest;     /* of its last page */
    uintptr_t following;  /* the page in which the next segment begins; 0: this is the last one */
};

static int look_for(struct dl_phdr_info *info, size_t size, void *wanted) {
    (void)size;
    struct segment *segment = wanted;
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    segment->dynamic = NULL;
    for (unsigned i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        const uintptr_t begin = info->dlpi_addr + part->p_vaddr, end = begin + part->p_memsz;
        if (part->p_type == PT_DYNAMIC) {
            segment->dynamic = (const void *)begin; /* NOLINT */
        }
        if (part->p_type == PT_LOAD && segment->path != NULL && segment->following == 0) { /* they ascend */
            segment->following = begin / page * page;
        }
        if (part->p_type == PT_LOAD && segment->code >= begin && segment->code < end &&
            part->p_filesz == part->p_memsz) {
            segment->path = info->dlpi_name;
            segment->base = info->dlpi_addr;
            segment->begin = begin;
            segment->file_offset = part->p_offset + part->p_filesz;
            segment->rest = (struct room){end, (end + page - 1) / page * page};
        }
    }
    return segment->path != NULL;
}

/* The end of the last page, after the last byte that differs from the file. */
static struct room unused_rest(const struct segment *segment) {
    uint8_t bytes[PAGE_MOST] = {0}; /* as after the end of a file */
    struct room rest = segment->rest;
    const size_t count = rest.end - rest.begin;
    const int fd = count > sizeof bytes ? -1 : open(segment->path, O_RDONLY | O_CLOEXEC);
    const bool read = fd >= 0 && pread(fd, bytes, count, (off_t)segment->file_offset) >= 0;
    if (fd >= 0) {
        close(fd);
    }
    size_t unused = 0;
    while (read && unused < count &&
           bytes[count - 1 - unused] == *(const uint8_t *)(rest.end - 1 - unused)) { /* NOLINT */
        unused++;
    }
    return (struct room){rest.end - unused, rest.end};
}

/* Bytes of the NOP that begins there, as assemblers write it; 0: not a NOP. */
static size_t nop_at(const uint8_t *at, const uint8_t *end) {
    static const uint8_t NOPS[][8] = {
        {0x90}, {0x0f, 0x1f, 0x00}, {0x0f, 0x1f, 0x40}, {0x0f, 0x1f, 0x44}, {0x0f, 0x1f, 0x80}, {0x0f, 0x1f, 0x84}};
    static const uint8_t BYTES[] = {1, 3, 4, 5, 7, 8};
    size_t prefixes = 0;
    while (at + prefixes < end && (at[prefixes] == 0x66 || at[prefixes] == 0x2e)) {
        prefixes++;
    }
    for (unsigned i = 0; i < sizeof BYTES; i++) {
        if ((size_t)(end - at) >= prefixes + BYTES[i] && memcmp(at + prefixes, NOPS[i], BYTES[i]) == 0) {
            return prefixes + BYTES[i];
        }
    }
    return 0;
}

static bool is_padding(uintptr_t begin, uintptr_t end) {
    const uint8_t *at = (const uint8_t *)begin, *last = (const uint8_t *)end; /* NOLINT */
    while (at < last) {
        const size_t bytes = *at == 0xcc ? 1 : nop_at(at, last);
        if (bytes == 0) {
            return false;
        }
        at += bytes;
    }
    return true;
}

static const void *absolute(const struct segment *segment, uintptr_t address) {
    return (const void *)(address < segment->base ? segment->base + address : address); /* NOLINT: musl's are not */
}

static uint32_t room_in_padding(const struct segment *segment, size_t least, struct room *rooms, uint32_t most) {
    const ElfW(Sym) *symbols = NULL;
    const uint32_t *hash = NULL;
    uint32_t count = 0;
    for (const ElfW(Dyn) *each = segment->dynamic; each != NULL && each->d_tag != DT_NULL; each++) {
        symbols = each->d_tag == DT_SYMTAB ? absolute(segment, each->d_un.d_ptr) : symbols;
        hash = each->d_tag == DT_HASH ? absolute(segment, each->d_un.d_ptr) : hash;
    }
    for (uint32_t i = 0; symbols != NULL && hash != NULL && i < hash[1] && count < most; i++) {
        const uintptr_t begin = segment->base + symbols[i].st_value + symbols[i].st_size;
        const struct room room = {begin, (begin + ALIGNED - 1) / ALIGNED * ALIGNED};
        bool known = false; /* functions may have several names */
        for (uint32_t other = 0; other < count; other++) {
            known |= rooms[other].begin == begin;
        }
        if (ELF64_ST_TYPE(symbols[i].st_info) == STT_FUNC && symbols[i].st_shndx != SHN_UNDEF &&
            symbols[i].st_size != 0 && room.end - begin >= least && begin >= segment->begin &&
            room.end <= segment->rest.begin && !known && is_padding(begin, room.end)) {
            rooms[count++] = room;
        }
    }
    return count;
}

uint32_t room_in_library(const void *code, size_t least, struct room *rooms, uint32_t most) {
    struct segment segment = {.code = (uintptr_t)code};
    if (dl_iterate_phdr(look_for, &segment) == 0 || most == 0) {
        return 0;
    }
    rooms[0] = unused_rest(&segment);
    return 1 + room_in_padding(&segment, least, &rooms[1], most - 1);
}

bool room_behind_code(const void *code, struct room *room) {
    struct segment segment = {.code = (uintptr_t)code};
    char line[LINE_BYTES];
    uintptr_t begin, end;
    unsigned long inode; /* 0: it is not the library's any more */
    bool kept = false;
    FILE *maps = dl_iterate_phdr(look_for, &segment) != 0 ? fopen("/proc/self/maps", "re") : NULL;
    *room = (struct room){segment.rest.end, segment.following};
    while (maps != NULL && room->begin < room->end && !kept && fgets(line, sizeof line, maps) != NULL) {
        kept = sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ---p %*x %*s %lu", &begin, &end, &inode) == 3 && inode != 0 &&
               begin <= room->begin && end >= room->end;
    }
    if (maps != NULL) {
        (void)fclose(maps);
    }
    return kept;
}
