/* Loops that own every register: the caller's values must still be there at the end of each piece.
 *
 * Built by campaign/attach_targets/machine.py with -mno-red-zone, so that the 128 bytes below rsp belong to the
 * assembly alone. check_* return 0 or the number of what was changed.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define VECTORS 16
#define GENERAL 8

struct piece {
    uint8_t vectors[VECTORS * 32];
    uint8_t found_vectors[VECTORS * 32];
    uint64_t general[GENERAL];
    uint64_t found_general[GENERAL];
    uint64_t zone[16];
    uint64_t found_zone[16];
    uint64_t carry;
    uint32_t mxcsr, found_mxcsr;
    uint16_t control, found_control;
    uint64_t count;
    struct timespec pause;
};

enum {
    RIGHT,
    VECTORS_CHANGED,
    GENERAL_CHANGED,
    ZONE_CHANGED,
    CARRY_CHANGED,
    MXCSR_CHANGED,
    X87_CHANGED,
    ERRNO_CHANGED,
    INTERRUPTED,
    WIDE_CHANGED,
    MASKS_CHANGED
};

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

/* rdi: the piece. MIDDLE may use rax, rcx, rdx, rsi, r11; flags but carry. */
#define LOAD(n) "vmovdqu " #n "*32(%%rdi), %%ymm" #n "\n"
#define SAVE(n) "vmovdqu %%ymm" #n ", 512+" #n "*32(%%rdi)\n"
#define ALL(M) M(0) M(1) M(2) M(3) M(4) M(5) M(6) M(7) M(8) M(9) M(10) M(11) M(12) M(13) M(14) M(15)
#define PUT(n) "movq 1152+8*" #n "(%%rdi), %%rax\n movq %%rax, -8-8*" #n "(%%rsp)\n"
#define GET(n) "movq -8-8*" #n "(%%rsp), %%rax\n movq %%rax, 1280+8*" #n "(%%rdi)\n"
_Static_assert(__builtin_offsetof(struct piece, general) == 1024, "used in the assembly");
_Static_assert(__builtin_offsetof(struct piece, found_general) == 1088, "used in the assembly");
_Static_assert(__builtin_offsetof(struct piece, zone) == 1152, "used in the assembly");
_Static_assert(__builtin_offsetof(struct piece, found_zone) == 1280, "used in the assembly");
_Static_assert(__builtin_offsetof(struct piece, carry) == 1408, "used in the assembly");
_Static_assert(__builtin_offsetof(struct piece, mxcsr) == 1416, "used in the assembly");
_Static_assert(__builtin_offsetof(struct piece, control) == 1424, "used in the assembly");
_Static_assert(__builtin_offsetof(struct piece, count) == 1432, "used in the assembly");
_Static_assert(__builtin_offsetof(struct piece, pause) == 1440, "used in the assembly");

#define PIECE(MIDDLE)                                                                                                  \
    __asm__ volatile(                                                                                                  \
        "stmxcsr -8(%%rsp)\n fnstcw -16(%%rsp)\n movq -8(%%rsp), %%r12\n movq -16(%%rsp), %%r13\n"                     \
        "pushq %%rbx\n pushq %%r12\n pushq %%r13\n"                                                                    \
        "ldmxcsr 1416(%%rdi)\n fldcw 1424(%%rdi)\n" ALL(LOAD) ALL(                                                     \
            PUT) "movq 1024(%%rdi), %%rbx\n movq 1032(%%rdi), %%r8\n movq 1040(%%rdi), %%r9\n"                         \
                 "movq 1048(%%rdi), %%r10\n movq 1056(%%rdi), %%r12\n movq 1064(%%rdi), %%r13\n"                       \
                 "movq 1072(%%rdi), %%r14\n movq 1080(%%rdi), %%r15\n" MIDDLE                                          \
                 "movq %%rbx, 1088(%%rdi)\n movq %%r8, 1096(%%rdi)\n movq %%r9, 1104(%%rdi)\n"                         \
                 "movq %%r10, 1112(%%rdi)\n movq %%r12, 1120(%%rdi)\n movq %%r13, 1128(%%rdi)\n"                       \
                 "movq %%r14, 1136(%%rdi)\n movq %%r15, 1144(%%rdi)\n"                                                 \
                 "movl $0, %%eax\n adcq $0, %%rax\n movq %%rax, 1408(%%rdi)\n" ALL(GET) ALL(                           \
                     SAVE) "stmxcsr 1420(%%rdi)\n fnstcw 1426(%%rdi)\n"                                                \
                           "popq %%r13\n popq %%r12\n popq %%rbx\n"                                                    \
                           "movq %%r12, -8(%%rsp)\n movq %%r13, -16(%%rsp)\n ldmxcsr -8(%%rsp)\n fldcw -16(%%rsp)\n"   \
        : "=a"(result)                                                                                                 \
        : "D"(piece)                                                                                                   \
        : "memory", "cc", "rcx", "rdx", "rsi", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1",   \
          "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", \
          "xmm15")

static void fill(struct piece *piece, uint64_t seed) {
    memset(piece, 0, sizeof *piece);
    for (unsigned at = 0; at < sizeof piece->vectors; at++) {
        piece->vectors[at] = (uint8_t)(seed * 31 + at * 7 + 1);
    }
    for (unsigned at = 0; at < GENERAL; at++) {
        piece->general[at] = seed * UINT64_C(0x9e3779b97f4a7c15) + at;
    }
    for (unsigned at = 0; at < 16; at++) {
        piece->zone[at] = ~seed * UINT64_C(0x9e3779b97f4a7c15) + at;
    }
    piece->mxcsr = 0x1f80 | 0x6000; /* round towards zero */
    piece->control = 0x0c7f;        /* likewise, 24 bits */
    piece->count = 300000;
    piece->pause.tv_nsec = 20000000;
}

static int compare(const struct piece *piece) {
    if (memcmp(piece->vectors, piece->found_vectors, sizeof piece->vectors)) {
        return VECTORS_CHANGED;
    }
    if (memcmp(piece->general, piece->found_general, sizeof piece->general)) {
        return GENERAL_CHANGED;
    }
    if (memcmp(piece->zone, piece->found_zone, sizeof piece->zone)) {
        return ZONE_CHANGED;
    }
    if (piece->carry != 1) {
        return CARRY_CHANGED;
    }
    if (piece->mxcsr != piece->found_mxcsr) {
        return MXCSR_CHANGED;
    }
    return piece->control == piece->found_control ? RIGHT : X87_CHANGED;
}

/* No system call is made in a piece: what is there after it is what was there before an interruption. */
int check_loop(double seconds) {
    struct piece storage, *piece = &storage;
    int64_t end = now_ns() + (int64_t)(seconds * 1e9);
    for (uint64_t seed = 1; now_ns() < end; seed++) {
        uint64_t result;
        fill(piece, seed);
        errno = 77;
        PIECE("movq 1432(%%rdi), %%rcx\n stc\n 1: dec %%rcx\n jnz 1b\n");
        int changed = compare(piece);
        if (changed) {
            return changed;
        }
        if (errno != 77) {
            return ERRNO_CHANGED;
        }
    }
    return RIGHT;
}

/* Asleep in a system call with all registers in use: the kernel promises to keep them. */
int check_asleep(double seconds) {
    struct piece storage, *piece = &storage;
    int64_t end = now_ns() + (int64_t)(seconds * 1e9);
    for (uint64_t seed = 1; now_ns() < end; seed++) {
        uint64_t result;
        int64_t begin = now_ns();
        fill(piece, seed);
        errno = 77;
        /* nanosleep(&piece->pause, NULL); its result goes to count; carry is set after it */
        PIECE("movq %%rdi, %%rdx\n addq $1440, %%rdi\n xorl %%esi, %%esi\n movl $35, %%eax\n syscall\n"
              "movq %%rdx, %%rdi\n movq %%rax, 1432(%%rdi)\n stc\n");
        int changed = compare(piece);
        if (changed) {
            return changed;
        }
        if (errno != 77) {
            return ERRNO_CHANGED;
        }
        if (piece->count || now_ns() - begin < piece->pause.tv_nsec) {
            return INTERRUPTED;
        }
    }
    return RIGHT;
}

/* The upper vector registers and the mask registers of AVX-512, where there are any. */
__attribute__((target("avx512f,avx512bw"))) static int wide_piece(uint64_t seed) {
    uint64_t masks[2], found_masks[2];
    uint8_t vectors[64 * 3], found[64 * 3];
    for (unsigned at = 0; at < sizeof vectors; at++) {
        vectors[at] = (uint8_t)(seed * 17 + at * 5 + 3);
    }
    masks[0] = seed * UINT64_C(0x9e3779b97f4a7c15);
    masks[1] = ~masks[0];
    uint64_t count = 300000;
    __asm__ volatile("vmovdqu64 (%[vectors]), %%zmm1\n vmovdqu64 64(%[vectors]), %%zmm16\n"
                     "vmovdqu64 128(%[vectors]), %%zmm31\n kmovq (%[masks]), %%k1\n kmovq 8(%[masks]), %%k7\n"
                     "1: dec %[count]\n jnz 1b\n"
                     "vmovdqu64 %%zmm1, (%[found])\n vmovdqu64 %%zmm16, 64(%[found])\n"
                     "vmovdqu64 %%zmm31, 128(%[found])\n kmovq %%k1, (%[kept])\n kmovq %%k7, 8(%[kept])\n vzeroupper\n"
                     : [count] "+r"(count)
                     : [vectors] "r"(vectors), [found] "r"(found), [masks] "r"(masks), [kept] "r"(found_masks)
                     : "memory", "cc", "xmm1", "xmm16", "xmm31", "k1", "k7");
    if (memcmp(vectors, found, sizeof vectors)) {
        return WIDE_CHANGED;
    }
    return memcmp(masks, found_masks, sizeof masks) ? MASKS_CHANGED : RIGHT;
}

int check_wide(double seconds) {
    int64_t end = now_ns() + (int64_t)(seconds * 1e9);
    if (!__builtin_cpu_supports("avx512bw")) {
        return RIGHT;
    }
    for (uint64_t seed = 1; now_ns() < end; seed++) {
        int changed = wide_piece(seed);
        if (changed) {
            return changed;
        }
    }
    return RIGHT;
}
