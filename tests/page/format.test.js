import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import * as format from "../../batchkit/commands/view/format.js";

const shared = JSON.parse(readFileSync(new URL("formats.json", import.meta.url), "utf-8"));

// Formats that only the page has.
const CASES = {
  clock: [
    [0, "0"], [-1e-16, "0"], [0.004, "0"], [0.04, "0.04 s"], [0.996, "1 s"], [1.3, "1.3 s"], [9.94, "9.9 s"],
    [9.96, "0:10"], [59.4, "0:59"], [59.96, "1:00"], [60, "1:00"], [61.5, "1:02"], [75, "1:15"], [3599.4, "59:59"],
    [3599.9, "1:00:00"], [3600, "1:00:00"], [3725, "1:02:05"], [86400, "24:00:00"], [360000, "100:00:00"],
  ],
  timecode: [
    [0, "0:00.0"], [0.04, "0:00.0"], [1.3, "0:01.3"], [59.94, "0:59.9"], [59.96, "1:00.0"], [60, "1:00.0"],
    [61.5, "1:01.5"], [75.25, "1:15.3"], [3599.96, "1:00:00.0"], [3600, "1:00:00.0"], [3725.1, "1:02:05.1"],
    [86400, "24:00:00.0"],
  ],
  inSteps: [
    [[0, 5], "0"], [[150, 50, "s"], "150 s"], [[100.5, 0.5], "100.5"], [[30.002, 0.002], "30.002"],
    [[0.1 + 0.2, 0.1], "0.3"], [[2e-9, 1e-9], "0.000000002"], [[1500, 500], "1,500"],
  ],
  oneLine: [[null, ""], [" a\n\n b ", "a b"], ["x".repeat(400), "x".repeat(300)]],
  signed: [[0, "+0.00"], [1.005, "+1.00"], [-2.5, "−2.50"]],
  shownScore: [
    [[0.28, { scale: 100 }], "28"], [[1 / 3, { scale: 100 }], "33.33"], [[7.5, { scale: 1 }], "7.5"], [[null], "–"],
  ],
  timeOf: [["2026-11-21T23:59:59.9Z", "23:59:59"], ["2026-11-22T00:00:01Z", "00:00:01"]],
};

for (const [name, cases] of Object.entries({ ...shared, ...CASES })) {
  test(name, () => {
    for (const [given, text] of cases) {
      const found = format[name](...(Array.isArray(given) ? given : [given]));
      assert.equal(found, text, `${name}(${JSON.stringify(given)})`);
    }
  });
}

test("a unit and seconds", () => {
  assert.equal(format.short(0.04, "s"), "0.04 s");
  assert.equal(format.when("2026-11-21T01:02:03Z", { seconds: true }), "21 November 2026, 01:02:03 UTC");
});

test("a budget", () => {
  for (const [budget, texts] of [
    [{ name: "max_seconds", spent: 0, limit: 36000 }, ["time", "0 s", "10 h 0 min"]],
    [{ name: "max_seconds", spent: null, limit: 60 }, ["time", "?", "60 s"]],
    [{ name: "max_completion_tokens", spent: 12345, limit: 1e6 }, ["tokens", "12,345", "1.00 M"]],
    [{ name: "max_price", spent: 0, limit: 2.5 }, ["price", "0", "2.5"]],
  ]) assert.deepEqual(format.budgetOf(budget), texts);
});
