// The rows of a page that is one file: filters, search and order, as in rows.py and search.py.
/** @import { Choice, Row, RowLine, RowRecord } from "./types.js" */

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
    && ((min ?? max) === undefined || isIn) && (!text || hasWords(row, text.toLowerCase()));
}

/** @param {Row} row @param {string} words in lower case */
function hasWords(row, words) {
  row.texts ??= textsOf(row).flatMap((text) => (text ? [text.toLowerCase()] : []));
  return row.texts.some((text) => text.includes(words));
}

/**
 * The texts to search: the id, what the model said, the prediction, the error and the kept fields.
 * @param {Row} row
 */
function textsOf({ record, kept, fields }) {
  const { id, label, prediction, error, entities, choices } = record;
  return [
    id, label, prediction, error?.kind, error?.message,
    ...(entities ?? []).flatMap((entity) => [entity.text, entity.label]),
    ...(choices ?? [record]).flatMap((/** @type {Choice} */ { text, reasoning, tool_calls: calls }) => [
      text, reasoning, ...(calls ?? []).flatMap(({ function: called }) => [called?.name, called?.arguments]),
    ]),
    ...kept.map((name) => fields[name]),
  ];
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
