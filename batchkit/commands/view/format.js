// Numbers, durations and times as text; batchkit/config/numbers.py formats them in the same way.
/** @import { Budget, Scorer } from "./types.js" */

export const number = new Intl.NumberFormat("en-US");

/** @param {string | null | undefined} text */
export const oneLine = (text) => (text ?? "").slice(0, 300).replace(/\s+/g, " ").trim();

const plain = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 3 }); // never 1e-7

/**
 * Three digits below 100, thousands separators above.
 * @param {number | null | undefined} value
 */
export function short(value, unit = "") {
  if (value === null || value === undefined) return "";
  const text = value >= 100 ? number.format(Math.round(value)) : plain.format(Number(value.toPrecision(3)));
  return `${text} ${unit}`.trimEnd();
}

/** @param {number} value */
export function shortCount(value) {
  if (value < 1e6) return number.format(value);
  return value < 999_995_000 ? `${(value / 1e6).toFixed(2)} M` : `${(value / 1e9).toFixed(2)} G`;
}

/**
 * A multiple of the step, with the decimals that the step has.
 * @param {number} value @param {number} step
 */
export function inSteps(value, step, unit = "") {
  const decimals = Math.min(20, Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)));
  return `${value.toLocaleString("en-US", { maximumFractionDigits: decimals })} ${unit}`.trimEnd();
}

/**
 * A share in percent; only none is 0.0 % and only all is 100.0 %.
 * @param {number} part @param {number} whole
 */
export function percent(part, whole) {
  if (!whole) return "";
  const text = (100 * part / whole).toFixed(1);
  if (text === "0.0" && part > 0) return "< 0.1 %";
  return text === "100.0" && part < whole ? "> 99.9 %" : `${text} %`;
}

/**
 * A duration in the largest units: "1.3 s", "42 s", "6 min", "3 h 20 min".
 * @param {number} seconds
 */
export function duration(seconds) {
  if (seconds < 9.95) return `${plain.format(Number(seconds.toPrecision(2)))} s`;
  const whole = Math.round(seconds), minutes = Math.round(whole / 60);
  if (whole < 100) return `${whole} s`;
  return minutes < 100 ? `${minutes} min` : `${number.format(Math.floor(minutes / 60))} h ${minutes % 60} min`;
}

/**
 * A time on an axis: "1.3 s", "0:42", "6:00", "3:20:00".
 * @param {number} seconds
 */
export function clock(seconds) {
  if (seconds >= 9.95) return withColons(Math.round(seconds));
  const rounded = Number(seconds.toFixed(seconds < 1 ? 2 : 1));
  return rounded ? `${rounded} s` : "0";
}

/**
 * A time in a recording: "0:01.3", "3:20:00.0".
 * @param {number} seconds
 */
export function timecode(seconds) {
  const tenths = Math.round(10 * seconds);
  return `${withColons(Math.floor(tenths / 10))}.${tenths % 10}`;
}

/** @param {number} whole seconds */
function withColons(whole) {
  const [hours, ...rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const [minutes, seconds] = rest.map((part) => String(part).padStart(2, "0"));
  return hours ? `${hours}:${minutes}:${seconds}` : `${rest[0]}:${seconds}`;
}

/** @type {Intl.DateTimeFormatOptions} */
const DAY = { day: "numeric", month: "long", year: "numeric", timeZone: "UTC" };
/** @type {Intl.DateTimeFormatOptions} */
const TIME = { hour: "2-digit", minute: "2-digit", hourCycle: "h23", timeZone: "UTC" };

/** @param {string | null | undefined} stamp */
export function when(stamp, { seconds = false } = {}) {
  const moment = new Date(stamp ?? NaN);
  if (Number.isNaN(moment.getTime())) return "";
  const time = seconds ? { ...TIME, second: /** @type {const} */ ("2-digit") } : TIME;
  return `${moment.toLocaleString("en-GB", DAY)}, ${moment.toLocaleString("en-GB", time)} UTC`;
}

/**
 * The part that differs between events of one day.
 * @param {string} stamp
 */
export function timeOf(stamp) {
  return new Date(stamp).toLocaleString("en-GB", { ...TIME, second: "2-digit" });
}

/**
 * What a budget limits, the used part, and the limit.
 * @param {Budget} budget
 * @returns {[string, string, string]}
 */
export function budgetOf({ name, spent, limit }) {
  /** @type {Record<string, [string, (value: number) => string]>} */
  const kinds = { max_seconds: ["time", duration], max_completion_tokens: ["tokens", shortCount], max_price: ["price", short] };
  const [what, how] = kinds[name];
  return [what, spent === null ? "?" : how(spent), how(limit)];
}

/**
 * A record's score as the report shows it.
 * @param {unknown} score @param {Scorer} [scorer]
 */
export function shownScore(score, scorer) {
  return typeof score === "number" ? String(Math.round(score * (scorer?.scale ?? 1) * 100) / 100) : "–";
}

/** @param {number} value */
export const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;
