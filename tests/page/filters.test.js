import assert from "node:assert/strict";
import { test } from "node:test";

import { queryOf } from "../../batchkit/commands/view/filters.js";

const SCORERS = new Map([
  ["f1", { name: "f1", head: "F1", scale: 100 }], ["reward", { name: "reward", head: "Reward", scale: 1 }],
]);

test("the controls make a query", () => {
  for (const [values, query] of [
    [{}, {}],
    [{ search: "  two words " }, { text: "two words" }],
    [{ search: "   " }, {}],
    [{ group: "a", outcome: "cut" }, { group: "a", status: "cut" }],
    [{ outcome: "kind:timeout" }, { kind: "timeout" }],
    [{ order: "latency:desc" }, { sort: "latency", order: "desc" }],
    [{ order: "score:asc" }, { sort: "score", order: "asc", scorer: "f1" }], // the first one
    [{ order: "score:asc", scorer: "reward" }, { sort: "score", order: "asc", scorer: "reward" }],
    [{ scorer: "f1", low: "0", high: "50" }, { scorer: "f1", min: "0", max: "0.5" }],
    [{ scorer: "reward", low: "5" }, { scorer: "reward", min: "5" }],
    [{ low: "5" }, {}], // a bound needs a scorer
  ]) assert.deepEqual(queryOf(values, SCORERS), query);
});
