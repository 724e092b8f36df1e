/* Redirects the first calls of a real libcupti's functions and back, in a process without a GPU.
 *
 *   drive_call_site LIBCUPTI roomy|dense|full
 *
 * If it is `full`, there is no room but the library's own. If it is `dense`, there is no more room around it than in a
 * JAX program.
 * The functions fail without a driver: they must do so in the same way through a stub. Exits with 0 if they do, and
 * with 2 if this libcupti cannot even be asked (13.2 recurses for ever).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "patching/call_site.h"
#include "check.h"
#include "dense.h"
#include "patching/code_space.h"

#define SITES_OF_ONE 4u
#define FUNCTIONS 3u
#define NAMES_COUNT 12u

/* The first are called. The others are what some versions have. */
static const char *const NAMES[NAMES_COUNT] = {"cuptiActivityRegisterCallbacks",
                                               "cuptiSubscribe",
                                               "cuptiActivityEnable",
                                               "cuptiSubscribe_v2",
                                               "cuptiActivityRegisterCallbacks_v2",
                                               "cuptiActivityEnable_v2",
                                               "cuptiActivityEnableContext",
                                               "cuptiActivityEnableAndDump",
                                               "cuptiActivityDisable",
                                               "cuptiActivityDisable_v2",
                                               "cuptiActivityDisableContext",
                                               "cuptiFinalize"};
static void *functions[NAMES_COUNT];
static struct call_site sites[NAMES_COUNT * SITES_OF_ONE];
static uint32_t site_count;
static uint32_t visits;
static bool by_us;

static void reached(void *user, const uint8_t *stack) {
    const struct call_site *site = user;
    Dl_info caller, own;
    void *address;
    memcpy(&address, stack + site->depth, sizeof address);
    CHECK(dladdr((void *)reached, &own) != 0);
    by_us = dladdr(address, &caller) != 0 && caller.dli_fbase == own.dli_fbase;
    visits++;
    /* Whatever a function may change of the registers. */
    __asm__ volatile("xor %%eax, %%eax; mov %%rax, %%rcx; mov %%rax, %%rdx; mov %%rax, %%rsi; mov %%rax, %%rdi;"
                     "mov %%rax, %%r8; mov %%rax, %%r9; mov %%rax, %%r10; mov %%rax, %%r11; pcmpeqd %%xmm0, %%xmm0" ::
                         : "rax", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11", "xmm0", "cc");
}

static void answers(int *results) {
    void *subscriber = NULL;
    results[0] = ((int (*)(void *, void *))functions[0])((void *)answers, (void *)answers);
    results[1] = ((int (*)(void **, void *, void *))functions[1])(&subscriber, (void *)answers, NULL);
    results[2] = ((int (*)(uint32_t))functions[2])(10);
}

static void find(void *library) {
    for (uint32_t i = 0; i < NAMES_COUNT; i++) {
        Dl_info info;
        ElfW(Sym) *symbol = NULL;
        functions[i] = dlsym(library, NAMES[i]);
        if (functions[i] == NULL && i >= FUNCTIONS) {
            continue;
        }
        CHECK(functions[i] != NULL && dladdr1(functions[i], &info, (void **)&symbol, RTLD_DL_SYMENT) != 0);
        const uint32_t found = call_sites_find(functions[i], symbol->st_size, sites + site_count, SITES_OF_ONE);
        CHECK(found > 0);
        site_count += found;
    }
}

static bool can_be_asked(void) {
    const pid_t child = fork();
    int results[FUNCTIONS], status = -1;
    if (child == 0) {
        answers(results);
        _exit(0);
    }
    return waitpid(child, &status, 0) == child && status == 0;
}

static void redirect(bool to_stub) {
    for (uint32_t i = 0; i < site_count; i++) {
        CHECK(call_site_redirect(&sites[i], to_stub) == 0);
    }
}

static bool is_free(uintptr_t begin, uintptr_t end) {
    unsigned char pages[1];
    bool all = true;
    for (uintptr_t at = begin; at < end; at += 4096) {
        all &= mincore((void *)at, 4096, pages) != 0; /* NOLINT */
    }
    return all;
}

/* They are free, with a page before and after, and the stack has its own. */
static void check_rooms(void) {
    struct room rooms[64];
    const uintptr_t stack = (uintptr_t)rooms, near = (uintptr_t)functions[0];
    const uint32_t count = room_between(near - (1900u << 20), near + (1900u << 20), rooms, 64);
    for (uint32_t i = 0; i < count; i++) {
        const uintptr_t last = rooms[i].end - rooms[i].begin > (64 << 20) ? rooms[i].begin + (64 << 20) : rooms[i].end;
        CHECK(is_free(rooms[i].begin - 4096, last) && is_free(rooms[i].end - 4096, rooms[i].end + 4096));
        CHECK(rooms[i].end < stack - DENSE_STACK || rooms[i].begin > stack);
    }
}

int main(int count, char **arguments) {
    int before[FUNCTIONS], gated[FUNCTIONS], after[FUNCTIONS];
    void *users[NAMES_COUNT * SITES_OF_ONE];
    CHECK(count == 3);
    void *library = dlopen(arguments[1], RTLD_NOW);
    CHECK(library != NULL);
    find(library);
    for (uint32_t i = 0; i < site_count; i++) {
        users[i] = &sites[i];
    }
    const bool full = strcmp(arguments[2], "full") == 0;
    if (full || strcmp(arguments[2], "dense") == 0) {
        Dl_info info;
        CHECK(dladdr(functions[0], &info) != 0);
        dense_make(info.dli_fbase, full ? 0 : DENSE_HOLE_COUNT);
    }
    check_rooms();
    CHECK(call_sites_prepare(sites, users, site_count, reached) == 0);
    for (uint32_t i = 0; i < site_count; i++) {
        CHECK(sites[i].stub != NULL);
    }
    if (!can_be_asked()) {
        redirect(true);
        redirect(false);
        return 2;
    }
    answers(before);
    redirect(true);
    answers(gated);
    CHECK(visits >= FUNCTIONS && by_us);
    redirect(false);
    visits = 0;
    answers(after);
    CHECK(visits == 0);
    CHECK(memcmp(before, gated, sizeof before) == 0 && memcmp(before, after, sizeof before) == 0);
    return 0;
}
