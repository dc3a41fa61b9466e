// The rows of a file: filters, search and order, as the server has them in rows.py.

export function passes(row, { status, kind, group, scorer, min, max, text }) {
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
export function sorted(rows, { sort = "index", order, scorer }) {
  const keys = {
    index: ({ record }) => record.index, score: ({ record }) => record.scores?.[scorer],
    latency: ({ record }) => record.latency_s ?? 0, tokens: ({ record }) => record.usage?.completion_tokens ?? 0,
    length: (row) => (row.record.status === "ok" ? answerIn(row).length : 0),
  };
  const sign = order === "desc" ? -1 : 1;
  return rows.map((row) => [keys[sort](row) ?? null, row])
    .sort(([a], [b]) => (a === null) - (b === null) || sign * (a - b)).map(([, row]) => row);
}

// A row as the server lists it, and its first image.
export function listed(row) {
  const { record, kind, group, asked } = row;
  return { ...record, kind, group, asked, text: answerIn(row), image: row.prompt.images[0] };
}

const answerIn = ({ record, answers }) => answers?.[0] || record.text || record.error?.message || "";
const isHeldScored = ({ scores }) => Object.values(scores ?? {}).some((score) => typeof score === "number");
