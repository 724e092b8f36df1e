/* The controls of the fake driver (fake_driver.c). */
#ifndef FAKE_DRIVER_H
#define FAKE_DRIVER_H

#include <stdint.h>

enum fake_driver_setting {
    FAKE_CONTEXTS,     /* active primary contexts; 0 to 2, -1: CUDA is not initialised */
    FAKE_STEADY_MS,    /* the queue is this long whenever somebody looks */
    FAKE_NEVER,        /* 1: what is queued does not end */
    FAKE_OTHER_NEVER,  /* 1: in contexts that are not primary */
    FAKE_BLOCK_CREATE, /* 1: these calls do not return */
    FAKE_BLOCK_RETAIN,
    FAKE_BLOCK_RECORD,
    FAKE_BLOCK_HELD, /* cuCtxRecordEvent, where fake_driver_is_held says so */
    FAKE_STARVED,    /* 1: what takes the lock of launches alone does not return before fake_driver_is_held says so */
    FAKE_SETTINGS
};

void fake_driver_set(enum fake_driver_setting setting, int value);
void fake_driver_is_held(int (*held)(void));
/* A thread is in a call that is blocked. */
int fake_driver_blocked(void);
/* Captures that cuCtxRecordEvent has ended so far. */
unsigned fake_driver_harmed(void);
/* Launches whose arguments were not as they have to be (fake_driver.c). */
unsigned fake_driver_garbled(void);
unsigned fake_driver_launched(void);
unsigned fake_driver_recorded(void);
/* Every exported function leads to its own implementation. */
int fake_driver_intact(void);
/* A context was used that did not exist any more, or whose destruction was going on. */
unsigned fake_driver_stale(void);

#endif
