/* A thread that gets turns with the GIL (gil_turns.c), for an agent that started by itself. An agent of a live attach
 * has the one that the daemon has injected. */
#ifndef KINETO_BEGIN_TURNS_H
#define KINETO_BEGIN_TURNS_H

#include <poll.h>

#include "common/export.h"

#define KC_TURNS_ABI 2 /* changes with the signature, and with the agent's fields of struct python_turns */

KC_EXPORT uint32_t kc_turns_abi(void);
/* Starts it for the agent's thread, which is started next and then stores its id in the struct. The caller has the GIL.
 * Returns the address of the struct python_turns, or a negative kc_error; KC_ORDER: the previous agent's thread has not
 * ended yet. */
KC_EXPORT intptr_t kc_turns_begin(void);
/* poll(2), without the GIL, of an agent that is at rest: it is at work again before it waits for the GIL. */
KC_EXPORT int kc_turns_poll(struct pollfd *descriptors, uint32_t count, int timeout_ms);

#endif
