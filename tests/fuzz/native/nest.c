/* The tree code: events drawn from the input.
 *
 * Every array is a heap block of exactly its size. Times are small (so that events touch and coincide) or any
 * 64-bit number at all. What must hold of every order and tree is checked.
 */
#include "codec/codec.h"
#include "input.h"

typedef struct {
    uint32_t *track;
    int64_t *start, *end;
    uint8_t *rank;
} columns;

static columns random_columns(uint64_t count, int wild) {
    columns c = {room(count, 4), room(count, 8), room(count, 8), room(count, 1)};
    for (uint64_t i = 0; i < count; i++) {
        c.track[i] = (uint32_t)next(4);
        c.start[i] = wild ? (int64_t)next(0) : (int64_t)next(100);
        c.end[i] = wild ? (int64_t)next(0) : next(8) ? c.start[i] + (int64_t)next(40) : KC_NEVER;
        c.rank[i] = (uint8_t)next(3);
    }
    return c;
}

static void release(columns c) {
    free(c.track);
    free(c.start);
    free(c.end);
    free(c.rank);
}

static kc_events view(uint64_t count, columns c) { return (kc_events){count, c.track, c.start, c.end, c.rank}; }

static columns sorted(uint64_t count, columns given, int by_all) {
    kc_events events = view(count, given);
    if (!by_all) {
        events.end = NULL, events.rank = NULL;
    }
    uint32_t *order = room(count, 4), *scratch = room(count, 4);
    uint8_t *seen = calloc(count ? count : 1, 1);
    kc_order(&events, order, scratch);
    columns c = {room(count, 4), room(count, 8), room(count, 8), room(count, 1)};
    for (uint64_t i = 0; i < count; i++) {
        expect(order[i] < count && !seen[order[i]]++, "the order is no permutation");
        c.track[i] = given.track[order[i]];
        c.start[i] = given.start[order[i]];
        c.end[i] = given.end[order[i]];
        c.rank[i] = given.rank[order[i]];
        if (!i) {
            continue;
        }
        int same = c.track[i] == c.track[i - 1];
        expect(c.track[i] >= c.track[i - 1] && !(same && c.start[i] < c.start[i - 1]), "not sorted");
        same = same && c.start[i] == c.start[i - 1];
        expect(!(by_all && same && c.end[i] > c.end[i - 1]), "not the longest first");
        same = same && (!by_all || (c.end[i] == c.end[i - 1] && c.rank[i] == c.rank[i - 1]));
        expect(!(same && order[i] < order[i - 1]), "not stable");
    }
    free(order);
    free(scratch);
    free(seen);
    return c;
}

static void check_tree(uint64_t count, columns c, const kc_tree *tree, int wild) {
    for (uint64_t i = 0; i < count; i++) {
        int64_t above = tree->parent[i];
        expect(above >= -1 && above < (int64_t)i, "a parent comes after its child");
        expect(tree->stop[i] > (int64_t)i && (uint64_t)tree->stop[i] <= count, "a subtree without its root");
        expect(tree->depth[i] == (above < 0 ? 0 : tree->depth[above] + 1), "depth");
        expect(tree->end[i] >= c.start[i] && (wild || tree->self[i] >= 0), "an event that ends before it starts");
        if (above < 0) {
            continue;
        }
        expect(c.track[above] == c.track[i] && c.start[above] <= c.start[i], "a parent of other tracks or times");
        expect(tree->end[above] > c.start[i] && tree->end[above] >= tree->end[i], "a parent that ends first");
        expect(tree->stop[i] <= tree->stop[above], "a subtree leaves its parent's");
    }
}

/* Every event's parent is the last one before it that has a place itself and runs when the event begins. */
static void check_containment(uint64_t count, columns c, const int32_t *parent) {
    for (uint64_t i = 0; i < count; i++) {
        int64_t best = -1;
        for (uint64_t n = 0; n < i; n++) {
            if (parent[n] != KC_OVERLAPS && c.track[n] == c.track[i] && c.end[n] > c.start[i]) {
                best = (int64_t)n;
            }
        }
        int overlaps = best >= 0 && c.end[best] < c.end[i];
        expect(parent[i] == (overlaps ? KC_OVERLAPS : best), "not what encloses the event");
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input_set(data, size);
    int wild = !next(5);
    uint64_t count = next(next(4) ? 60 : 700), moments = next(300);
    columns given = random_columns(count, wild), asked = random_columns(moments, wild);
    columns c = sorted(count, given, 1), when = sorted(moments, asked, 0);
    kc_events events = view(count, c);
    kc_tree tree = {room(count, 4), room(count, 4), room(count, 4), room(count, 4), room(count, 8), room(count, 8)};
    kc_nest(&events, wild ? (int64_t)next(0) : 150, &tree);
    check_tree(count, c, &tree, wild);
    int32_t *inside = room(count, 4);
    kc_contain(&events, inside);
    check_containment(count, c, inside);
    free(inside);
    int32_t *found = room(moments, 4);
    events.end = tree.end;
    kc_events times = {moments, when.track, when.start, NULL, NULL};
    kc_enclosing(&events, tree.parent, &times, found);
    for (uint64_t i = 0; i < moments; i++) {
        int64_t best = -1;
        for (uint64_t n = 0; n < count; n++) {
            if (c.track[n] == when.track[i] && c.start[n] <= when.start[i] && tree.end[n] > when.start[i]) {
                best = (int64_t)n;
            }
        }
        expect(found[i] == best, "not the innermost event");
    }
    free(found);
    free(tree.parent);
    free(tree.depth);
    free(tree.children);
    free(tree.stop);
    free(tree.end);
    free(tree.self);
    release(given);
    release(asked);
    release(c);
    release(when);
    return 0;
}
