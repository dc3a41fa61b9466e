// Numbers, durations and times as text; batchkit/config/numbers.py formats them in the same way.

export const number = new Intl.NumberFormat("en-US");
export const oneLine = (text) => (text ?? "").slice(0, 300).replace(/\s+/g, " ").trim();

// Three digits if it is small, with thousands separators if it is large.
export function short(value, unit = "") {
  if (value === null || value === undefined) return "";
  const text = value >= 100 ? number.format(Math.round(value)) : String(Number(value.toPrecision(3)));
  return `${text} ${unit}`.trimEnd();
}

export function shortCount(value) {
  if (value < 1e6) return number.format(value);
  return value < 1e9 ? `${(value / 1e6).toFixed(2)} M` : `${(value / 1e9).toFixed(2)} G`;
}

export const percent = (part, whole) => (whole ? `${(100 * part / whole).toFixed(1)} %` : "");

export function duration(seconds) {
  const minutes = Math.round(seconds / 60);
  if (seconds < 100) return `${Math.round(seconds)} s`;
  return minutes < 100 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export const lasting = (seconds) => (seconds < 10 ? clock(seconds) : duration(seconds));

export function clock(seconds) {
  if (seconds < 10) return seconds ? `${seconds.toFixed(1)} s` : "0";
  const whole = Math.round(seconds);
  const parts = [Math.floor(whole / 60) % 60, whole % 60].map((part) => String(part).padStart(2, "0"));
  const hours = Math.floor(whole / 3600);
  return hours ? `${hours}:${parts.join(":")}` : `${Number(parts[0])}:${parts[1]}`;
}

const DAY = { day: "numeric", month: "long", year: "numeric", timeZone: "UTC" };
const TIME = { hour: "2-digit", minute: "2-digit", hour12: false, timeZone: "UTC" };

export function when(stamp, { seconds = false } = {}) {
  const moment = new Date(stamp ?? NaN);
  if (Number.isNaN(moment.getTime())) return "";
  const time = seconds ? { ...TIME, second: "2-digit" } : TIME;
  return `${moment.toLocaleString("en-GB", DAY)}, ${moment.toLocaleString("en-GB", time)} UTC`;
}

// The part that differs between events of one day.
export function timeOf(stamp) {
  return new Date(stamp).toLocaleString("en-GB", { ...TIME, second: "2-digit" });
}

// What a budget is of, what is spent of it, and its limit.
export function budgetOf({ name, spent, limit }) {
  const [what, how] = {
    max_seconds: ["time", lasting], max_completion_tokens: ["tokens", shortCount], max_price: ["price", short],
  }[name];
  return [what, spent === null ? "?" : how(spent) || "0", how(limit)];
}

// A record's score as the report shows it; scorer: {name, head, scale} of the run's status.
export function shownScore(score, scorer) {
  return typeof score === "number" ? String(Math.round(score * (scorer?.scale ?? 1) * 100) / 100) : "–";
}

export function timecode(seconds) {
  const minutes = Math.floor(seconds / 60);
  return `${minutes}:${(seconds - 60 * minutes).toFixed(1).padStart(4, "0")}`;
}

export const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;
