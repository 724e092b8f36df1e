// For LD_PRELOAD: C++ objects of FENCE_LEAST to FENCE_MOST bytes get pages of their own, which are closed for ever when
// the objects are deleted. Whoever uses one afterwards dies of SIGSEGV at once, and not of what it has overwritten.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#define FENCE_LEAST 256u // PTI's commands have 350 to 400 bytes
#define FENCE_MOST 1024u
#define PAGE 4096u
#define MARK 0x6b696e65746f66ull

struct head {
    uint64_t mark;
    uint64_t bytes;
};

static uint64_t place_of(uint64_t bytes) { return PAGE - ((bytes + 15u) & ~15ull); } // at the end of the page

static struct head *head_of(void *object) {
    struct head *head = (struct head *)((uintptr_t)object & ~(uintptr_t)(PAGE - 1u)); // NOLINT
    const uint64_t place = (uintptr_t)object % PAGE;
    const int may_be = place >= place_of(FENCE_MOST) && place <= place_of(FENCE_LEAST);
    return may_be && head->mark == MARK && place == place_of(head->bytes) ? head : NULL;
}

// operator new(unsigned long)
void *_Znwm(uint64_t bytes) {
    if (bytes < FENCE_LEAST || bytes > FENCE_MOST) {
        return malloc(bytes == 0 ? 1 : bytes);
    }
    struct head *head = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (head == MAP_FAILED) {
        abort();
    }
    *head = (struct head){.mark = MARK, .bytes = bytes};
    return (char *)head + place_of(bytes);
}

// operator delete(void *)
void _ZdlPv(void *object) {
    struct head *head = object == NULL ? NULL : head_of(object);
    if (head == NULL) {
        free(object);
    } else {
        mprotect(head, PAGE, PROT_NONE);
    }
}

// operator delete(void *, unsigned long)
void _ZdlPvm(void *object, uint64_t bytes) {
    (void)bytes;
    _ZdlPv(object);
}
