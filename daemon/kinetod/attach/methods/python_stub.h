/* The argument of python_enter and of turns_enter; python_entry.py writes it, and reads what became of it. */
#ifndef KINETO_PYTHON_STUB_H
#define KINETO_PYTHON_STUB_H

#define SAID_BYTES 240
#define ATTRIBUTES_BYTES 64 /* of a pthread_attr_t, the largest */

enum python_stage {
    STAGE_PENDING = 1, /* the main thread has not called it yet */
    STAGE_THREAD = 2,  /* the new thread has not begun */
    STAGE_WAITS = 3,   /* it waits for the GIL */
    STAGE_RUNS = 4,    /* it runs the source */
    STAGE_ENDED = 5,
    STAGE_NO_THREAD = 6, /* error: why pthread_create failed */
    STAGE_NO_STATE = 7,  /* the interpreter has no memory for a thread, or has ended */
    STAGE_RAISED = 8,    /* said: the exception */
};

enum turns_role { ROLE_BEGIN = 1, ROLE_END = 2, ROLE_THREAD = 3, ROLE_CALL = 4 };

struct python_argument;

/* How turns_enter is called: twice by python_enter, as the start routine of the thread, and by the interpreter. */
struct turns_role_of {
    unsigned long role;
    struct python_argument *given;
};

/* Turns with the GIL; turns_stub.c says what for. The agent has its address and writes what is marked. */
struct python_turns {
    volatile int rest;              /* the agent's: 0: it works; else it waits for something else, -1: for ever, or at
                                     * most so many ms, times two; the lowest bit tells one rest from the next */
    volatile unsigned int over;     /* the agent's, too: nothing is queued any more */
    volatile unsigned int queueing; /* just now */
    volatile unsigned int handed;   /* how often the GIL was given away for it */
    volatile unsigned int queued;   /* a call that has not come yet */
    unsigned int thread, process;   /* the agent's */
    unsigned int unused;
    volatile unsigned long cpu_ns; /* the agent's, when it was last looked at */
    struct turns_role_of as_agent, as_thread, as_call;
    void *(*code)(struct turns_role_of *);                            /* turns_enter, or NULL: does without */
    int (*attributes)(void *attributes);                              /* pthread_attr_init */
    int (*stack)(void *attributes, unsigned long bytes);              /* pthread_attr_setstacksize */
    int (*initialised)(void);                                         /* Py_IsInitialized */
    int (*queue)(void *interpreter, void *code, void *argument, int); /* _PyEval_AddPendingCall */
    void *(*release)(void);                                           /* PyEval_SaveThread */
    void (*restore)(void *state);                                     /* PyEval_RestoreThread */
};

struct python_argument {
    volatile unsigned int stage;
    volatile unsigned int cancelled; /* by the daemon: whoever has not begun yet does nothing */
    volatile long error;
    void *code;                                                                   /* python_enter itself */
    int (*create)(unsigned long *, void *attributes, void *code, void *argument); /* pthread_create */
    unsigned long (*self)(void);                                                  /* pthread_self */
    int (*detach)(unsigned long);                                                 /* pthread_detach */
    void *(*interpreter)(void);                                                   /* PyInterpreterState_Main */
    void *(*new_state)(void *interpreter);                                        /* PyThreadState_New */
    void (*acquire)(void *state);                                                 /* PyEval_AcquireThread */
    void (*enter_tracing)(void *state);                                           /* or NULL, before 3.11 */
    void (*clear_state)(void *state);                                             /* PyThreadState_Clear */
    void (*delete_state)(void);                                                   /* PyThreadState_DeleteCurrent */
    void *(*new_dict)(void);                                                      /* PyDict_New */
    void *(*builtins)(void);                                                      /* PyEval_GetBuiltins */
    int (*set_item)(void *dict, const char *key, void *value);                    /* PyDict_SetItemString */
    void *(*system)(const char *name);                                            /* PySys_GetObject */
    void *(*run)(const char *source, int start, void *globals, void *locals, void *flags); /* PyRun_StringFlags */
    void (*decref)(void *object);                                                          /* Py_DecRef */
    void (*fetch)(void **type, void **value, void **traceback);                            /* PyErr_Fetch */
    void (*normalize)(void **type, void **value, void **traceback); /* PyErr_NormalizeException */
    void *(*repr)(void *object);                                    /* PyObject_Repr */
    const char *(*utf8)(void *text);                                /* PyUnicode_AsUTF8 */
    void (*clear)(void);                                            /* PyErr_Clear */
    struct python_turns turns;
    char builtins_name[16]; /* "__builtins__" */
    char modules_name[8];   /* "modules" */
    char said[SAID_BYTES];
    char source[];
};

#endif
