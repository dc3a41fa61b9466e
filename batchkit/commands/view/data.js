import { byId } from "./elements.js";
import { listed, passes, sorted } from "./search.js";

// Where the page's data is from: the server, or the file that the page is, which holds the server's
// answers: {status, about, metrics, values, rows, pictures}, or {comparison}.
export const held = JSON.parse(byId("data").textContent);
export const runUrl = (run) => `/run/${encodeURIComponent(run)}`;
export const apiUrl = (run, rest = "") => `/api/runs/${encodeURIComponent(run)}${rest}`;

export async function fetchJson(url, options = {}) {
  if (held) return heldAnswer(new URL(url, "http://file"));
  const response = await fetch(url, options);
  const found = await response.json().catch(() => ({ error: `${url}: HTTP ${response.status}` }));
  if (!response.ok) throw new Error(found.error ?? `${url}: HTTP ${response.status}`);
  return found;
}

// What stands beside the answers of a run's rows: {asked, reference, image}, which the server reads from the input.
// ask() asks for the rows that lacking() gives, until it gives none; shown(rows) is called as they come.
export function besideAnswers(run, lacking, shown) {
  const MOST = 1000, known = new Map();
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
  return { ask, of: (row) => known.get(row) ?? {} };
}

function heldAnswer({ pathname, searchParams }) {
  const [part = "status", index] = pathname.split("/").slice(4);
  if (part !== "rows") return held[part];
  if (index !== undefined) return held.rows.find(({ record }) => record.index === Number(index));
  const asked = Object.fromEntries(searchParams), offset = Number(asked.offset);
  const found = sorted(held.rows.filter((row) => passes(row, asked)), asked);
  const rows = found.slice(offset, offset + Number(asked.limit)).map(listed);
  return { total: found.length, offset, rows, indexed: 1 };
}
