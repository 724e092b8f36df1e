/* See op_names.h.
 *
 * Theory of operation
 *   A name is looked up on every op, on any thread: a table of hashes to which entries are only added, by
 *   compare-and-swap, and which is read without a lock. Its text is written once, by the thread that finds it missing
 *   and gets the string table's lock; a thread that does not get it within some hundred tries goes on, and tries again
 *   later. No thread waits for the lock.
 *
 * Threads: any thread of the program that runs an op, and the agent's when the recording ends.
 * Blocks: never: a thread that does not get the lock within some hundred tries goes on.
 */
#include "torch/op_names.h"

#include <string.h>

#define SLOTS 32768u
#define USED_MOST (SLOTS / 4 * 3)
#define LOCK_TRIES 200u

enum { MISSING, WRITTEN, REFUSED };

struct set {
    uint64_t key[SLOTS]; /* 0: empty */
    uint8_t text[SLOTS];
    uint32_t used;
    uint64_t unplaced; /* look-ups that found no room */
};

static struct set names;
static struct set inputs;
static uint32_t lock;

static struct set *set_of(uint32_t space) { return space == ARENA_SPACE_OP_NAME ? &names : &inputs; }

static void reset(struct set *set) {
    if (set->used > 0) {
        memset(set, 0, sizeof *set);
    }
}

void ops_names_reset(void) {
    reset(&names);
    reset(&inputs);
    __atomic_store_n(&lock, 0, __ATOMIC_RELEASE); /* a thread that never runs again may hold it */
}

static bool try_lock(void) {
    for (uint32_t i = 0; i < LOCK_TRIES; i++) {
        if (__atomic_load_n(&lock, __ATOMIC_RELAXED) == 0 && __atomic_exchange_n(&lock, 1, __ATOMIC_ACQUIRE) == 0) {
            return true;
        }
    }
    return false;
}

static void unlock(void) { __atomic_store_n(&lock, 0, __ATOMIC_RELEASE); }

enum ops_interned ops_add_text(struct arena *arena, uint64_t key, uint32_t space, const void *data, uint32_t bytes) {
    if (!try_lock()) {
        return OPS_LATER;
    }
    const bool added = arena_add_string(arena, key, space, data, bytes);
    unlock();
    return added ? OPS_KNOWN : OPS_REFUSED;
}

static enum ops_interned write_text(struct arena *arena, struct set *set, uint32_t slot, uint64_t key, uint32_t space,
                                    const void *data, uint32_t bytes) {
    if (!try_lock()) {
        return OPS_LATER;
    }
    if (__atomic_load_n(&set->text[slot], __ATOMIC_RELAXED) == MISSING) {
        const bool added = arena_add_string(arena, key, space, data, bytes);
        __atomic_store_n(&set->text[slot], added ? WRITTEN : REFUSED, __ATOMIC_RELEASE);
    }
    unlock();
    return __atomic_load_n(&set->text[slot], __ATOMIC_RELAXED) == WRITTEN ? OPS_KNOWN : OPS_REFUSED;
}

/* The slot of `key`, which is added if it is new; SLOTS if there is no room. */
static uint32_t place(struct set *set, uint64_t key) {
    for (uint32_t slot = (uint32_t)(key >> 32) % SLOTS;; slot = (slot + 1) % SLOTS) {
        uint64_t found = __atomic_load_n(&set->key[slot], __ATOMIC_ACQUIRE);
        if (found == key) {
            return slot;
        }
        if (found != 0) {
            continue;
        }
        if (__atomic_load_n(&set->used, __ATOMIC_RELAXED) >= USED_MOST) {
            return SLOTS;
        }
        if (__atomic_compare_exchange_n(&set->key[slot], &found, key, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            __atomic_fetch_add(&set->used, 1, __ATOMIC_RELAXED);
            return slot;
        }
        if (found == key) {
            return slot;
        }
    }
}

enum ops_interned ops_intern(struct arena *arena, uint64_t key, uint32_t space, const void *data, uint32_t bytes) {
    struct set *set = set_of(space);
    const uint32_t slot = place(set, key);
    if (slot == SLOTS) {
        __atomic_fetch_add(&set->unplaced, 1, __ATOMIC_RELAXED);
        return OPS_REFUSED;
    }
    const uint8_t text = __atomic_load_n(&set->text[slot], __ATOMIC_ACQUIRE);
    if (text != MISSING) {
        return text == WRITTEN ? OPS_KNOWN : OPS_REFUSED;
    }
    return write_text(arena, set, slot, key, space, data, bytes);
}

void ops_late_keep(struct ops_late *late, uint64_t key, uint32_t space, const void *data, uint32_t bytes) {
    struct arena_string head;
    for (uint32_t at = 0; at < late->used; at += (uint32_t)sizeof head + head.length) {
        memcpy(&head, late->entries + at, sizeof head);
        if (head.key == key) {
            return;
        }
    }
    if (late->used + sizeof head + bytes <= sizeof late->entries) {
        head = (struct arena_string){.key = key, .space = space, .length = bytes};
        memcpy(late->entries + late->used, &head, sizeof head);
        memcpy(late->entries + late->used + sizeof head, data, bytes);
        late->used += (uint32_t)sizeof head + bytes;
    }
}

void ops_late_write(struct ops_late *late, struct arena *arena) {
    uint32_t done = 0;
    while (done < late->used) {
        struct arena_string head;
        memcpy(&head, late->entries + done, sizeof head);
        const uint8_t *text = late->entries + done + sizeof head;
        if (ops_intern(arena, head.key, head.space, text, head.length) == OPS_LATER) {
            break;
        }
        done += (uint32_t)sizeof head + head.length;
    }
    late->used -= done;
    memmove(late->entries, late->entries + done, late->used);
}

uint64_t ops_names_lost(uint32_t space) {
    const struct set *set = set_of(space);
    uint64_t lost = __atomic_load_n(&set->unplaced, __ATOMIC_RELAXED);
    for (uint32_t i = 0; i < SLOTS && set->used > 0; i++) {
        lost += __atomic_load_n(&set->key[i], __ATOMIC_RELAXED) != 0 &&
                __atomic_load_n(&set->text[i], __ATOMIC_RELAXED) != WRITTEN;
    }
    return lost;
}
