/* A start callback of at::RecordFunction, in C: `handler` gets the RecordFunction and the scope.
 *
 * torch passes the start callback the address of a std::unique_ptr, which must be made empty. On x86-64 its address is
 * the first argument and the return value; on AArch64 it is in x8, which C cannot name.
 */
#ifndef KINETO_START_CALLBACK_H
#define KINETO_START_CALLBACK_H

#include <stddef.h>

#if defined(__x86_64__)
#define OPS_START(callback, handler, scope)                       \
    static void *callback(void **context, const void *function) { \
        *context = NULL;                                          \
        handler(function, scope);                                 \
        return context;                                           \
    }
#elif defined(__aarch64__)
#define OPS_START(callback, handler, scope)                                                                  \
    __attribute__((used)) static void callback##_body(const void *function) __asm__(#callback "_body");      \
    static void callback##_body(const void *function) { handler(function, scope); }                          \
    void callback(void) __attribute__((visibility("hidden")));                                               \
    __asm__(".text\n.hidden " #callback "\n.globl " #callback "\n.type " #callback ", %function\n" #callback \
            ":\n    hint #34\n    str xzr, [x8]\n    b " #callback "_body\n.size " #callback ", .-" #callback "\n");
#else
#error "the calling convention of std::unique_ptr results is not known for this machine"
#endif

#endif
