import assert from "node:assert/strict";
import { test } from "node:test";

import { axisOf, boundaries, nearest, nice, parts, placeOf } from "../../batchkit/commands/view/axis.js";

const near = (found, wanted) => assert.ok(Math.abs(found - wanted) < 1e-9, `${found} is not ${wanted}`);

test("the loading of a model takes little of the axis", () => {
  const axis = axisOf({ seconds: [20, 21], start: [1, 1] });
  assert.deepEqual(axis.loads, [[0, 20]]);
  near(axis.share(20), 0.06 / 1.06);
  near(axis.share(21), 1);
  near(axis.second(1), 21);
  near(axis.worked(20.5), 0.5);
});

test("each start has a load, and a share leads back to its second", () => {
  const axis = axisOf({ seconds: [10, 3600, 3700, 7300], start: [1, 1, 2, 2] });
  assert.deepEqual(axis.loads, [[0, 10], [3600, 3700]]);
  for (const second of [0, 5, 10, 1800, 3600, 3650, 3700, 7300]) near(axis.second(axis.share(second)), second);
  assert.equal(axis.worked(7300), 7190);
});

test("an event is placed by its distance from the nearest point of its start", () => {
  const at = ["2026-11-28T10:00:00Z", "2026-11-28T10:00:10Z", "2026-11-28T12:00:00Z"];
  const metrics = { at, seconds: [5, 15, 20], start: [1, 1, 2] };
  for (const [moment, start, second] of [
    ["2026-11-28T10:00:04Z", 1, 9], ["2026-11-28T09:00:00Z", 1, 0], ["2026-11-28T12:00:03Z", 2, 20],
    ["2026-11-28T11:00:00Z", 2, 15], ["2026-11-28T10:00:04Z", 3, null], [null, 1, null], ["soon", 1, null],
  ]) assert.equal(placeOf(moment, start, metrics), second);
});

test("the top of a chart divides into four readable parts", () => {
  for (const [value, top] of [[0, 1], [NaN, 1], [0.07, 0.08], [1, 1], [11, 12], [99, 100], [1234, 1600]]) {
    assert.equal(nice(value), top);
  }
});

test("the nearest point", () => {
  for (const [value, place] of [[-5, 0], [1.4, 0], [1.6, 1], [4, 1], [9, 3]]) {
    assert.equal(nearest([1, 2, 7, 8], value), place);
  }
});

test("a line breaks at a missing value and at a new start", () => {
  const start = [1, 1, 1, 2, 2];
  assert.deepEqual(parts([1, null, 2, 3, 4], start), [[0], [2], [3, 4]]);
  assert.deepEqual(boundaries({ start }), [3]);
});
