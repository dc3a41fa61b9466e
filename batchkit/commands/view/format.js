// Numbers, durations and times as text; batchkit/config/numbers.py formats them in the same way.
/** @import { Budget, Scorer } from "./types.js" */

export const number = new Intl.NumberFormat("en-US");

/** @param {string | null | undefined} text */
export const oneLine = (text) => (text ?? "").slice(0, 300).replace(/\s+/g, " ").trim();

/**
 * Three digits if it is small, with thousands separators if it is large.
 * @param {number | null | undefined} value
 */
export function short(value, unit = "") {
  if (value === null || value === undefined) return "";
  const text = value >= 100 ? number.format(Math.round(value)) : String(Number(value.toPrecision(3)));
  return `${text} ${unit}`.trimEnd();
}

/** @param {number} value */
export function shortCount(value) {
  if (value < 1e6) return number.format(value);
  return value < 1e9 ? `${(value / 1e6).toFixed(2)} M` : `${(value / 1e9).toFixed(2)} G`;
}

/** @param {number} part @param {number} whole */
export const percent = (part, whole) => (whole ? `${(100 * part / whole).toFixed(1)} %` : "");

/** @param {number} seconds */
export function duration(seconds) {
  const minutes = Math.round(seconds / 60);
  if (seconds < 100) return `${Math.round(seconds)} s`;
  return minutes < 100 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** @param {number} seconds */
export const lasting = (seconds) => (seconds < 10 ? clock(seconds) : duration(seconds));

/** @param {number} seconds */
export function clock(seconds) {
  if (seconds < 10) return seconds ? `${seconds.toFixed(1)} s` : "0";
  const whole = Math.round(seconds);
  const parts = [Math.floor(whole / 60) % 60, whole % 60].map((part) => String(part).padStart(2, "0"));
  const hours = Math.floor(whole / 3600);
  return hours ? `${hours}:${parts.join(":")}` : `${Number(parts[0])}:${parts[1]}`;
}

/** @type {Intl.DateTimeFormatOptions} */
const DAY = { day: "numeric", month: "long", year: "numeric", timeZone: "UTC" };
/** @type {Intl.DateTimeFormatOptions} */
const TIME = { hour: "2-digit", minute: "2-digit", hour12: false, timeZone: "UTC" };

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
  const kinds = { max_seconds: ["time", lasting], max_completion_tokens: ["tokens", shortCount], max_price: ["price", short] };
  const [what, how] = kinds[name];
  return [what, spent === null ? "?" : how(spent) || "0", how(limit)];
}

/**
 * A record's score as the report shows it.
 * @param {unknown} score @param {Scorer} [scorer]
 */
export function shownScore(score, scorer) {
  return typeof score === "number" ? String(Math.round(score * (scorer?.scale ?? 1) * 100) / 100) : "–";
}

/** @param {number} seconds */
export function timecode(seconds) {
  const minutes = Math.floor(seconds / 60);
  return `${minutes}:${(seconds - 60 * minutes).toFixed(1).padStart(4, "0")}`;
}

/** @param {number} value */
export const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;
