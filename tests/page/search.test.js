import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { listed, passes, sorted } from "../../batchkit/commands/view/search.js";

const shared = JSON.parse(readFileSync(new URL("searches.json", import.meta.url), "utf-8"));

// A row as a report holds it.
function held({ record, fields = {} }, index = 0) {
  const inWords = Object.entries(fields).map(([name, value]) => [
    name, typeof value === "string" ? value : JSON.stringify(value, null, 2),
  ]);
  return {
    record: { index, id: `r${index}`, status: "ok", attempt: 1, ...record }, kind: record.error?.kind ?? null, group: null,
    asked: null, answers: null, fields: Object.fromEntries(inWords), kept: Object.keys(fields).filter((name) => name !== "note"),
    prompt: { images: [] }, steps: [],
  };
}

const indexes = (rows) => rows.map(({ record }) => record.index);
const found = (rows, query) => indexes(rows.filter((row) => passes(row, query)));

test("a search finds the rows that the server finds", () => {
  const rows = shared.rows.map(held);
  for (const [text, wanted] of shared.searches) assert.deepEqual(found(rows, { text }), wanted, text);
});

const ROWS = [
  { record: { text: "four", scores: { f1: 1 }, latency_s: 2, usage: { completion_tokens: 9 } } },
  { record: { text: "three", scores: { f1: 0.5, em: null }, latency_s: 4, finish_reason: "length" } },
  { record: { text: null, status: "failed", error: { kind: "oom", message: "much too long a text" }, latency_s: 1 } },
  { record: { text: "no", scores: { f1: null }, latency_s: 2 } },
].map(held);
ROWS[1].group = "a";

test("filters", () => {
  for (const [query, wanted] of [
    [{}, [0, 1, 2, 3]], [{ status: "ok" }, [0, 1, 3]], [{ status: "failed" }, [2]], [{ status: "unscored" }, [3]],
    [{ status: "cut" }, [1]], [{ kind: "oom" }, [2]], [{ kind: "media" }, []], [{ group: "a" }, [1]],
    [{ scorer: "f1", min: "0.5" }, [0, 1]], [{ scorer: "f1", max: "0.5" }, [1]], [{ scorer: "em", max: "1" }, []],
    [{ scorer: "f1", min: "0.5", max: "0.5", status: "ok" }, [1]],
  ]) assert.deepEqual(found(ROWS, query), wanted, JSON.stringify(query));
});

test("orders keep equal rows in the order of the input, and rows without a score last", () => {
  for (const [query, wanted] of [
    [{}, [0, 1, 2, 3]], [{ sort: "index", order: "desc" }, [3, 2, 1, 0]],
    [{ sort: "latency", order: "desc" }, [1, 0, 3, 2]], [{ sort: "tokens", order: "desc" }, [0, 1, 2, 3]],
    [{ sort: "length", order: "desc" }, [1, 0, 3, 2]], [{ sort: "length", order: "asc" }, [2, 3, 0, 1]],
    [{ sort: "score", order: "asc", scorer: "f1" }, [1, 0, 2, 3]],
    [{ sort: "score", order: "desc", scorer: "f1" }, [0, 1, 2, 3]],
  ]) assert.deepEqual(indexes(sorted(ROWS, query)), wanted, JSON.stringify(query));
});

test("a listed row has its answer, or its error", () => {
  assert.equal(listed(ROWS[0]).text, "four");
  assert.equal(listed(ROWS[2]).text, "much too long a text");
});
