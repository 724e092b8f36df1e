/* See read_memory.h.
 *
 * process_vm_readv on our own process needs no permission and copies through the kernel: a page that is missing, or
 * that is unmapped by then, makes the call fail. A sandbox may forbid it (seccomp); then /proc/self/mem does the
 * same, at the price of a descriptor and one call for each piece. Either takes 0.3 us for up to a page.
 *
 * Threads: any, but each `struct memory` belongs to one.
 * Blocks: never for long; the kernel may wait for a page that is swapped out.
 */
#define _GNU_SOURCE
#include "python/read_memory.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define GATHER_MOST 64u

static bool read_vm(void *to, uint64_t address, size_t bytes) {
    const struct iovec local = {.iov_base = to, .iov_len = bytes};
    const struct iovec remote = {.iov_base = (void *)(uintptr_t)address, .iov_len = bytes}; // NOLINT: never followed
    return process_vm_readv(getpid(), &local, 1, &remote, 1, 0) == (ssize_t)bytes;
}

bool memory_open(struct memory *memory) {
    static const uint64_t probe = 0x6b696e65746f6d65u;
    uint64_t found = 0;
    struct stat made = {.st_ino = 0};
    memory->file = false;
    memory_forget(memory);
    memory->vm = read_vm(&found, (uint64_t)(uintptr_t)&probe, sizeof found) && found == probe;
    if (!memory->vm) {
        memory->fd = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
        memory->file = memory->fd >= 0 && fstat(memory->fd, &made) == 0;
        memory->device = made.st_dev;
        memory->inode = made.st_ino;
    }
    return memory->vm || (memory_read(memory, &found, (uint64_t)(uintptr_t)&probe, sizeof found) && found == probe);
}

void memory_close(struct memory *memory) {
    struct stat now;
    if (memory->file && fstat(memory->fd, &now) == 0 && now.st_dev == memory->device && now.st_ino == memory->inode) {
        close(memory->fd);
    }
    memory->file = false;
}

bool memory_read(const struct memory *memory, void *to, uint64_t address, size_t bytes) {
    if (memory->vm) {
        return read_vm(to, address, bytes);
    }
    return memory->file && address <= INT64_MAX && pread(memory->fd, to, bytes, (off_t)address) == (ssize_t)bytes;
}

uint64_t memory_word(const struct memory *memory, uint64_t address) {
    uint64_t word = 0;
    return memory_read(memory, &word, address, sizeof word) ? word : 0;
}

bool memory_gather(const struct memory *memory, void *to, const uint64_t *addresses, uint32_t count, size_t bytes) {
    uint8_t *out = to;
    for (uint32_t done = 0; done < count;) {
        struct iovec remote[GATHER_MOST];
        const uint32_t pieces = !memory->vm ? 1 : count - done < GATHER_MOST ? count - done : GATHER_MOST;
        const struct iovec local = {.iov_base = out, .iov_len = pieces * bytes};
        for (uint32_t i = 0; i < pieces; i++) {
            remote[i].iov_base = (void *)(uintptr_t)addresses[done + i]; // NOLINT: never followed
            remote[i].iov_len = bytes;
        }
        const bool read = memory->vm
                              ? process_vm_readv(getpid(), &local, 1, remote, pieces, 0) == (ssize_t)local.iov_len
                              : memory_read(memory, out, addresses[done], bytes);
        if (!read) {
            return false;
        }
        done += pieces;
        out += local.iov_len;
    }
    return true;
}

bool memory_read_pieces(const struct memory *memory, const struct memory_piece *pieces, uint32_t count) {
    struct iovec local[MEMORY_PIECES_MOST];
    struct iovec remote[MEMORY_PIECES_MOST];
    size_t total = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (!memory->vm && !memory_read(memory, pieces[i].to, pieces[i].address, pieces[i].bytes)) {
            return false;
        }
        local[i] = (struct iovec){.iov_base = pieces[i].to, .iov_len = pieces[i].bytes};
        remote[i].iov_base = (void *)(uintptr_t)pieces[i].address; // NOLINT: never followed
        remote[i].iov_len = pieces[i].bytes;
        total += pieces[i].bytes;
    }
    return !memory->vm || process_vm_readv(getpid(), local, count, remote, count, 0) == (ssize_t)total;
}

static const uint8_t *page(struct memory *memory, uint64_t address) {
    for (uint32_t i = 0; i < MEMORY_PAGES; i++) {
        if (memory->address[i] == address) {
            return memory->bytes[i];
        }
    }
    const uint32_t slot = memory->next;
    memory->next = (slot + 1) % MEMORY_PAGES;
    memory->address[slot] = 0;
    if (!memory_read(memory, memory->bytes[slot], address, MEMORY_PAGE_BYTES)) {
        return NULL;
    }
    memory->address[slot] = address;
    return memory->bytes[slot];
}

bool memory_peek(struct memory *memory, void *to, uint64_t address, size_t bytes) {
    uint8_t *out = to;
    while (bytes > 0) {
        const uint64_t offset = address % MEMORY_PAGE_BYTES;
        const size_t here = MEMORY_PAGE_BYTES - offset < bytes ? MEMORY_PAGE_BYTES - offset : bytes;
        const uint8_t *found = address < MEMORY_PAGE_BYTES ? NULL : page(memory, address - offset);
        if (found == NULL) {
            return false;
        }
        memcpy(out, found + offset, here);
        out += here;
        address += here;
        bytes -= here;
    }
    return true;
}

void memory_forget(struct memory *memory) {
    memset(memory->address, 0, sizeof memory->address);
    memory->next = 0;
}
