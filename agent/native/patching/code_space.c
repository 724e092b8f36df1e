/* Theory of operation
 *
 * /proc/self/maps lists the mappings in ascending order; what lies between two of them is free. It may be taken by
 * another thread before we are there, so only MAP_FIXED_NOREPLACE may map it.
 *
 * What grows in place must not find us in its way: the main stack, downwards, and what brk() adds, upwards from
 * sbrk(0), which need not touch a mapping as long as the heap is empty. Both have more room left than any machine has
 * memory (GROWTH); where there is less, nothing is taken. Stacks of threads have a fixed size, and their guard
 * page is a part of their mapping; the page left free at both ends is for those that were made without one.
 *
 * A segment ends within a page as a rule, and what follows there belongs to no symbol and no section: no program can
 * refer to it. It shows what happens to follow in the file. Where it still is what the file has there, nobody else (a
 * tool that changes code, an older agent) has put it to use.
 *
 * Threads: the agent's.
 * Blocks: never; it reads /proc/self/maps and files of libraries.
 */
#define _GNU_SOURCE
#include "patching/code_space.h"

#include <fcntl.h>
#include <inttypes.h>
#include <link.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define GROWTH (1ull << 40)
#define PAGE_MOST 4096
#define LINE_BYTES 512 /* names of files may be longer: the rest is skipped */

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
    bool whole = true; /* the last line ended; else its rest follows */
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

/* ---- in a library's own page ---- */

struct segment {
    uintptr_t code;
    const char *path;
    uint64_t file_offset; /* of its end */
    struct room rest;     /* of its last page */
};

static int look_for(struct dl_phdr_info *info, size_t size, void *wanted) {
    (void)size;
    struct segment *segment = wanted;
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    for (unsigned i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        const uintptr_t begin = info->dlpi_addr + part->p_vaddr, end = begin + part->p_memsz;
        if (part->p_type == PT_LOAD && segment->code >= begin && segment->code < end &&
            part->p_filesz == part->p_memsz) {
            segment->path = info->dlpi_name;
            segment->file_offset = part->p_offset + part->p_filesz;
            segment->rest = (struct room){end, (end + page - 1) / page * page};
            return 1;
        }
    }
    return 0;
}

static bool is_as_in_file(const struct segment *segment) {
    uint8_t bytes[PAGE_MOST] = {0}; /* as behind the end of a file */
    const size_t count = segment->rest.end - segment->rest.begin;
    const int fd = count > sizeof bytes ? -1 : open(segment->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return false;
    }
    const bool read = pread(fd, bytes, count, (off_t)segment->file_offset) >= 0;
    close(fd);
    return read && memcmp(bytes, (const void *)segment->rest.begin, count) == 0; /* NOLINT */
}

struct room room_after_code(const void *code) {
    struct segment segment = {.code = (uintptr_t)code};
    const bool found = dl_iterate_phdr(look_for, &segment) != 0;
    return found && is_as_in_file(&segment) ? segment.rest : (struct room){0, 0};
}
