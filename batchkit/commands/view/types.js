// The types of the API's responses (server.py documents its addresses) and of what the modules pass on. No code.

/** @typedef {{ name: string, head: string, scale: number }} Scorer */
/** @typedef {{ name: string, spent: number | null, limit: number }} Budget */
/** @typedef {Record<string, number | null>} RecordScores */
/** @typedef {{ prompt_tokens: number, completion_tokens: number, reasoning_tokens?: number }} Usage */
/** @typedef {{ kind: string, message?: string }} Failure */
/** @typedef {{ function?: { name: string, arguments?: string } }} ToolCall */
/** @typedef {Partial<Record<"search" | "group" | "outcome" | "scorer" | "low" | "high" | "order", string>>} Wanted */
/** @typedef {(wanted: { group?: string | null, outcome?: string, scorer?: string, order?: string, row?: number | null }) => void} ShowRows */

/**
 * @typedef {{
 *   text?: string | null, reasoning?: string | null, tool_calls?: ToolCall[] | null,
 * }} Choice
 */

/**
 * @typedef {Choice & {
 *   index: number, id: string, status: "ok" | "failed", attempt: number,
 *   prediction?: string | null, scores?: RecordScores | null, unscored?: string, usage?: Usage | null,
 *   latency_s?: number | null, finish_reason?: string, finished_at?: string, truncated_tokens?: number,
 *   duplicate_of?: number, reused_from?: string,
 *   error?: Failure | null, choices?: Choice[] | null, selected?: number,
 *   label?: string | null, entities?: { text: string, label: string }[] | null,
 *   segments?: { start: number, end: number, text: string }[],
 *   coverage?: { missing_s: number, gaps: [number, number][] } | null,
 * }} RowRecord
 */

/**
 * A generation of a row; `more`: the number of those that a file leaves out.
 * @typedef {Choice & {
 *   step?: string | null, call?: number, engine?: string | null, skipped?: boolean, prediction?: string | null,
 *   scores?: RecordScores | null, usage?: Usage | null, latency_s?: number | null, error?: Failure | null,
 *   more?: number,
 * }} Step
 */

/** @typedef {{ kind: string, src?: string, problem?: string, name?: string, poster?: string }} Clip */
/** @typedef {{ src?: string, name?: string, problem?: string, w?: number, h?: number }} Picture */

/**
 * Images: addresses from a server; places in `Held.pictures` in a file.
 * @typedef {{
 *   text?: string, error?: string, messages?: { role: string, content: string }[],
 *   images: (string | number)[], clips?: Clip[],
 * }} Prompt
 */

/**
 * `kept`: the names of the fields in the record; only in a file. `texts`: for the search.
 * @typedef {{
 *   record: RowRecord, kind: string | null, group: string | null, asked: string | null, answers?: string[] | null,
 *   reference?: unknown, fields: Record<string, string>, kept: string[], attempts?: RowRecord[], prompt: Prompt, steps: Step[],
 *   texts?: string[],
 * }} Row
 */

/** @typedef {{ kind: string | null, group: string | null, asked: string | null, image?: string | number }} Labels */
/** @typedef {RowRecord & Labels} RowLine */
/** @typedef {{ total: number, offset: number, rows: RowLine[], indexed: number, has_images?: boolean }} RowPage */
/** @typedef {{ asked?: string | null, reference?: unknown, image?: string }} Beside */

/** @typedef {{ count: number, mean: number, std: number, median: number, min: number, max: number }} Spread */

/**
 * The scores of a group, and its means by scorer.
 * @typedef {{ n: number, unscored: number, failed: number, spread?: { reward: Spread } } & Record<string, any>} Group
 */

/** @typedef {{ scored: number, unscored: number, metrics: Record<string, Group>, overall: Group }} ScoreTable */

/** @typedef {{ run: string, group: string | null, scorer: string, n: number, delta: number, low: number, high: number, better: number, worse: number }} Delta */

/**
 * @typedef {{
 *   runs: string[], origins: Record<string, string[]>, tables: Record<string, ScoreTable>, deltas: Delta[],
 *   flips: { run: string, scorer: string, id: string, before: number, after: number }[],
 *   only_in_baseline: Record<string, number>, only_in_run: Record<string, number>, warnings: string[],
 *   heads: Record<string, string>, method: string,
 * }} Comparison
 */

/**
 * @typedef {{
 *   title: string, unit: string, counts: number[], low: number, top: number, overflow: number, is_whole: boolean,
 *   median: number, p99: number, largest: number,
 * }} Histogram
 */

/**
 * @typedef {{
 *   worker: number, node: string | null, gpus: number[], state: string, rows: number, rows_per_s: number,
 *   in_flight: number, restarts: number, engine_restarts: number, joined_at: string | null, left_at: string | null,
 * }} Worker
 */

/**
 * @typedef {{
 *   number: number, started_at: string, ended_at: string | null, exit: number | null, seconds: number | null,
 *   engine_restarts: number, workers?: Worker[], events: { at: string | null, text: string }[],
 * }} Start
 */

/** @typedef {Record<"low" | "expected" | "high", number>} Interval */

/**
 * @typedef {{ at: string, left: number } & Partial<Record<
 *   "seconds" | "prompt_tokens" | "completion_tokens" | "gpu_hours" | "price", Interval | null>>} Forecast
 */

/**
 * What the list of runs and the page of a run have in common.
 * @typedef {{
 *   name: string, total: number | null, ok: number, failed: number, pending: number | null, eta_s: number | null,
 *   state: string, budgets: Budget[], started_at: string | null, model: string | null, kind: string | null,
 * }} Summary
 */

/** @typedef {Summary & { run: string, folder: string, error?: string, score: { name: string, head: string, mean: number } | null }} ListedRun */

/**
 * @typedef {Summary & {
 *   folder: string, failed_by_kind: Record<string, number>, prompt_tokens: number, completion_tokens: number,
 *   generations: number, rows_per_s: number | null, engine_restarts: number, starts: Start[],
 *   failures?: { kind: string, count: number, message: string, index: number }[],
 *   groups?: string[], group_by?: string | null, values: string[], scorers: Scorer[], scores: ScoreTable,
 *   spreads: Histogram[], notes: string[], problem: string | null, indexed: number, forecast: Forecast | null,
 *   newest?: Record<string, any> | null,
 * }} Status
 */

/**
 * Columns of equal length; all but the first three are numbers or null.
 * @typedef {{ at: string[], seconds: number[], start: number[] } & Record<string, any[]>} Metrics
 */

/**
 * @typedef {{
 *   origin: [string, string][], prompt: [string, string][], job_toml: string,
 *   steps: Record<string, { generations: number, failed: number, prompt_tokens: number, completion_tokens: number }>,
 * }} About
 */

/** @typedef {{ id: string, group: string | null, a: RowLine | null, b: RowLine | null }} Pair */
/** @typedef {{ total: number, counts: Record<string, number>, rows: Pair[], offset: number, indexed: number }} PairPage */

/**
 * The responses that a file holds.
 * @typedef {{
 *   made: string, comparison?: Comparison, status: Status, about: About, metrics: Metrics,
 *   values: Comparison | null, rows: Row[], pictures: Picture[],
 * } & Record<string, unknown>} Held
 */

export {};
