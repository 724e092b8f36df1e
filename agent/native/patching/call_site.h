/* Having a function that another library exports tell us that it was entered, while other threads may be in it. */
#ifndef KINETO_CALL_SITE_H
#define KINETO_CALL_SITE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One direct call (or tail jump) at the beginning of a function. */
struct call_site {
    uint8_t *displacement; /* its four bytes */
    uint8_t *next;         /* the instruction after it: what the displacement counts from */
    uint8_t *callee;       /* where it leads by itself */
    uint32_t depth;        /* bytes on the stack between where it leads to and the function's return address */
    uint8_t *stub;         /* where it leads once redirected; NULL: it cannot be */
};

/* What a stub calls: `stack` is the stack pointer at its beginning. */
typedef void (*call_site_reached)(void *user, const uint8_t *stack);

/* The first calls of the function on its paths, `most` of them at most. 0: there is none, or its instructions are not
 * known. A path on which it returns without a call is not told of. */
uint32_t call_sites_find(uint8_t *function, size_t bytes, struct call_site *sites, uint32_t most);
/* The pointer that the function's first call goes through, on the path on which no branch is taken; NULL: there is none, or
 * its instructions are not known. */
void **call_pointer_find(uint8_t *function, size_t bytes);
/* Makes stubs; each calls reached(users[i]) and goes on to the callee. A site for which there is no room within reach
 * has none afterwards. 0, or an errno: there are none at all. */
int call_sites_prepare(struct call_site *sites, void *const *users, uint32_t count, call_site_reached reached);
/* From now on it leads to its stub, which it must have, or by itself again. 0 or an errno. */
int call_site_redirect(const struct call_site *site, bool to_stub);

#endif
