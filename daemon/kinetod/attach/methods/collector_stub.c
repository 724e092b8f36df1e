/* The first code of a new thread in a process without Python: creates the channel, receives the collector, serves it.
 *
 *     python daemon/native/generate_stub_code.py
 *
 * compiles it into the bytes of collector_code.py. Only these bytes are copied into the target: no data, no relocation,
 * no libc. It makes its own system calls, and gets functions of the target in the argument. It may block and may take
 * any lock, since it runs on a thread of its own. collector_thread.py is the other half. It makes only system calls
 * that seccomp_check.py lists: a filter may kill the process for others.
 *
 * It leaves no frame on the stack while the collector serves, possibly for days: kc_serve is a tail call, so the memory
 * of these bytes can be reused by then.
 */
#include "collector_stub.h"

struct way {
    collector_serve serve; /* NULL: end the thread */
    long socket;
};

static struct way prepare(const struct collector_argument *given);

/* First in the file: the bytes begin here. */
void *collector_thread(const struct collector_argument *given) {
    const struct way way = prepare(given);
    return way.serve != 0 ? way.serve((int)way.socket) : 0;
}

#if defined __x86_64__
enum { SYS_CLOSE = 3, SYS_POLL = 7, SYS_SENDMSG = 46, SYS_RECVMSG = 47, SYS_SOCKETPAIR = 53, SYS_MEMFD_CREATE = 319 };

static inline long call(long number, long a, long b, long c, long d, long e, long f) {
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}
#elif defined __aarch64__
enum {
    SYS_CLOSE = 57,
    SYS_PPOLL = 73,
    SYS_SENDMSG = 211,
    SYS_RECVMSG = 212,
    SYS_SOCKETPAIR = 199,
    SYS_MEMFD_CREATE = 279
};

static inline long call(long number, long a, long b, long c, long d, long e, long f) {
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
}
#endif

#define TEXT_BYTES 512
#define CONTROL_BYTES 64

enum {
    UNIX = 1,
    SEQPACKET_CLOEXEC = 5 | 02000000,
    MEMFD_CLOEXEC = 1,
    RIGHTS_LEVEL = 1, /* SOL_SOCKET */
    RIGHTS_TYPE = 1,  /* SCM_RIGHTS */
    RECEIVE_CLOEXEC = 0x40000000,
    NO_SIGNAL = 0x4000,
    POLL_IN = 1,
    OPEN_NOW = 2,
};

struct control {
    unsigned long bytes; /* of a struct cmsghdr */
    int level, type, fd, more[(CONTROL_BYTES - 20) / 4];
};

struct message { /* struct msghdr */
    void *name;
    unsigned int name_bytes;
    void *parts;
    unsigned long part_count;
    void *control;
    unsigned long control_bytes;
    int flags;
};

struct part {
    void *data;
    unsigned long bytes;
};

static inline void close_fd(long fd) {
    if (fd >= 0) {
        (void)call(SYS_CLOSE, fd, 0, 0, 0, 0, 0);
    }
}

/* Appends a number in decimal. */
static inline void put_number(char *text, unsigned int number) {
    unsigned int divisor = 1;
    while (*text != 0) {
        text++;
    }
    while (number / divisor >= 10) {
        divisor *= 10;
    }
    for (; divisor > 0; divisor /= 10) {
        *text++ = (char)('0' + number / divisor % 10);
    }
    *text = 0;
}

/* Whether a packet (or the end) arrives before the limit. */
static inline int await(int socket, long limit_ms) {
    struct {
        int fd;
        short events, returned;
    } wanted = {socket, POLL_IN, 0};
#if defined __x86_64__
    return call(SYS_POLL, (long)&wanted, 1, limit_ms, 0, 0, 0) > 0;
#else
    struct {
        long seconds, nanoseconds;
    } limit = {limit_ms / 1000, limit_ms % 1000 * 1000000};
    return call(SYS_PPOLL, (long)&wanted, 1, (long)&limit, 0, 0, 0) > 0;
#endif
}

static inline void fill(struct message *message, struct part *part, void *control, unsigned long control_bytes) {
    message->name = 0;
    message->name_bytes = 0;
    message->parts = part;
    message->part_count = 1;
    message->control = control;
    message->control_bytes = control_bytes;
    message->flags = 0;
}

/* Returns the descriptor that came with the first packet; -1: none came, -2: no packet. */
static inline int receive(int socket, long limit_ms) {
    struct control control;
    char byte;
    struct part part = {&byte, 1};
    struct message message;
    fill(&message, &part, &control, CONTROL_BYTES);
    if (!await(socket, limit_ms) || call(SYS_RECVMSG, socket, (long)&message, RECEIVE_CLOEXEC, 0, 0, 0) <= 0) {
        return -2;
    }
    return message.control_bytes >= 20 && control.level == RIGHTS_LEVEL && control.type == RIGHTS_TYPE ? control.fd
                                                                                                       : -1;
}

/* Reports why there is no collector. */
static inline void complain(int socket, const struct collector_argument *argument) {
    char text[TEXT_BYTES];
    struct part part = {text, 1};
    struct message message;
    const char *why = argument->error != 0 ? argument->error() : 0;
    text[0] = COLLECTOR_REFUSED;
    while (why != 0 && *why != 0 && part.bytes < TEXT_BYTES) {
        text[part.bytes++] = *why++;
    }
    fill(&message, &part, 0, 0);
    (void)call(SYS_SENDMSG, socket, (long)&message, NO_SIGNAL, 0, 0, 0);
}

static inline collector_serve load(struct collector_argument *argument, int library) {
    put_number(argument->path, (unsigned int)library);
    void *handle = argument->open(argument->path, OPEN_NOW);
    return handle != 0 ? (collector_serve)argument->symbol(handle, argument->name) : 0;
}

static __attribute__((noinline)) struct way prepare(const struct collector_argument *given) {
    const struct way nowhere = {0, 0};
    struct collector_argument argument; /* the caller's copy may be gone soon */
    for (unsigned long i = 0; i < sizeof argument; i++) {
        ((volatile char *)&argument)[i] = ((const char *)given)[i];
    }
    int pair[2];
    if (argument.detach != 0) {
        (void)argument.detach(argument.self());
    }
    if (call(SYS_SOCKETPAIR, UNIX, SEQPACKET_CLOEXEC, 0, (long)pair, 0, 0) < 0) {
        return nowhere;
    }
    put_number(argument.channel, (unsigned int)pair[1]);
    const long sign = call(SYS_MEMFD_CREATE, (long)argument.channel, MEMFD_CLOEXEC, 0, 0, 0, 0);
    const int library = sign >= 0 ? receive(pair[0], argument.wait_ms) : -2;
    close_fd(sign);
    close_fd(pair[1]);
    collector_serve serve = argument.serve;
    if (serve == 0 && library >= 0) {
        serve = load(&argument, library);
    }
    close_fd(library);
    if (library != -2 && serve != 0) {
        const struct way way = {serve, pair[0]};
        return way;
    }
    if (library != -2) {
        complain(pair[0], &argument);
    }
    close_fd(pair[0]);
    return nowhere;
}
