/* Events of threads: their order, the tree that their intervals make, and who encloses a moment. See codec.h.
 *
 * Theory of operation
 *     In sorted order (track, start, longest first) every event comes right after its parent or after the
 *     subtree of an earlier sibling: the order is the tree in preorder. The stack of running events is then the
 *     chain of parents from the last event upwards, so that no memory of its own is needed, however deep it gets.
 *
 *     Intervals are half-open: an event that starts when another ends is not inside it. An event ends when its
 *     parent ends, at the latest; so ends never grow from a parent to its children, and taking ended events off
 *     the top of the chain is enough.
 *
 * Threads: the caller's, without the GIL; it works on the caller's arrays alone.
 * Blocks: never.
 */
#include <string.h>

#include "codec/codec.h"

#define BLOCK 16u /* events that insertion sort orders before merging begins */

static int before(const kc_events *e, uint32_t a, uint32_t b) {
    if (e->track[a] != e->track[b]) {
        return e->track[a] < e->track[b];
    }
    if (e->start[a] != e->start[b]) {
        return e->start[a] < e->start[b];
    }
    if (e->end && e->end[a] != e->end[b]) {
        return e->end[a] > e->end[b];
    }
    if (e->rank && e->rank[a] != e->rank[b]) {
        return e->rank[a] < e->rank[b];
    }
    return 0;
}

static void insertion_sort(const kc_events *e, uint32_t *order, uint64_t count) {
    for (uint64_t i = 1; i < count; i++) {
        uint32_t moving = order[i];
        uint64_t at = i;
        for (; at && before(e, moving, order[at - 1]); at--) {
            order[at] = order[at - 1];
        }
        order[at] = moving;
    }
}

/* Merges two sorted neighbours. What is in place already at both ends stays untouched. */
static void merge(const kc_events *e, uint32_t *order, uint64_t middle, uint64_t count, uint32_t *scratch) {
    uint64_t low = 0, high = middle;
    if (!before(e, order[middle], order[middle - 1])) {
        return;
    }
    while (low < high) { /* skip what is not after the right half's first */
        uint64_t half = (low + high) / 2;
        if (before(e, order[middle], order[half])) {
            high = half;
        } else {
            low = half + 1;
        }
    }
    uint64_t first = low, left = 0, held = middle - first, right = middle, out = first;
    memcpy(scratch, order + first, held * sizeof *order);
    while (left < held && right < count) {
        order[out++] = before(e, order[right], scratch[left]) ? order[right++] : scratch[left++];
    }
    memcpy(order + out, scratch + left, (held - left) * sizeof *order);
}

void kc_order(const kc_events *events, uint32_t *order, uint32_t *scratch) {
    uint64_t count = events->count;
    for (uint64_t i = 0; i < count; i++) {
        order[i] = (uint32_t)i;
    }
    for (uint64_t at = 0; at < count; at += BLOCK) {
        insertion_sort(events, order + at, count - at < BLOCK ? count - at : BLOCK);
    }
    for (uint64_t width = BLOCK; width < count; width *= 2) {
        for (uint64_t at = 0; at + width < count; at += 2 * width) {
            merge(events, order + at, width, count - at < 2 * width ? count - at : 2 * width, scratch);
        }
    }
}

/* Unsigned, so that absurd times wrap and nothing worse. */
static int64_t difference(int64_t a, int64_t b) { return (int64_t)((uint64_t)a - (uint64_t)b); }

static int64_t close_down_to(const kc_tree *tree, int64_t top, int64_t keep, uint64_t next) {
    for (; top != keep; top = tree->parent[top]) {
        tree->stop[top] = (int32_t)next;
    }
    return top;
}

void kc_nest(const kc_events *events, int64_t window_end, const kc_tree *tree) {
    int64_t top = -1;
    for (uint64_t i = 0; i < events->count; i++) {
        int64_t start = events->start[i], end = events->end[i], keep = top;
        if (i && events->track[i] != events->track[i - 1]) {
            keep = -1;
        }
        while (keep >= 0 && tree->end[keep] <= start) {
            keep = tree->parent[keep];
        }
        top = close_down_to(tree, top, keep, i);
        int64_t limit = top >= 0 ? tree->end[top] : end == KC_NEVER ? window_end : end;
        if (end > limit) {
            end = limit;
        }
        if (end < start) {
            end = start;
        }
        tree->parent[i] = (int32_t)top;
        tree->depth[i] = top >= 0 ? tree->depth[top] + 1 : 0;
        tree->children[i] = 0;
        tree->end[i] = end;
        tree->self[i] = difference(end, start);
        if (top >= 0) {
            tree->children[top]++;
            tree->self[top] = difference(tree->self[top], tree->self[i]);
        }
        top = (int64_t)i;
    }
    close_down_to(tree, top, -1, events->count);
}

void kc_contain(const kc_events *events, int32_t *parent) {
    int64_t top = -1;
    for (uint64_t i = 0; i < events->count; i++) {
        if (i && events->track[i] != events->track[i - 1]) {
            top = -1;
        }
        while (top >= 0 && events->end[top] <= events->start[i]) {
            top = parent[top];
        }
        parent[i] = top >= 0 && events->end[i] > events->end[top] ? KC_OVERLAPS : (int32_t)top;
        if (parent[i] != KC_OVERLAPS) {
            top = (int64_t)i;
        }
    }
}

void kc_enclosing(const kc_events *events, const int32_t *parent, const kc_events *moments, int32_t *found) {
    uint64_t next = 0;
    int64_t top = -1;
    for (uint64_t i = 0; i < moments->count; i++) {
        uint32_t track = moments->track[i];
        int64_t time = moments->start[i];
        while (next < events->count &&
               (events->track[next] < track || (events->track[next] == track && events->start[next] <= time))) {
            top = (int64_t)next++;
        }
        if (top >= 0 && events->track[top] != track) {
            top = -1;
        }
        while (top >= 0 && events->end[top] <= time) {
            top = parent[top];
        }
        found[i] = (int32_t)top;
    }
}
