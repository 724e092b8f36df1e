/* Paths through graphs of dependencies. See codec.h.
 *
 * Theory of operation
 *     kc_trail follows, from a node backwards, the one node that each depends on.
 *
 *     kc_longest finds the path of the largest weight in an acyclic graph by one sweep in topological order (Kahn's
 *     algorithm with a queue). Of equal weights the edge that stands first among those into a node counts, and of
 *     ends with equal weight the one that comes first in the order of the sweep: so the answer depends on nothing
 *     but the order of the edges.
 *
 * Threads: the caller's, without the GIL; it works on the caller's arrays alone.
 * Blocks: never; it allocates.
 */
#include <stdlib.h>

#include "codec/codec.h"

uint64_t kc_trail(const int64_t *before, uint64_t count, int64_t node, int64_t *nodes) {
    uint64_t length = 0;
    for (; node >= 0 && (uint64_t)node < count && length < count; node = before[node]) {
        if (nodes) {
            nodes[length] = node;
        }
        length++;
    }
    return length;
}

static void adjacency(const int64_t *key, uint64_t edges, uint64_t nodes, uint64_t *first, uint64_t *list) {
    for (uint64_t i = 0; i <= nodes; i++) {
        first[i] = 0;
    }
    for (uint64_t i = 0; i < edges; i++) {
        first[key[i] + 1]++;
    }
    for (uint64_t i = 0; i < nodes; i++) {
        first[i + 1] += first[i];
    }
    for (uint64_t i = edges; i-- > 0;) { /* from the last on, so that each list is in the order of the edges */
        list[--first[key[i] + 1]] = i;
    }
    /* first[n + 1] is now where the list of n begins: shift */
    for (uint64_t i = 0; i < nodes; i++) {
        first[i] = first[i + 1];
    }
    first[nodes] = edges;
}

static uint64_t order_topologically(const kc_graph *graph, const uint64_t *first, const uint64_t *list, uint64_t *waits,
                                    uint64_t *order) {
    uint64_t head = 0, tail = 0;
    for (uint64_t i = 0; i < graph->nodes; i++) {
        waits[i] = 0;
    }
    for (uint64_t i = 0; i < graph->edges; i++) {
        waits[graph->to[i]]++;
    }
    for (uint64_t i = 0; i < graph->nodes; i++) {
        if (!waits[i]) {
            order[tail++] = i;
        }
    }
    while (head < tail) {
        uint64_t node = order[head++];
        for (uint64_t at = first[node]; at < first[node + 1]; at++) {
            uint64_t next = (uint64_t)graph->to[list[at]];
            if (!--waits[next]) {
                order[tail++] = next;
            }
        }
    }
    return tail;
}

static void sweep(const kc_graph *graph, const uint64_t *first, const uint64_t *list, const uint64_t *order,
                  int64_t *weight, int64_t *via, int64_t *last) {
    int64_t best = -1;
    *last = -1;
    for (uint64_t i = 0; i < graph->nodes; i++) {
        uint64_t node = order[i];
        weight[node] = 0;
        via[node] = -1;
        int64_t largest = -1;
        for (uint64_t at = first[node]; at < first[node + 1]; at++) {
            uint64_t edge = list[at];
            int64_t total = weight[graph->from[edge]] + graph->weight[edge];
            if (via[node] < 0 || total > largest) {
                largest = total;
                via[node] = (int64_t)edge;
            }
        }
        if (via[node] >= 0 && largest >= 0) {
            weight[node] = largest;
        } else {
            via[node] = -1;
        }
        if (weight[node] > best) {
            best = weight[node];
            *last = (int64_t)node;
        }
    }
}

int kc_longest(const kc_graph *graph, int64_t *via, int64_t *last) {
    uint64_t nodes = graph->nodes, edges = graph->edges;
    uint64_t *memory = malloc((3 * nodes + edges + 3) * sizeof *memory);
    int64_t *weight = malloc((nodes + 1) * sizeof *weight);
    int status = KC_PATH_NO_MEMORY;
    if (memory && weight) {
        uint64_t *first = memory, *waits = first + nodes + 1, *order = waits + nodes + 1, *list = order + nodes + 1;
        adjacency(graph->from, edges, nodes, first, list);
        status = order_topologically(graph, first, list, waits, order) < nodes ? KC_PATH_CYCLE : KC_PATH_FOUND;
        if (status == KC_PATH_FOUND) {
            adjacency(graph->to, edges, nodes, first, list);
            sweep(graph, first, list, order, weight, via, last);
        }
    }
    free(memory);
    free(weight);
    return status;
}
