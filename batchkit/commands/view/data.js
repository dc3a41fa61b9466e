// Where the page's data is from: the server, or the file that the page is, which holds the server's
// answers: {status, about, metrics, values, rows, pictures}, or {comparison}.
const held = JSON.parse(byId("data").textContent);
const runUrl = (run) => `/run/${encodeURIComponent(run)}`;
const apiUrl = (run, rest = "") => `/api/runs/${encodeURIComponent(run)}${rest}`;

async function fetchJson(url, options = {}) {
  if (held) return heldAnswer(new URL(url, "http://file"));
  const response = await fetch(url, options);
  const found = await response.json().catch(() => ({ error: `${url}: HTTP ${response.status}` }));
  if (!response.ok) throw new Error(found.error ?? `${url}: HTTP ${response.status}`);
  return found;
}

// What stands beside the answers of a run's rows: {asked, reference, image}, which the server reads from the input.
// ask() asks for the rows that lacking() gives, until it gives none; shown(rows) is called as they come.
function besideAnswers(run, lacking, shown) {
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

// A row as the server lists it, and its first image.
function listed(row) {
  const { record, kind, group, asked } = row;
  return { ...record, kind, group, asked, text: answerIn(row), image: row.prompt.images[0] };
}

const answerIn = ({ record, answers }) => answers?.[0] || record.text || record.error?.message || "";
const isHeldScored = ({ scores }) => Object.values(scores ?? {}).some((score) => typeof score === "number");

function passes(row, { status, kind, group, scorer, min, max, text }) {
  const { record } = row, isOk = record.status === "ok", score = record.scores?.[scorer];
  const outcomes = {
    ok: isOk, failed: !isOk, unscored: isOk && !isHeldScored(record), cut: record.finish_reason === "length",
  };
  const isIn = typeof score === "number"
    && score >= Number(min ?? -Infinity) - 1e-9 && score <= Number(max ?? Infinity) + 1e-9;
  return (!status || outcomes[status]) && (!kind || row.kind === kind) && (!group || row.group === group)
    && ((min ?? max) === undefined || isIn) && (!text || wordsOf(row).includes(text.toLowerCase()));
}

function wordsOf(row) {
  const { record, reference, fields, steps } = row;
  row.words ??= [
    record.id, row.group, row.kind, record.error?.message, reference, record.prediction, answerIn(row),
    ...[record, ...steps].map(({ reasoning }) => reasoning), ...steps.map(({ text }) => text),
    ...(row.answers ?? []), ...Object.values(fields),
  ].filter(Boolean).join("\n").toLowerCase();
  return row.words;
}

// Rows that are equal stay in the order of the input; those without a score are last.
function sorted(rows, { sort = "index", order, scorer }) {
  const keys = {
    index: ({ record }) => record.index, score: ({ record }) => record.scores?.[scorer],
    latency: ({ record }) => record.latency_s ?? 0, tokens: ({ record }) => record.usage?.completion_tokens ?? 0,
    length: (row) => (row.record.status === "ok" ? answerIn(row).length : 0),
  };
  const sign = order === "desc" ? -1 : 1;
  return rows.map((row) => [keys[sort](row) ?? null, row])
    .sort(([a], [b]) => (a === null) - (b === null) || sign * (a - b)).map(([, row]) => row);
}
