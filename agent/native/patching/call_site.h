/* Getting notified of calls of a function that another library exports, while other threads may be inside it. */
#ifndef KINETO_CALL_SITE_H
#define KINETO_CALL_SITE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One direct call (or tail jump) at the beginning of a function. */
struct call_site {
    uint8_t *displacement; /* its four bytes */
    uint8_t *next;         /* the instruction after it, to which the displacement is relative */
    uint8_t *callee;       /* its original target */
    uint32_t depth;        /* bytes on the stack between its target and the function's return address */
    uint8_t *stub;         /* its target once redirected; NULL: cannot be redirected */
};

/* Called by a stub: `stack` is the stack pointer at its beginning. */
typedef void (*call_site_reached)(void *user, const uint8_t *stack);

/* Finds the first calls of the function on its paths, `most` at most. 0: there is none, or an instruction is unknown.
 * Paths that return without a call are ignored. */
uint32_t call_sites_find(uint8_t *function, size_t bytes, struct call_site *sites, uint32_t most);
/* Finds the pointer through which the function's first call goes on the path without taken branches; NULL: there is
 * none, or an instruction is unknown. */
void **call_pointer_find(uint8_t *function, size_t bytes);
/* Makes stubs; each calls reached(users[i]) and goes on to the callee. A site without room within reach gets none.
 * Returns 0, or an errno if there are none at all. */
int call_sites_prepare(struct call_site *sites, void *const *users, uint32_t count, call_site_reached reached);
/* Redirects it to its stub, which must exist, or back to its original target. Returns 0 or an errno. */
int call_site_redirect(const struct call_site *site, bool to_stub);

#endif
