/* System calls of code that has no C library: code that a live attach copies into a target. */
#ifndef KINETO_SYSTEM_CALL_H
#define KINETO_SYSTEM_CALL_H

#if defined __x86_64__
enum {
    SYS_READ = 0,
    SYS_CLOSE = 3,
    SYS_FSTAT = 5,
    SYS_RT_SIGPROCMASK = 14,
    SYS_GETPID = 39,
    SYS_FCNTL = 72,
    SYS_PRCTL = 157,
    SYS_GETTID = 186,
    SYS_FUTEX = 202,
    SYS_CLOCK_GETTIME = 228,
    SYS_TGKILL = 234,
    SYS_OPENAT = 257,
};

static inline long system_call(long number, long first, long second, long third, long fourth) {
    long result;
    register long r10 __asm__("r10") = fourth;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(first), "S"(second), "d"(third), "r"(r10)
                     : "rcx", "r11", "memory");
    return result;
}

/* getpid(), in fewer bytes than system_call() needs. */
static inline long own_process(void) {
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(SYS_GETPID) : "rcx", "r11", "memory");
    return result;
}
#elif defined __aarch64__
enum {
    SYS_FCNTL = 25,
    SYS_OPENAT = 56,
    SYS_CLOSE = 57,
    SYS_READ = 63,
    SYS_FSTAT = 80,
    SYS_FUTEX = 98,
    SYS_CLOCK_GETTIME = 113,
    SYS_TGKILL = 131,
    SYS_RT_SIGPROCMASK = 135,
    SYS_PRCTL = 167,
    SYS_GETPID = 172,
    SYS_GETTID = 178,
};

static inline long system_call(long number, long first, long second, long third, long fourth) {
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = first;
    register long x1 __asm__("x1") = second;
    register long x2 __asm__("x2") = third;
    register long x3 __asm__("x3") = fourth;
    __asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3) : "memory");
    return x0;
}

static inline long own_process(void) {
    register long x8 __asm__("x8") = SYS_GETPID;
    register long x0 __asm__("x0");
    __asm__ volatile("svc #0" : "=r"(x0) : "r"(x8) : "memory");
    return x0;
}
#endif

#endif
