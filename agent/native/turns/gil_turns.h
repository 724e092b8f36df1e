/* Turns with the GIL; gil_turns.c explains the purpose. begin_turns.c of the agent, or the daemon's python_entry.py,
 * fills in a struct python_turns. */
#ifndef KINETO_GIL_TURNS_H
#define KINETO_GIL_TURNS_H

#define ATTRIBUTES_BYTES 64 /* of a pthread_attr_t, the largest */

enum turns_role { ROLE_BEGIN = 1, ROLE_END = 2, ROLE_THREAD = 3, ROLE_CALL = 4 };

struct python_turns;

/* How turns_enter is called: by the thread that starts it, as the start routine of the thread, and by the
 * interpreter. */
struct turns_role_of {
    unsigned long role;
    struct python_turns *given;
};

typedef void *turns_code(struct turns_role_of *);

/* The agent knows its address and writes the marked fields. */
struct python_turns {
    volatile int rest;              /* the agent's: 0: it works; else it waits for something else, -1: forever, or at
                                     * most so many ms, times two; the lowest bit tells one rest from the next */
    volatile unsigned int over;     /* the agent's, too: nothing more is queued */
    volatile unsigned int queueing; /* a call is being queued */
    volatile unsigned int handed;   /* how often the GIL was released for it */
    volatile unsigned int queued;   /* a queued call has not come yet */
    volatile unsigned int thread;   /* the agent's, which writes it itself if `awaited`; 0 until then */
    unsigned int process;           /* the agent's */
    unsigned int awaited;           /* 1: the agent's thread is started next; 0: it is the one that begins */
    volatile unsigned long cpu_ns;  /* the agent's, when last read */
    struct turns_role_of as_agent, as_thread, as_call;
    turns_code *code;                                    /* turns_enter, or NULL: no thread */
    int (*attributes)(void *attributes);                 /* pthread_attr_init */
    int (*stack)(void *attributes, unsigned long bytes); /* pthread_attr_setstacksize */
    int (*create)(unsigned long *, void *attributes, turns_code *, struct turns_role_of *); /* pthread_create */
    unsigned long (*self)(void);                                                            /* pthread_self */
    int (*detach)(unsigned long);                                                           /* pthread_detach */
    void *(*interpreter)(void);                                                 /* PyInterpreterState_Main */
    int (*initialised)(void);                                                   /* Py_IsInitialized */
    int (*queue)(void *interpreter, turns_code *, struct turns_role_of *, int); /* _PyEval_AddPendingCall */
    void *(*release)(void);                                                     /* PyEval_SaveThread */
    void (*restore)(void *state);                                               /* PyEval_RestoreThread */
    volatile long own;                                                          /* the id of this thread */
};

turns_code turns_enter;

#endif
