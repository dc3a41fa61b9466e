// The rows of a file: filters, search and order, as the server has them in rows.py.
/** @import { Row, RowLine, RowRecord } from "./types.js" */

/**
 * The parameters of /api/runs/{run}/rows.
 * @typedef {Partial<Record<
 *   "status" | "kind" | "group" | "scorer" | "min" | "max" | "text" | "sort" | "order", string>>} Query
 */

/** @param {Row} row @param {Query} query */
export function passes(row, { status, kind, group, scorer, min, max, text }) {
  const { record } = row, isOk = record.status === "ok", score = record.scores?.[scorer ?? ""];
  /** @type {Record<string, boolean>} */
  const outcomes = {
    ok: isOk, failed: !isOk, unscored: isOk && !isHeldScored(record), cut: record.finish_reason === "length",
  };
  const isIn = typeof score === "number"
    && score >= Number(min ?? -Infinity) - 1e-9 && score <= Number(max ?? Infinity) + 1e-9;
  return (!status || outcomes[status]) && (!kind || row.kind === kind) && (!group || row.group === group)
    && ((min ?? max) === undefined || isIn) && (!text || wordsOf(row).includes(text.toLowerCase()));
}

/** @param {Row} row */
function wordsOf(row) {
  const { record, reference, fields, steps } = row;
  row.words ??= [
    record.id, row.group, row.kind, record.error?.message, reference, record.prediction, answerIn(row),
    ...[record, ...steps].map(({ reasoning }) => reasoning), ...steps.map(({ text }) => text),
    ...(row.answers ?? []), ...Object.values(fields),
  ].filter(Boolean).join("\n").toLowerCase();
  return row.words;
}

/**
 * Equal rows keep the order of the input; rows without a score are last.
 * @param {Row[]} rows @param {Query} query
 */
export function sorted(rows, { sort = "index", order, scorer }) {
  /** @type {Record<string, (row: Row) => number | null | undefined>} */
  const keys = {
    index: ({ record }) => record.index, score: ({ record }) => record.scores?.[scorer ?? ""],
    latency: ({ record }) => record.latency_s ?? 0, tokens: ({ record }) => record.usage?.completion_tokens ?? 0,
    length: (row) => (row.record.status === "ok" ? answerIn(row).length : 0),
  };
  const sign = order === "desc" ? -1 : 1;
  return rows.map((row) => ({ key: keys[sort](row) ?? NaN, row }))
    .sort((a, b) => Number(isNaN(a.key)) - Number(isNaN(b.key)) || sign * (a.key - b.key)).map(({ row }) => row);
}

/**
 * A row as the server lists it, and its first image.
 * @param {Row} row
 * @returns {RowLine}
 */
export function listed(row) {
  const { record, kind, group, asked } = row;
  return { ...record, kind, group, asked, text: answerIn(row), image: row.prompt.images[0] };
}

/** @param {Pick<Row, "record" | "answers">} row */
const answerIn = ({ record, answers }) => answers?.[0] || record.text || record.error?.message || "";
/** @param {RowRecord} record */
const isHeldScored = ({ scores }) => Object.values(scores ?? {}).some((score) => typeof score === "number");
