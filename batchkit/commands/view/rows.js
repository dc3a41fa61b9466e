// The rows of a run by page: the list, and the row that is open beside it. The hash of the address keeps both.
import { number, oneLine, short, shownScore } from "./format.js";
import { byId, drawPager, highlight, listenToKeys, make, titled } from "./elements.js";
import { apiUrl, besideAnswers, fetchJson, reasonOf } from "./data.js";
import { openFilters } from "./filters.js";
import { drawPlace, drawRow, enlargeFirst, pictureOf, stepOf } from "./row.js";
/** @import { Row, RowLine, RowPage, ShowRows, Status } from "./types.js" */

/** @typedef {"first" | "last" | "open"} Select which row of a page to open; "open": the same, if the page has it */

const LIMIT = 50;
const HOLDING_MS = 60; // rows that j runs past while it is held down are not asked for
const GAP_MS = 1500; // between two looks at a page of a live run; more where they take long
const SOON_MS = 50; // until the next look while the server has not read all of the log

/**
 * set({outcome, row, …}) replaces all filters, and opens the row. Call runChanged() with each new status.
 * @param {string} run
 */
export function openRows(run) {
  const list = byId("list"), detail = byId("detail");
  const filters = openFilters(() => go(0));
  const beside = besideAnswers(run, lacking, (indexes) => {
    page.rows.forEach((row, place) => {
      if (indexes.includes(row.index)) list.children[place]?.replaceWith(item(row, place));
    });
    mark(at);
  });
  let offset = 0; // of the wanted page
  /** @type {RowPage} */
  let page = { offset: 0, rows: [], total: 0, indexed: 1 }; // the page in the list
  let at = -1; // the open row's place on the page
  /** @type {number | null} */
  let open = null; // its index
  let shown = ""; // its record in the detail
  /** @type {string[]} */
  let values = []; // of input.cross: the rows of the input come once for each
  let drawn = ""; // the rows in the list
  /** @type {number | null} */
  let done = null; // rows of the run that have a record
  /** @type {AbortController | null} */
  let asking = null;
  /** @type {AbortController | null} */
  let askingRow = null;
  let holding = 0, refresh = 0, tookMs = 0;

  const items = () => /** @type {HTMLElement[]} */ ([...list.children]);

  // ---- a page

  /** @param {Select} select */
  async function load(select) {
    clearTimeout(refresh);
    refresh = 0;
    asking?.abort();
    asking = new AbortController();
    const { signal } = asking, began = performance.now();
    const query = new URLSearchParams({ ...filters.query(), offset: `${offset}`, limit: `${LIMIT}` });
    list.ariaBusy = "true";
    try {
      /** @type {RowPage} */
      const found = await fetchJson(apiUrl(run, `/rows?${query}`), { signal });
      if (signal.aborted) return;
      asking = null;
      if (!found.rows.length && offset && found.total) { // there are fewer pages than before
        go(Math.floor((found.total - 1) / LIMIT) * LIMIT, select);
        return;
      }
      tookMs = performance.now() - began;
      const now = JSON.stringify([found.rows, offset, [...filters.scorers().keys()]]);
      const isSame = select === "open" && now === drawn;
      page = found;
      drawn = now;
      if (isSame) count();
      else draw(select);
      showPlace();
      if (page.indexed < 1) later(SOON_MS);
      beside.ask();
    } catch (error) {
      if (signal.aborted) return;
      asking = null;
      list.replaceChildren(make("p", "empty", reasonOf(error)));
      drawn = "";
      later();
    }
    list.ariaBusy = "false";
  }

  function lacking() {
    return page.rows.filter(({ asked }) => page.has_images || !asked).map(({ index }) => index);
  }

  /** @param {number} to @param {Select} [select] */
  function go(to, select = "first") {
    offset = to;
    load(select);
  }

  // A pending request is not aborted: otherwise a slow search would never end in a fast run.
  function later(ms = Math.max(GAP_MS, 5 * tookMs)) {
    refresh ||= setTimeout(() => {
      refresh = 0;
      if (asking) later();
      else load("open");
    }, ms);
  }

  /** @param {Select} select */
  function draw(select) {
    const { rows } = page;
    count();
    const top = select === "open" ? list.scrollTop : 0;
    const isFiltered = Object.keys(filters.query()).length > 0;
    let nothing = isFiltered ? "No row passes these filters." : "No row has finished yet.";
    if (page.indexed < 1) nothing = "No row yet: the log is being read.";
    list.replaceChildren(...(rows.length ? rows.map(item) : [make("p", "empty", nothing)]));
    list.scrollTop = top;
    const place = rows.findIndex((row) => row.index === open);
    if (select === "open" && open !== null) {
      mark(place);
      openRow(open);
    } else if (rows.length) choose(select === "last" ? rows.length - 1 : 0);
    else close();
    remember();
  }

  function count() {
    const { total, rows, indexed } = page;
    drawPager(byId("pager"), { offset: page.offset, limit: LIMIT, total, n: rows.length, go });
    const of = done === null || total >= done ? "" : ` of ${number.format(done)}`;
    const text = `${number.format(total)}${of} rows`;
    byId("count").textContent = indexed < 1 ? `${text}; ${Math.floor(100 * indexed)} % of the log is read` : text;
  }

  /** @param {RowLine} row @param {number} place */
  function item(row, place) {
    const element = make("div", "item"), isOk = row.status === "ok";
    element.id = `row-${row.index}`;
    element.dataset.place = `${place}`;
    element.role = "option";
    element.ariaSelected = "false";
    element.ariaPosInSet = `${page.offset + place + 1}`;
    element.ariaSetSize = `${page.total}`;
    const asked = row.asked || beside.of(row.index).asked, image = row.image ?? beside.of(row.index).image;
    const answer = oneLine(isOk ? row.prediction ?? row.text : row.text) || "(no answer)";
    const [what, under] = asked
      ? [oneLine(asked), answer]
      : [oneLine(row.text) || "(no answer)", figures(row).filter(Boolean).join(" · ")];
    if (image !== undefined) element.append(thumbnail(image));
    element.append(make("div", isOk || asked ? "what" : "what failed", what));
    element.append(make("div", isOk || !asked ? "under" : "under failed", under));
    if (!isOk) element.append(make("div", "score failed", row.kind));
    else if (filters.scorers().size) {
      const scorer = filters.scorer()
        ?? [...filters.scorers().values()].find(({ name }) => typeof row.scores?.[name] === "number");
      const score = shownScore(row.scores?.[scorer?.name ?? ""], scorer);
      const cell = make("div", score === "–" ? "score none" : "score", score);
      cell.title = scorer?.head ?? "";
      element.append(cell);
    }
    element.append(make("div", "id", row.id));
    return element;
  }

  /** @param {string | number} image */
  function thumbnail(image) {
    const { src } = pictureOf(image), element = make(src ? "img" : "div", "blank");
    if (src) Object.assign(element, { src, alt: "" });
    return element;
  }

  /** @param {RowLine} row */
  const figures = ({ group, latency_s: latency, usage, attempt }) => [
    group,
    short(latency, "s"),
    usage && `${number.format(usage.prompt_tokens)} + ${number.format(usage.completion_tokens)} tokens`,
    attempt > 1 && `attempt ${attempt}`,
  ];

  // ---- one row

  /** @param {number} place */
  function mark(place) {
    at = place;
    for (const element of items()) element.ariaSelected = String(Number(element.dataset.place) === at);
    if (at < 0) list.removeAttribute("aria-activedescendant");
    else list.setAttribute("aria-activedescendant", `row-${page.rows[at].index}`);
  }

  /** @param {number} place */
  function choose(place, into = true) {
    mark(place);
    const { offsetTop: top, offsetHeight: height } = items()[place], { index } = page.rows[place];
    if (into) list.scrollTop = Math.min(top, Math.max(list.scrollTop, top + height - list.clientHeight));
    open = index;
    remember();
    clearTimeout(holding);
    holding = setTimeout(() => openRow(index), shown ? HOLDING_MS : 0);
  }

  /** @param {number} index */
  async function openRow(index) {
    const row = at < 0 ? null : page.rows[at];
    const wanted = JSON.stringify([index, row?.attempt, row?.status, row?.scores]);
    if (row && wanted === shown) {
      highlight(detail, filters.values().search ?? "");
      return;
    }
    askingRow?.abort();
    askingRow = new AbortController();
    const { signal } = askingRow;
    try {
      const found = await fetchJson(apiUrl(run, `/rows/${index}`), { signal });
      if (signal.aborted) return;
      const isOther = detail.dataset.index !== String(index);
      drawRow(detail, found, filters.scorers());
      showPlace();
      if (isOther) detail.scrollTop = 0;
      detail.dataset.index = `${index}`;
      highlight(detail, filters.values().search ?? "");
      shown = wanted;
      await showValues(index, signal);
    } catch (error) {
      if (signal.aborted) return;
      detail.replaceChildren(make("p", "error", reasonOf(error)));
      shown = "";
    }
  }

  /**
   * The answers to the same row of the input with the other values of input.cross.
   * @param {number} index @param {AbortSignal} signal
   */
  async function showValues(index, signal) {
    if (values.length < 2) return;
    const first = index - index % values.length;
    /** @type {(Row | null)[]} */
    const found = await Promise.all(values.map((_, n) => (first + n === index ? null
      : fetchJson(apiUrl(run, `/rows/${first + n}`), { signal }).catch(() => null))));
    if (signal.aborted) return;
    const box = make("div");
    found.forEach((row, n) => row && box.append(stepOf(
      { ...row.record, step: values[n], text: row.answers?.[0] ?? row.record.text }, filters.scorers())));
    detail.insertBefore(titled("With other values", box), detail.querySelector(":scope > details"));
  }

  function showPlace() {
    drawPlace(detail, { step, place: at < 0 ? null : page.offset + at, total: page.total });
  }

  function close() {
    askingRow?.abort();
    clearTimeout(holding);
    mark(-1);
    open = null;
    shown = "";
    detail.replaceChildren(make("p", "empty", "Nothing to show."));
  }

  /** @param {number} by */
  function step(by) {
    const place = at + by;
    if (place >= 0 && place < page.rows.length) choose(place);
    else if (offset !== page.offset) return; // the next page is on its way
    else if (by < 0) turn(-1, "last");
    else turn(1);
  }

  /** @param {number} by @param {Select} [select] */
  function turn(by, select = "first") {
    const to = offset + by * LIMIT;
    if (to >= 0 && to < page.total) go(to, select);
  }

  // ---- the address, the keys, and what the rest of the page asks for

  function remember() {
    const state = new URLSearchParams(filters.values());
    if (offset) state.set("offset", `${offset}`);
    if (open !== null) state.set("row", `${open}`);
    try {
      history.replaceState(null, "", `#${state}`);
    } catch { /* some browsers refuse it for files */ }
  }

  function recall() {
    const state = new URLSearchParams(location.hash.slice(1));
    const whole = (/** @type {string} */ name) => (/^\d{1,10}$/.test(state.get(name) ?? "") ? Number(state.get(name)) : null);
    filters.put(Object.fromEntries(state));
    offset = Math.floor((whole("offset") ?? 0) / LIMIT) * LIMIT;
    open = whole("row");
  }

  /** @type {ShowRows} */
  function set({ row = null, ...values }) {
    filters.put(values);
    open = row;
    go(0, "open");
    byId("rows").scrollIntoView();
    list.focus({ preventScroll: true });
  }

  /** @param {Status} status */
  function runChanged(status) {
    filters.offer(status);
    values = status.values;
    const before = done;
    done = status.ok + status.failed;
    if (before === null) load("open");
    else if (before !== done) later();
  }

  list.addEventListener("click", (event) => {
    const found = /** @type {Element} */ (event.target).closest(".item");
    if (found instanceof HTMLElement) choose(Number(found.dataset.place), false);
  });
  /** @type {Record<string, number>} */
  const steps = { j: 1, k: -1 };
  /** @type {Record<string, number>} */
  const turns = { n: 1, p: -1 };
  listenToKeys({
    list,
    help: [
      ["j k", "next, previous row"], ["↓ ↑", "the same, in the list"], ["n p", "next, previous page"],
      ["Home End", "first, last row of the page, in the list"], ["Enter", "to the row’s text, to scroll it"],
      ["/", "search"], ["i", "the row’s image, larger"], ["Esc", "back to the list; again: clear all filters"],
    ],
    onEnter: filters.apply,
    clear: () => (detail.contains(document.activeElement) ? list.focus() : filters.clear()),
    onKey: (event) => {
      const { key } = event, last = page.rows.length - 1;
      const screen = Math.max(1, Math.floor(list.clientHeight / (items()[0]?.offsetHeight || 1)) - 1);
      /** @type {Record<string, number>} */
      const places = {
        ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + screen, PageUp: at - screen, Home: 0, End: last,
      };
      if (key in steps) step(steps[key]);
      else if (key in turns) turn(turns[key]);
      else if (event.target === list && key === "Enter") detail.focus();
      else if (event.target === list && key.startsWith("Arrow")) step(places[key] - at);
      else if (event.target === list && key in places && last >= 0) choose(Math.min(last, Math.max(0, places[key])));
      else return key === "i" && enlargeFirst(detail);
      return true;
    },
  });
  recall();
  return { set, runChanged };
}
