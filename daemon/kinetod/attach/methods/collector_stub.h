/* The argument of collector_thread; collector_thread.py writes it. */
#ifndef KINETO_COLLECTOR_STUB_H
#define KINETO_COLLECTOR_STUB_H

#define COLLECTOR_REFUSED 'E' /* first byte of a packet that says why there is no collector; the text follows */

typedef void *(*collector_serve)(int fd); /* kc_serve; the thread ignores its result */

struct collector_argument {
    void *(*open)(const char *path, int mode);        /* dlopen */
    void *(*symbol)(void *library, const char *name); /* dlsym */
    char *(*error)(void);                             /* dlerror, or NULL */
    unsigned long (*self)(void);                      /* pthread_self */
    int (*detach)(unsigned long thread);              /* pthread_detach, or NULL */
    collector_serve serve;                            /* NULL: load the library that is sent */
    long wait_ms;                                     /* how long to wait for the first packet */
    char channel[64];                                 /* "kineto-TOKEN-"; the descriptor is appended */
    char path[32];                                    /* "/proc/self/fd/"; likewise */
    char name[16];                                    /* "kc_serve" */
};

#endif
