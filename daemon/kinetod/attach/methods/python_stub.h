/* The argument of python_enter, including that of turns_enter; python_entry.py writes it and reads the progress. */
#ifndef KINETO_PYTHON_STUB_H
#define KINETO_PYTHON_STUB_H

#include "turns/gil_turns.h"

#define SAID_BYTES 240
#define OPENING_MARK 0x6e6570406f746e6bul
#define OPENING_MARK_2 0x67696c6f75742e67ul
#define TAKES_TUPLE 1 /* METH_VARARGS */
#define FORK_CALLS 2  /* fork and forkpty */

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

struct python_method { /* PyMethodDef */
    const char *name;
    void *(*code)(const unsigned long *self, void *arguments); /* opening_stub.c */
    int flags;
    const char *words;
};

struct python_argument {
    volatile unsigned int stage;
    volatile unsigned int cancelled; /* set by the daemon: a call that has not begun yet does nothing */
    volatile long error;             /* first the pid; then pthread_create's error; then the thread's id */
    void *code;                      /* python_enter itself */
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
    void *(*compile)(const char *source, const char *file, int start);            /* Py_CompileString */
    void *(*evaluate)(void *code, void *globals, void *locals);                   /* PyEval_EvalCode */
    void (*decref)(void *object);                                                 /* Py_DecRef */
    void (*fetch)(void **type, void **value, void **traceback);                   /* PyErr_Fetch */
    void (*normalize)(void **type, void **value, void **traceback);               /* PyErr_NormalizeException */
    void *(*repr)(void *object);                                                  /* PyObject_Repr */
    const char *(*utf8)(void *text);                                              /* PyUnicode_AsUTF8 */
    void (*clear)(void);                                                          /* PyErr_Clear */
    void *(*bytes)(const void *, long);                                           /* PyBytes_FromStringAndSize */
    void *(*function)(struct python_method *, void *self, void *);                /* PyCFunction_NewEx */
    void *(*open)(const char *path, int mode);                                    /* dlopen */
    void *(*symbol)(void *library, const char *name);                             /* dlsym */
    int (*parse)(void *arguments, const char *format, ...);                       /* PyArg_ParseTuple */
    void *(*definition)(void *module);                                            /* PyModule_GetDef */
    void *(*from_definition)(void *definition, void *spec, int);                  /* PyModule_FromDefAndSpec2 */
    int (*execute)(void *module, void *definition);                               /* PyModule_ExecDef */
    int (*keep)(void *module, void *name, void *file, void *modules); /* _PyImport_FixupExtensionObject, or NULL */
    int *loader_state;                                                /* r_state of _r_debug, or NULL */
    void **category;                                   /* PyExc_DeprecationWarning; NULL: forks do not warn because of
                                                        * us */
    void *none;                                        /* _Py_NoneStruct */
    void *(*build)(const char *format, ...);           /* Py_BuildValue */
    void *(*value)(void *dict, const char *key);       /* PyDict_GetItemString */
    void *(*contents)(void *module);                   /* PyModule_GetDict */
    void *(*item)(void *tuple, long index);            /* PyTuple_GetItem */
    int (*insert)(void *list, long index, void *item); /* PyList_Insert */
    long (*index)(void *list, void *item);             /* PySequence_Index */
    int (*remove)(void *list, long index);             /* PySequence_DelItem */
    void *hushed;                                      /* a tuple: the list of filters, and our filters in it */
    struct python_method method;
    struct python_turns turns;
    char builtins_name[16]; /* "__builtins__" */
    char modules_name[8];   /* "modules" */
    char native_name[8];    /* "native" */
    char format[16];        /* of its arguments */
    char file[16];          /* of the source: "<kineto-boot>" */
    char warnings_name[16]; /* "_warnings" */
    char filters_name[8];   /* "filters" */
    char ignore[8];         /* "ignore" */
    char hushed_format[24]; /* "(O(ssOOi)(ssOOi))" */
    char fork_warnings[FORK_CALLS][96];
    char source[]; /* later the exception's text, at most SAID_BYTES */
};

#endif
