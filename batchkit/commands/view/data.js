// The source of the page's data: the server, or the page itself, if it is a file that holds the server's responses.
import { byId } from "./elements.js";
import { listed, passes, sorted } from "./search.js";
/** @import { Beside, Held } from "./types.js" */

/** @type {Held | null} */
export const held = JSON.parse(byId("data").textContent ?? "null");

/** @param {string} run */
export const runUrl = (run) => `/run/${encodeURIComponent(run)}`;
/** @param {string} run */
export const apiUrl = (run, rest = "") => `/api/runs/${encodeURIComponent(run)}${rest}`;

/**
 * The JSON at this address; its type is that of the response there. Throws an Error with the server's reason.
 * @param {string} url @param {RequestInit} [options]
 * @returns {Promise<any>}
 */
export async function fetchJson(url, options = {}) {
  if (held) return heldAnswer(held, new URL(url, "http://file"));
  const response = await fetch(url, options);
  const found = await response.json().catch(() => ({ error: `${url}: HTTP ${response.status}` }));
  if (!response.ok) throw new Error(found.error ?? `${url}: HTTP ${response.status}`);
  return found;
}

/** @param {unknown} error */
export const reasonOf = (error) => (error instanceof Error ? error.message : String(error));

/**
 * The question, reference and image of a run's rows, which the server reads from the input. ask() requests the rows that
 * lacking() returns, until it returns none, and calls shown() with each response's rows.
 * @param {string} run @param {() => number[]} lacking @param {(rows: number[]) => void} shown
 */
export function besideAnswers(run, lacking, shown) {
  const MOST = 1000, known = /** @type {Map<number, Beside>} */ (new Map());
  const unknown = () => lacking().filter((row) => !known.has(row));
  let isAsking = Boolean(held);

  async function ask() {
    if (isAsking) return;
    isAsking = true;
    for (let rows = unknown(); rows.length; rows = unknown()) {
      const found = await fetchJson(apiUrl(run, `/prompts?rows=${rows}`)).catch(() => ({}));
      const isNothing = !Object.keys(found).length; // these are not asked for again
      if (known.size > MOST) known.clear();
      for (const row of rows) if (isNothing || found[row]) known.set(row, found[row] ?? {});
      shown(rows.filter((row) => known.has(row)));
    }
    isAsking = false;
  }
  return { ask, of: (/** @type {number} */ row) => known.get(row) ?? {} };
}

/** @param {Held} held @param {URL} url */
function heldAnswer(held, { pathname, searchParams }) {
  const [part = "status", index] = pathname.split("/").slice(4);
  if (part !== "rows") return held[part];
  if (index !== undefined) return held.rows.find(({ record }) => record.index === Number(index));
  const asked = Object.fromEntries(searchParams), offset = Number(asked.offset);
  const found = sorted(held.rows.filter((row) => passes(row, asked)), asked);
  const rows = found.slice(offset, offset + Number(asked.limit)).map(listed);
  return { total: found.length, offset, rows, indexed: 1 };
}
