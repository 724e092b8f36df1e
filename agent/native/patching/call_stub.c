/* Theory of operation
 *
 * A displacement is changed by one store (lock cmpxchg16b of an aligned block of 16 bytes, which also proves that no
 * one has changed it before), while other threads may be fetching the call. We rely on this: a fetch sees either all or
 * nothing of one store if all changed bytes lie within one block that is fetched at once. AMD promises that for eight
 * aligned bytes (manual 2, "Cross-Modifying Code"), Intel promises nothing. In hardware the block is larger: the caches
 * exchange whole lines, and what a core reads of its instruction cache at once is an aligned block of 16 bytes (Intel
 * before Alder Lake) or more (32 on AMD since family 10h and on Intel's later cores). Measured with one thread that
 * calls and one that stores (Intel, family 6, model 167): of 113 million stores that crossed eight bytes within a block
 * none was seen in part; of 52,000 that crossed lines, 2,371 times. So a place that needs no more than the promise is
 * used if there is one, otherwise we rely on the 16 bytes. We do not rely on a whole line, though none of 39 million
 * stores was seen in part there: its blocks may be fetched one after the other.
 *
 * If a displacement crosses the limit, only its bytes on one side may change. The others limit where the stub can be:
 * with the low ones kept, every 256 bytes, 64 KiB or 16 MiB; with the high ones kept, anywhere in that many bytes
 * around the callee.
 *
 * A large program has mapped nearly all that a displacement reaches (2 GiB to either side): JAX leaves some twenty
 * holes, of 4 KiB to 2 MiB, and PyTorch with its libraries at times none. So only an entry lies near the call, a jump of
 * 14 bytes; stubs are anywhere. The free ranges are looked up (code_space.c), and the nearest place in them is taken.
 * Where none fits, the entry goes between the library's segments, as all that are linked for pages of 2 MiB have room
 * there (libcupti up to 12.9), else into its own code: the rest of its last page, or between two functions. Those
 * pages are writable, too, while entries are written. Calls that leave the least choice have theirs first: so
 * all have one in 13 of 13 versions of libcupti, from 11.7 to 13.5.
 *
 * The code's page becomes writable for the store and never ceases to be executable. A system that forbids this
 * (SELinux's execmod, PaX) refuses, and nothing has changed. Stubs stay mapped; a forked child has them, too.
 *
 * Threads: stubs run on the thread that enters the function, which they do not delay; the rest runs on the agent's
 *   thread.
 * Blocks: never. The page of the code is writable while the call is redirected.
 */
#define _GNU_SOURCE
#include "patching/call_site.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "patching/code_space.h"

#if defined(__x86_64__)

#include <cpuid.h>

#define PROMISED 8u /* aligned bytes that are changed at once; see above */
#define BLOCK 16u
#define STUB_BYTES 128u
#define ENTRY_BYTES 14u /* a jump to a stub, wherever that is */
#define PAGE 4096u
#define SLOTS (2 * PAGE / 16)
#define AREAS_MOST 32u
#define ROOMS_MOST 512u
#define LENT_MOST 64u
#define ATTEMPTS 4           /* another thread may take the same range */
#define REACH (1900ll << 20) /* less than the 2 GiB of a displacement, with the library's own size to spare */
#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

/* ---- stubs ---- */

static const uint8_t STUB_HEAD[] = {
    0x48, 0x8d, 0x64, 0x24, 0x80,                   /* lea -128(%rsp),%rsp: below it may be in use */
    0x9c,                                           /* pushf */
    0x50, 0x51, 0x52, 0x56, 0x57,                   /* push %rax, %rcx, %rdx, %rsi, %rdi */
    0x41, 0x50, 0x41, 0x51, 0x41, 0x52, 0x41, 0x53, /* push %r8 ... %r11 */
    0x55,                                           /* push %rbp */
    0x48, 0x89, 0xe5,                               /* mov %rsp,%rbp */
    0x48, 0x81, 0xec, 0x00, 0x02, 0x00, 0x00,       /* sub $512,%rsp */
    0x48, 0x83, 0xe4, 0xf0,                         /* and $-16,%rsp */
    0x48, 0x0f, 0xae, 0x04, 0x24,                   /* fxsave64 (%rsp) */
    0xfc,                                           /* cld */
    0x48, 0x8d, 0xb5, 0xd8, 0x00, 0x00, 0x00,       /* lea 216(%rbp),%rsi: %rsp as it was */
    0x48, 0xbf,                                     /* mov $user,%rdi */
};
static const uint8_t STUB_CALL[] = {0x48, 0xb8}; /* mov $reached,%rax */
static const uint8_t STUB_TAIL[] = {
    0xff, 0xd0,                                     /* call *%rax */
    0x48, 0x0f, 0xae, 0x0c, 0x24,                   /* fxrstor64 (%rsp) */
    0x48, 0x89, 0xec,                               /* mov %rbp,%rsp */
    0x5d,                                           /* pop %rbp */
    0x41, 0x5b, 0x41, 0x5a, 0x41, 0x59, 0x41, 0x58, /* pop %r11 ... %r8 */
    0x5f, 0x5e, 0x5a, 0x59, 0x58,                   /* pop %rdi, %rsi, %rdx, %rcx, %rax */
    0x9d,                                           /* popf */
    0x48, 0x8d, 0xa4, 0x24, 0x80, 0x00, 0x00, 0x00, /* lea 128(%rsp),%rsp */
    0xff, 0x25, 0x00, 0x00, 0x00, 0x00,             /* jmp *0(%rip): callee */
};
static const uint8_t ENTRY[] = {0xff, 0x25, 0x00, 0x00, 0x00, 0x00}; /* jmp *0(%rip): stub */
_Static_assert(sizeof STUB_HEAD + sizeof STUB_CALL + sizeof STUB_TAIL + 8 + 8 + 8 <= STUB_BYTES, "STUB_BYTES");
_Static_assert(sizeof ENTRY + sizeof(uint8_t *) == ENTRY_BYTES, "ENTRY_BYTES");

static uint8_t *append(uint8_t *at, const void *bytes, size_t count) {
    memcpy(at, bytes, count);
    return at + count;
}

static void write_stub(const struct call_site *site, uint8_t *stub, void *user, call_site_reached reached) {
    append(append(site->stub, ENTRY, sizeof ENTRY), &stub, sizeof stub);
    uint8_t *at = append(stub, STUB_HEAD, sizeof STUB_HEAD);
    at = append(at, &user, sizeof user);
    at = append(at, STUB_CALL, sizeof STUB_CALL);
    at = append(at, &reached, sizeof reached);
    at = append(at, STUB_TAIL, sizeof STUB_TAIL);
    append(at, &site->callee, sizeof site->callee);
}

/* ---- where an entry can be ---- */

static int64_t displacement_to(const struct call_site *site, const uint8_t *place) { return place - site->next; }

/* How many bytes of a displacement lie before the limit. */
static uint32_t bytes_before(const struct call_site *site, uint32_t block) {
    const uint32_t before = block - (uint32_t)((uintptr_t)site->displacement % block);
    return before < 4 ? before : 4;
}

/* The value of these bytes; 0 if it does not cross the limit. */
static int64_t low_bits(const struct call_site *site, uint32_t block) {
    const uint32_t before = bytes_before(site, block);
    return before == 4 ? 0 : (1ll << 8 * before) - 1;
}

static bool fits(const struct call_site *site, const uint8_t *stub, uint32_t block) {
    const int64_t low = low_bits(site, block);
    const int64_t now = displacement_to(site, site->callee), wanted = displacement_to(site, stub);
    const int64_t changed = now ^ wanted;
    return wanted > -REACH && wanted < REACH && ((changed & low) == 0 || (low != 0 && (changed & ~low) == 0));
}

/* The place nearest to `near` among those that differ from `like` by whole steps; NULL: none in the range. */
static uint8_t *nearest(struct room room, int64_t step, const uint8_t *like, const uint8_t *near) {
    const uintptr_t residue = (uintptr_t)like & (uintptr_t)(step - 1);
    const uintptr_t mask = ~(uintptr_t)(step - 1);
    uintptr_t place;
    if (room.end < room.begin + ENTRY_BYTES) {
        return NULL;
    }
    if ((uintptr_t)near >= room.end) {
        place = ((room.end - ENTRY_BYTES - residue) & mask) + residue;
    } else {
        place = ((room.begin - residue + (uintptr_t)step - 1) & mask) + residue;
    }
    return place >= room.begin && place <= room.end - ENTRY_BYTES ? (uint8_t *)place : NULL; /* NOLINT */
}

/* The part of the range that a displacement reaches with its high bytes unchanged. */
static struct room with_high_kept(const struct call_site *site, int64_t low, struct room room) {
    const uintptr_t begin = (uintptr_t)(site->next + (displacement_to(site, site->callee) & ~low));
    const uintptr_t end = begin + (uintptr_t)low + ENTRY_BYTES;
    return (struct room){room.begin > begin ? room.begin : begin, room.end < end ? room.end : end};
}

static uint8_t *place_in(const struct call_site *site, uint32_t block, struct room room) {
    const int64_t low = low_bits(site, block);
    uint8_t *place = nearest(room, low + 1, site->callee, site->next);
    if (place == NULL && low != 0) {
        place = nearest(with_high_kept(site, low, room), 1, site->callee, site->next);
    }
    return place != NULL && fits(site, place, block) ? place : NULL;
}

/* ---- areas: where the entries are ---- */

struct area {
    uint8_t *at;
    size_t bytes;
    bool mapped;       /* by us where nothing was; else the library has the pages for itself */
    bool taken[SLOTS]; /* by sixteen bytes, as entries may have to begin at any byte */
};

static bool take(struct area *area, struct call_site *site, uint8_t *stub) {
    const size_t offset = (size_t)(stub - area->at);
    const size_t first = offset / 16, last = (offset + ENTRY_BYTES - 1) / 16;
    for (size_t i = first; i <= last; i++) {
        if (area->taken[i]) {
            return false;
        }
    }
    memset(&area->taken[first], true, last - first + 1);
    site->stub = stub;
    return true;
}

static bool take_room(struct area *area, struct call_site *site, uint32_t block) {
    for (uint8_t *stub = area->at; stub + ENTRY_BYTES <= area->at + area->bytes; stub++) {
        if (fits(site, stub, block) && take(area, site, stub)) {
            return true;
        }
    }
    return false;
}

static bool map_area(struct area *area, uint8_t *stub, bool behind_code) {
    uint8_t *begin = stub - (uintptr_t)stub % PAGE;
    const size_t bytes = stub + ENTRY_BYTES <= begin + PAGE ? PAGE : 2 * PAGE;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | (behind_code ? MAP_FIXED : MAP_FIXED_NOREPLACE);
    uint8_t *made = mmap(begin, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (made == MAP_FAILED) {
        return false;
    }
    if (made != begin) { /* an old kernel treated it as a hint */
        munmap(made, bytes);
        return false;
    }
    *area = (struct area){.at = made, .bytes = bytes, .mapped = !behind_code};
    return true;
}

static int protect(const struct area *area, int protection) {
    const size_t before = (uintptr_t)area->at % PAGE;
    return mprotect(area->at - before, before + area->bytes, protection) == 0 ? 0 : errno;
}

struct areas {
    struct area of[AREAS_MOST];
    uint32_t count;
    struct room lent[LENT_MOST]; /* of the library, unless they are areas already */
    uint32_t lent_count;
    bool lent_known;
    struct room rooms[ROOMS_MOST];
    uint32_t rooms_count;
    bool rooms_known;        /* as long as nothing has been mapped */
    struct room behind_code; /* what is left of it */
    bool behind_code_known;
};

static uint8_t *nearest_place(const struct call_site *site, uint32_t block, struct areas *areas) {
    const uintptr_t next = (uintptr_t)site->next;
    uint8_t *best = NULL;
    if (!areas->rooms_known) {
        areas->rooms_count = room_between(next > REACH ? next - REACH : 0, next + REACH, areas->rooms, ROOMS_MOST);
        areas->rooms_known = true;
    }
    for (uint32_t i = 0; i < areas->rooms_count; i++) {
        uint8_t *place = place_in(site, block, areas->rooms[i]);
        if (place != NULL && (best == NULL || llabs(place - site->next) < llabs(best - site->next))) {
            best = place;
        }
    }
    return best;
}

static bool find_free(struct call_site *site, uint32_t block, struct areas *areas) {
    for (uint32_t i = 0; i < areas->count; i++) {
        if (take_room(&areas->of[i], site, block)) {
            return true;
        }
    }
    for (int attempt = 0; attempt < ATTEMPTS && areas->count < AREAS_MOST; attempt++) {
        uint8_t *place = nearest_place(site, block, areas);
        if (place == NULL) {
            return false;
        }
        areas->rooms_known = false;
        if (map_area(&areas->of[areas->count], place, false)) {
            return take(&areas->of[areas->count++], site, place);
        }
    }
    return false;
}

static bool find_behind_code(struct call_site *site, uint32_t block, struct areas *areas) {
    struct room *room = &areas->behind_code;
    if (!areas->behind_code_known) {
        areas->behind_code_known = true;
        if (!room_behind_code(site->next, room)) {
            *room = (struct room){0, 0};
        }
    }
    uint8_t *place = areas->count < AREAS_MOST ? place_in(site, block, *room) : NULL;
    struct area *area = &areas->of[areas->count];
    if (place == NULL || !map_area(area, place, true)) {
        return false;
    }
    areas->count++;
    room->begin = (uintptr_t)area->at + area->bytes;
    return take(area, site, place);
}

static bool find_lent(struct call_site *site, uint32_t block, struct areas *areas) {
    if (!areas->lent_known) {
        areas->lent_count = room_in_library(site->next, ENTRY_BYTES, areas->lent, LENT_MOST);
        areas->lent_known = true;
    }
    for (uint32_t i = 0; i < areas->lent_count && areas->count < AREAS_MOST; i++) {
        struct area *area = &areas->of[areas->count];
        *area = (struct area){.at = (uint8_t *)areas->lent[i].begin, /* NOLINT */
                              .bytes = areas->lent[i].end - areas->lent[i].begin};
        if (!take_room(area, site, block)) {
            continue;
        }
        areas->lent[i] = (struct room){0, 0};
        if (protect(area, PROT_READ | PROT_WRITE | PROT_EXEC) == 0) {
            areas->count++;
            return true;
        }
        site->stub = NULL;
    }
    return false;
}

static bool find_room(struct call_site *site, struct areas *areas) {
    return find_free(site, PROMISED, areas) || find_free(site, BLOCK, areas) ||
           find_behind_code(site, PROMISED, areas) || find_behind_code(site, BLOCK, areas) ||
           find_lent(site, PROMISED, areas) || find_lent(site, BLOCK, areas);
}

static bool changes_blocks(void) {
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_CMPXCHG16B) != 0;
}

int call_sites_prepare(struct call_site *sites, void *const *users, uint32_t count, call_site_reached reached) {
    struct areas areas = {.count = 0};
    const size_t bytes = ((size_t)count * STUB_BYTES + PAGE - 1) / PAGE * PAGE;
    uint8_t *stubs = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stubs == MAP_FAILED) {
        return count == 0 ? 0 : errno;
    }
    int error = changes_blocks() ? 0 : ENOSYS;
    for (uint32_t before = 1; before <= 4; before++) { /* those with the least choice first */
        for (uint32_t i = 0; i < count && error == 0; i++) {
            if (bytes_before(&sites[i], BLOCK) == before && find_room(&sites[i], &areas)) {
                write_stub(&sites[i], stubs + (size_t)i * STUB_BYTES, users[i], reached);
            }
        }
    }
    for (uint32_t i = 0; i < areas.count; i++) {
        const int refused = protect(&areas.of[i], PROT_READ | PROT_EXEC);
        error = error == 0 ? refused : error;
    }
    if (error == 0 && mprotect(stubs, bytes, PROT_READ | PROT_EXEC) != 0) {
        error = errno;
    }
    for (uint32_t i = 0; i < areas.count && error != 0; i++) {
        if (areas.of[i].mapped) {
            munmap(areas.of[i].at, areas.of[i].bytes);
        }
    }
    for (uint32_t i = 0; i < count && error != 0; i++) {
        sites[i].stub = NULL;
    }
    if (error != 0) {
        munmap(stubs, bytes);
    }
    return error;
}

/* ---- redirecting ---- */

struct block {
    uint64_t words[BLOCK / sizeof(uint64_t)];
};

static bool exchange(struct block *at, const struct block *expected, const struct block *wanted) {
    bool done;
    uint64_t first = expected->words[0], second = expected->words[1];
    __asm__ volatile("lock cmpxchg16b %1\n\tsete %0"
                     : "=q"(done), "+m"(*at), "+a"(first), "+d"(second)
                     : "b"(wanted->words[0]), "c"(wanted->words[1])
                     : "cc", "memory");
    return done;
}

int call_site_redirect(const struct call_site *site, bool to_stub) {
    const int32_t ways[] = {(int32_t)displacement_to(site, site->callee), (int32_t)displacement_to(site, site->stub)};
    int32_t now;
    memcpy(&now, site->displacement, sizeof now);
    if (now != ways[!to_stub]) {
        return now == ways[to_stub] ? 0 : EBUSY; /* another tool has changed it */
    }
    uint8_t changed[sizeof now];
    memcpy(changed, &ways[to_stub], sizeof changed);
    uint32_t first = 0; /* of the changed bytes: all of them are in its block */
    while (first < sizeof changed - 1 && changed[first] == site->displacement[first]) {
        first++;
    }
    uint8_t *begin = site->displacement + first - (uintptr_t)(site->displacement + first) % BLOCK;
    uint8_t *page = begin - (uintptr_t)begin % PAGE;
    struct block before, after;
    memcpy(&before, begin, sizeof before);
    after = before;
    for (uint32_t i = first; i < sizeof changed && site->displacement + i < begin + BLOCK; i++) {
        ((uint8_t *)&after)[site->displacement + i - begin] = changed[i];
    }
    if (mprotect(page, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC) != 0) {
        return errno;
    }
    const bool done = exchange((struct block *)(void *)begin, &before, &after);
    (void)mprotect(page, PAGE, PROT_READ | PROT_EXEC);
    return done ? 0 : EBUSY;
}

#else /* no stubs for this architecture */

int call_sites_prepare(struct call_site *sites, void *const *users, uint32_t count, call_site_reached reached) {
    (void)sites;
    (void)users;
    (void)reached;
    return count == 0 ? 0 : ENOSYS;
}

int call_site_redirect(const struct call_site *site, bool to_stub) {
    (void)site;
    (void)to_stub;
    return ENOSYS;
}

#endif
