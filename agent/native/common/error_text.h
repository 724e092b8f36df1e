/* How an exported function reports an error: a code, and a text for people. */
#ifndef KINETO_REFUSE_H
#define KINETO_REFUSE_H

#include <stdio.h>
#include <string.h>

#include "common/export.h"

static inline int refuse(int code, char *error, size_t error_bytes, const char *text) {
    snprintf(error, error_bytes, "%s", text);
    return code;
}

/* Fills the text for a failed system call and its errno. */
static inline int refuse_system(char *error, size_t error_bytes, const char *step, int number) {
    snprintf(error, error_bytes, "%s failed: %s", step, strerror(number));
    return KC_SYSTEM;
}

#endif
