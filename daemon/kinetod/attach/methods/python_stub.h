/* The argument of python_enter, with that of turns_enter in it; python_entry.py writes it, and reads what became of
 * it.
 */
#ifndef KINETO_PYTHON_STUB_H
#define KINETO_PYTHON_STUB_H

#include "turns/gil_turns.h"

#define SAID_BYTES 240
#define OPENING_MARK 0x6e6570406f746e6bul
#define OPENING_MARK_2 0x67696c6f75742e67ul
#define TAKES_TUPLE 1 /* METH_VARARGS */

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
    void *code; /* of opening_stub.c */
    int flags;
    const char *words;
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
    void (*normalize)(void **type, void **value, void **traceback);   /* PyErr_NormalizeException */
    void *(*repr)(void *object);                                      /* PyObject_Repr */
    const char *(*utf8)(void *text);                                  /* PyUnicode_AsUTF8 */
    void (*clear)(void);                                              /* PyErr_Clear */
    void *(*bytes)(const void *, long);                               /* PyBytes_FromStringAndSize */
    void *(*function)(struct python_method *, void *self, void *);    /* PyCFunction_NewEx */
    void *(*open)(const char *path, int mode);                        /* dlopen */
    void *(*symbol)(void *library, const char *name);                 /* dlsym */
    int (*parse)(void *arguments, const char *format, ...);           /* PyArg_ParseTuple */
    void *(*definition)(void *module);                                /* PyModule_GetDef */
    void *(*from_definition)(void *definition, void *spec, int);      /* PyModule_FromDefAndSpec2 */
    int (*execute)(void *module, void *definition);                   /* PyModule_ExecDef */
    int (*keep)(void *module, void *name, void *file, void *modules); /* _PyImport_FixupExtensionObject, or NULL */
    int *loader_state;                                                /* r_state of _r_debug, or NULL */
    struct python_method method;
    struct python_turns turns;
    char builtins_name[16]; /* "__builtins__" */
    char modules_name[8];   /* "modules" */
    char native_name[8];    /* "native" */
    char format[16];        /* of its arguments */
    char source[];          /* then what the exception said, at most SAID_BYTES */
};

#endif
