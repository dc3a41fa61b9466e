// What the view's pages share: requests, times and numbers as the report writes them, and the keys.
// elements.js of the report comes first.

export async function fetchJson(url, options = {}) {
  const response = await fetch(url, options);
  const found = await response.json().catch(() => ({ error: `${url}: HTTP ${response.status}` }));
  if (!response.ok) throw new Error(found.error ?? `${url}: HTTP ${response.status}`);
  return found;
}

export const runUrl = (run) => `/run/${encodeURIComponent(run)}`;
export const apiUrl = (run, rest = "") => `/api/runs/${encodeURIComponent(run)}${rest}`;

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

export const stateBadge = (state) => make("span", `state ${state.replaceAll(" ", "-")}`, state);

// A record's score as the report shows it; scorer: {name, head, scale} of the run's status.
export function shownScore(score, scorer) {
  return typeof score === "number" ? String(Math.round(score * (scorer?.scale ?? 1) * 100) / 100) : "–";
}

export function link(text, url, className = "") {
  const element = make("a", className, text);
  element.href = url;
  return element;
}

export function button(text, act, className = "quiet") {
  const element = make("button", className, text);
  element.type = "button";
  element.addEventListener("click", act);
  return element;
}

// A line of a table: its first cell is a heading; a cell is a text or an element.
export function line(cells, tag = "td") {
  const row = make("tr");
  cells.forEach((content, place) => {
    const cell = make(place ? tag : "th");
    if (tag === "th") cell.scope = "col";
    else if (!place) cell.scope = "row";
    cell.append(content ?? "");
    row.append(cell);
  });
  return row;
}

export function table(heads, lines, className = "") {
  const found = make("table", `scores ${className}`), head = make("thead"), body = make("tbody");
  head.append(line(heads, "th"));
  body.append(...lines.map((cells) => line(cells)));
  found.append(head, body);
  return found;
}

export function note(id, text) {
  const element = byId(id);
  element.hidden = !text;
  if (element.textContent !== text) element.textContent = text;
}

// "1–50 of 1,234" between two buttons; go(offset) is called with the page's first place.
export function drawPager(nav, { offset, limit, total, n, go }) {
  const rest = total === null ? "" : ` of ${number.format(total)}`;
  const span = n ? `${number.format(offset + 1)}–${number.format(offset + n)}${rest}` : "";
  const held = nav.contains(document.activeElement) ? document.activeElement.ariaLabel : null;
  const before = button("←", () => go(Math.max(0, offset - limit)), "");
  const after = button("→", () => go(offset + limit), "");
  before.ariaLabel = "Previous page";
  after.ariaLabel = "Next page";
  before.disabled = offset === 0;
  after.disabled = total !== null && offset + n >= total;
  nav.replaceChildren(before, make("span", "", span), after);
  nav.hidden = before.disabled && after.disabled;
  [before, after].find((one) => one.ariaLabel === held)?.focus();
}

// Calls onKey(event) for keys that belong to no control and no open dialog. Esc and ? work alike on
// all pages: clear() is for an Esc outside of a control.
export function listenToKeys({ list, clear, onKey, onEnter }) {
  byId("help").addEventListener("click", () => byId("keys").showModal());
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  }
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const typing = event.target.closest("input:not([type=checkbox]), select, textarea");
    if (event.key === "Escape") {
      if (typing) list.focus();
      else clear();
    } else if (typing) {
      if (typing.id !== "search" || !["Enter", "ArrowDown"].includes(event.key)) return;
      onEnter?.();
      list.focus();
    } else if (event.key === "/") {
      byId("search")?.focus();
      byId("search")?.select();
    } else if (event.key === "?") byId("keys").showModal();
    else if (!onKey(event)) return;
    event.preventDefault();
  });
}
