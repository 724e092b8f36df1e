/* A thread that Python did not make and that calls into it several times, as threads of C++ libraries do. */
#include <pthread.h>

struct order {
    void (*call)(int);
    int times;
};

static void *run(void *given) {
    const struct order *order = given;
    for (int i = 0; i < order->times; i++) {
        order->call(i);
    }
    return 0;
}

/* Calls call(0), call(1) and so on from one thread, and returns when it has ended. */
int call_from_one_thread(void (*call)(int), int times) {
    struct order order = {call, times};
    pthread_t thread;
    const int error = pthread_create(&thread, 0, run, &order);
    return error != 0 ? error : pthread_join(thread, 0);
}
