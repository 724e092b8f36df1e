/* The path code: graphs drawn from the input.
 *
 * Every array is a heap block of exactly its size. The longest path of small graphs without circles is compared with
 * the best of all paths, found by trying them all; graphs with circles must be told.
 */
#include "codec/codec.h"
#include "input.h"

static int64_t best_from(const kc_graph *graph, int64_t node) {
    int64_t best = 0;
    for (uint64_t i = 0; i < graph->edges; i++) {
        if (graph->from[i] == node) {
            int64_t total = graph->weight[i] + best_from(graph, graph->to[i]);
            if (total > best) {
                best = total;
            }
        }
    }
    return best;
}

static void check_longest(int with_circles) {
    uint64_t nodes = 1 + next(9), edges = nodes > 1 ? next(18) : 0;
    int64_t *from = room(edges, 8), *to = room(edges, 8), *weight = room(edges, 8), *via = room(nodes, 8);
    for (uint64_t i = 0; i < edges; i++) {
        uint64_t a = next(nodes), b = (a + 1 + next(nodes - 1)) % nodes;
        from[i] = (int64_t)(with_circles || a < b ? a : b);
        to[i] = (int64_t)(with_circles || a < b ? b : a);
        weight[i] = (int64_t)next(5);
    }
    kc_graph graph = {nodes, edges, from, to, weight};
    int64_t last = -2;
    int status = kc_longest(&graph, via, &last);
    expect(status == KC_PATH_FOUND || (with_circles && status == KC_PATH_CYCLE), "the status is wrong");
    if (status == KC_PATH_FOUND) {
        int64_t total = 0, best = 0;
        for (int64_t node = last; via[node] >= 0; node = from[via[node]]) {
            expect(to[via[node]] == node, "the path has a hole");
            total += weight[via[node]];
        }
        for (uint64_t i = 0; i < nodes; i++) {
            int64_t found = best_from(&graph, (int64_t)i);
            best = found > best ? found : best;
        }
        expect(total == best, "there is a longer path");
    }
    free(from), free(to), free(weight), free(via);
}

static void check_trail(void) {
    uint64_t count = next(40);
    int64_t *before = room(count, 8);
    for (uint64_t i = 0; i < count; i++) {
        before[i] = (int64_t)next(count + 6) - 3; /* also circles, and nodes that do not exist */
    }
    int64_t node = (int64_t)next(count + 4) - 2;
    uint64_t length = kc_trail(before, count, node, NULL);
    int64_t *nodes = room(length, 8);
    expect(kc_trail(before, count, node, nodes) == length && length <= count, "the trail has two lengths");
    for (uint64_t i = 0; i < length; i++) {
        expect(nodes[i] == (i ? before[nodes[i - 1]] : node), "the trail has a hole");
    }
    free(nodes), free(before);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input_set(data, size);
    check_longest(0);
    check_longest(1);
    check_trail();
    return 0;
}
