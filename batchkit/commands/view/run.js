// The page of a run: what it has done, over time, its scores and its engine; rows.js has its rows.
import {
  budgetOf, clock, duration, number, percent, short, shortCount, timeOf, when,
} from "./format.js";
import { button, byId, focused, focusOn, make, meter, note, stateBadge, table, terms } from "./elements.js";
import { apiUrl, fetchJson, held, reasonOf } from "./data.js";
import { axisOf, placeOf } from "./axis.js";
import { drawCharts, spreadFigure } from "./charts.js";
import { drawDeltas, drawScores, drawSteps } from "./scores.js";
import { openRows } from "./rows.js";
/** @import { About, Comparison, Interval, ListedRun, Metrics, Start, Status, Worker } from "./types.js" */

export function openRun() {
  const AGAIN_MS = 1000;
  const run = held ? held.status.name : decodeURIComponent(location.pathname.split("/")[2]);
  const rows = openRows(run);
  /** @type {Status} */
  let status;
  /** @type {Metrics | null} */
  let metrics = null;

  // ---- the server's responses, as long as the page is visible

  let timer = 0;

  async function look() {
    clearTimeout(timer);
    if (document.hidden) return;
    const began = performance.now();
    try {
      /** @type {Status} */
      const found = await fetchJson(apiUrl(run));
      note("lost", "");
      if (isNew("status", found)) drawStatus(found);
      if (!metrics) await loadMetrics();
      else if (status.newest) addPoint(status.newest);
    } catch (error) {
      note("lost", error instanceof TypeError
        ? "The server does not answer: the page shows what was known last, and tries again."
        : `${reasonOf(error)}. The page shows what was known last, and tries again.`);
    }
    timer = setTimeout(look, Math.max(AGAIN_MS, 5 * (performance.now() - began)));
  }

  function appear() {
    metrics = null; // there may be newer points
    look();
  }

  async function loadMetrics() {
    try {
      metrics = await fetchJson(apiUrl(run, "/metrics"));
      draw();
    } catch (error) {
      byId("charts-note").textContent = reasonOf(error);
    }
  }

  /** @param {Record<string, any>} point */
  function addPoint(point) {
    const last = metrics?.at.at(-1) ?? "";
    if (!metrics || last === point.at) return;
    if (Date.parse(point.at) < Date.parse(last)) {
      loadMetrics();
      return;
    }
    for (const [name, column] of Object.entries(metrics)) column.push(point[name] ?? null);
    draw();
  }

  // The values of input.cross against the first one.
  async function loadValues() {
    const heads = new Map(status.scorers.map(({ name, head }) => [name, head]));
    /** @type {Comparison | null} */
    const found = await fetchJson(apiUrl(run, "/values")).catch(() => null);
    if (found) drawDeltas(byId("values"), found, (scorer) => heads.get(scorer) ?? scorer);
  }

  // Only a changed part is drawn again, so that a selection, the focus and a screen reader's place stay.
  const drawn = new Map();

  /** @param {string} part @param {unknown} shown */
  function isNew(part, shown) {
    const text = JSON.stringify(shown);
    if (drawn.get(part) === text) return false;
    drawn.set(part, text);
    return true;
  }

  // ---- the run in numbers

  /** @param {Status} found */
  function drawStatus(found) {
    status = found;
    if (!held) document.title = `${status.name} · ${status.state} · batchkit view`;
    byId("name").textContent = status.name;
    const parts = [status.model, status.kind, status.started_at && `started ${when(status.started_at)}`];
    if (isNew("subtitle", [status.state, parts])) {
      const said = parts.flatMap((part) => (part ? [make("span", "", part)] : []));
      byId("subtitle").replaceChildren(stateBadge(status.state), ...said);
    }
    byId("folder").textContent = status.folder;
    note("problem", status.problem ?? "");
    const done = status.ok + status.failed, total = status.total ?? (status.pending === null ? 0 : done);
    const bar = byId("progress");
    bar.hidden = !total;
    bar.replaceChildren(meter(status.ok / total, status.failed / total));
    bar.ariaValueNow = `${total ? Math.floor(100 * done / total) : 0}`;
    bar.ariaValueText = `${number.format(done)} of ${number.format(total)} rows`;
    const isRunning = status.state === "running";
    if (isNew("order", isRunning)) {
      byId(isRunning ? "scores-section" : "engine-section").before(byId("charts-section"));
    }
    const { notes, scores, spreads, scorers } = status;
    byId("notes").hidden = !notes.length;
    byId("notes").replaceChildren(...notes.map((text) => make("li", "", text)));
    if (isNew("scores", [scores, scorers])) drawScores(status, rows.set);
    if (status.values.length > 1 && !isRunning && isNew("values", scores)) loadValues();
    if (isNew("spreads", spreads)) byId("spreads").replaceChildren(...spreads.map(spreadFigure));
    drawFailures();
    drawEngine();
    draw();
    rows.runChanged(status);
    drawForecast();
  }

  // As `batchkit plan` says it: 12 min [10 min to 15 min].
  function drawForecast() {
    const { forecast } = status;
    byId("forecast").hidden = !forecast;
    if (!forecast) return;
    /**
     * @param {string} what @param {Interval | null | undefined} found @param {(value: number) => string} how
     * @returns {string[]}
     */
    const part = (what, found, how) => {
      if (!found) return [];
      const [low, expected, high] = [found.low, found.expected, found.high].map(how);
      return [`${what}: ${low === high ? expected : `${expected} [${low} to ${high}]`}`];
    };
    const tokens = (/** @type {number} */ count) => shortCount(Math.round(count));
    byId("forecast-text").textContent = [
      ...part(`time for ${number.format(forecast.left)} rows`, forecast.seconds, duration),
      ...part("prompt tokens", forecast.prompt_tokens, tokens),
      ...part("completion tokens", forecast.completion_tokens, tokens),
      ...part("GPU hours", forecast.gpu_hours, (hours) => short(hours)),
      ...part("price", forecast.price, (price) => short(price)), `made ${when(forecast.at)}`,
    ].join("; ");
  }

  /** @returns {[string, string, string][]} the name, the value and the text below it */
  function facts() {
    const { ok, failed, total, pending, state, scores, scorers } = status, done = ok + failed;
    const worked = workedFor(), isRunning = state === "running";
    const rate = isRunning ? status.rows_per_s ?? lastOf("rows_per_s") : worked ? done / worked : null;
    const left = isRunning && status.eta_s !== null ? `about ${duration(status.eta_s)}` : "";
    const over = worked ? `in ${duration(worked)}` : "";
    /** @param {string} column @param {number} tokens */
    const perSecond = (column, tokens) => {
      const found = isRunning ? lastOf(column) : worked ? tokens / worked : null;
      return found === null ? "" : `${short(found)} a second`;
    };
    /** @type {([string, string, string] | false | 0 | null)[]} */
    const found = [
      ["rows", number.format(done), total === null ? "" : done < total ? `of ${number.format(total)}` : "all of the input"],
      status.generations && ["generations", number.format(status.generations), done ? `${short(status.generations / done)} a row` : ""],
      ["answered", number.format(ok), percent(ok, done)],
      ["failed", number.format(failed), failed ? percent(failed, done) : ""],
      scorers.length && ["unscored", number.format(scores.unscored), percent(scores.unscored, done)],
      pending && ["left", number.format(pending), left],
      rate !== null && ["rows/s", short(rate), isRunning ? over && `${over} so far` : over],
      status.completion_tokens && ["tokens written", shortCount(status.completion_tokens), perSecond("completion_tokens_per_s", status.completion_tokens)],
      ["tokens read", shortCount(status.prompt_tokens), perSecond("prompt_tokens_per_s", status.prompt_tokens)],
    ];
    for (const [what, spent, limit] of status.budgets.map(budgetOf)) found.push([`budget: ${what}`, spent, `of ${limit}`]);
    if (status.engine_restarts) found.push(["engine restarts", number.format(status.engine_restarts), ""]);
    return found.flatMap((fact) => (fact ? [fact] : []));
  }

  // The time with the engine up, as `run` says it; with loading, if a start was killed.
  function workedFor() {
    const wasKilled = status.starts.some((start) => start.seconds === null);
    return wasKilled ? metrics?.seconds.at(-1) ?? 0 : status.starts.reduce((sum, start) => sum + Number(start.seconds), 0);
  }

  /**
   * @param {string} column
   * @returns {number | null}
   */
  const lastOf = (column) => metrics?.[column]?.findLast((value) => value !== null) ?? null;

  // The parts that depend on both the status and the metrics.
  function draw() {
    if (!status) return;
    byId("facts").replaceChildren(...facts().map(([name, value, below]) => {
      const box = make("div", name === "failed" && value !== "0" ? "bad" : "");
      const shown = make("dd", "", value);
      shown.append(make("small", "", below));
      box.append(make("dt", "", name), shown);
      return box;
    }));
    const happened = metrics ? marks(metrics) : [];
    if (!metrics || !isNew("charts", [metrics.at, happened, status.state])) return;
    const axis = axisOf(metrics), loads = axis.loads.filter(([from, to]) => axis.share(to) - axis.share(from) > 0.01);
    drawCharts(byId("charts"), metrics, happened, axis);
    const starts = new Set(metrics.start).size;
    byId("charts-note").textContent = metrics.at.length < 2
      ? (status.state === "running" ? "Nothing has been measured yet: that begins when the model is loaded." : "Too short for a chart.")
      : [
        "Over the time at work.",
        loads.length && `${loads.length > 1 ? "A" : "The"} grey band is the loading of the model, which took ${
          loads.map(([from, to]) => duration(to - from)).join(", ")}.`,
        starts > 1 && "A broken line is a new start; the time between two is cut out.",
        happened.length && "A red line is an event of the engine: point at it, or see the list below.",
      ].filter(Boolean).join(" ");
  }

  /** @param {Metrics} metrics */
  function marks(metrics) {
    return status.starts.flatMap((start) => start.events.flatMap(({ at, text }) => {
      const seconds = placeOf(at, start.number, metrics);
      return seconds === null ? [] : [{ seconds, text }];
    }));
  }

  function drawFailures() {
    const first = new Map((status.failures ?? []).map((failure) => [failure.kind, failure]));
    const counts = Object.entries(status.failed_by_kind).sort(([, a], [, b]) => b - a);
    if (!isNew("failures", [counts, status.failures])) return;
    const held = focused()?.dataset.kind;
    byId("failures").hidden = !counts.length;
    byId("failure-list").replaceChildren(...counts.map(([kind, count]) => {
      const { message = "", index = null } = first.get(kind) ?? {}, item = make("li");
      const cell = button("", () => rows.set({ outcome: `kind:${kind}`, row: index }), "cell");
      cell.dataset.kind = kind;
      cell.append(make("span", "name", kind), make("span", "value", number.format(count)), meter(count / counts[0][1]));
      item.append(cell, make("p", "caption", message));
      return item;
    }));
    if (held) focusOn(byId("failure-list"), `[data-kind="${CSS.escape(held)}"]`);
  }

  function drawEngine() {
    const { starts } = status;
    if (!isNew("engine", [starts, status.state])) return;
    byId("starts").replaceChildren(table(
      ["", "began (UTC)", "end", "time at work", "engine restarts"],
      starts.map((start) => [
        `start ${start.number}`, when(start.started_at, { seconds: true }).replace(" UTC", ""), endOf(start),
        start.seconds ? clock(start.seconds) : "–", String(start.engine_restarts),
      ]).reverse(), "plain",
    ));
    /** @type {Worker[]} */
    const workers = starts.at(-1)?.workers ?? [];
    const now = (/** @type {Worker} */ { state, left_at: left }) => (status.state === "running" || left ? state : "ended");
    byId("workers").replaceChildren(...(workers.length ? [table(
      ["", "node", "GPUs", "state", "joined (UTC)", "left (UTC)", "rows", "rows/s", "in flight", "restarts", "of its engine"],
      workers.map((one) => [
        `worker ${one.worker}`, one.node ?? "none", one.gpus.join(", ") || "–", now(one),
        ...[one.joined_at, one.left_at].map((at) => (at ? when(at, { seconds: true }).replace(" UTC", "") : "–")),
        number.format(one.rows), short(one.rows_per_s), String(one.in_flight), String(one.restarts),
        String(one.engine_restarts),
      ]), "plain",
    )] : []));
    const events = starts.flatMap(({ number, events }) => events.map((event) => ({ ...event, number }))).reverse();
    byId("events").hidden = !events.length;
    byId("events-note").textContent = events.length
      ? "What happened to the engine, the newest first; of each start the newest 20 events."
      : "Nothing has happened to the engine.";
    byId("events").replaceChildren(...events.map(({ at, text, number }) => {
      const item = make("li");
      const time = make("time", "", `start ${number}${at ? `, ${timeOf(at)}` : ""}`);
      if (at) time.dateTime = at;
      item.append(time, make("span", "", text));
      return item;
    }));
  }

  /** @param {Start} start */
  function endOf(start) {
    if (start.ended_at === null) {
      const isLast = start.number === status.starts.length;
      return isLast && status.state === "running" ? "still running" : "killed";
    }
    /** @type {Record<number, string>} */
    const words = {
      0: "ended, no row failed", 1: "stopped", 2: "an error in the job", 3: "ended, some rows failed",
      130: "interrupted", 143: "interrupted",
    };
    return words[start.exit ?? -1] ?? `exit code ${start.exit}`;
  }

  // ---- where the answers come from, and the other runs, to compare with

  async function loadAbout() {
    /** @type {About} */
    const { origin, prompt, job_toml: job, steps } = await fetchJson(apiUrl(run, "/about"));
    byId("origin").replaceChildren(...terms(origin));
    byId("prompt").replaceChildren(...terms(prompt));
    byId("job").textContent = job;
    drawSteps(steps);
  }

  async function offerRuns() {
    /** @type {ListedRun[]} */
    const runs = await fetchJson("/api/runs"), others = runs.filter((one) => one.run !== run);
    byId("all-runs").hidden = !others.length;
    byId("compare").hidden = !others.length;
    const select = byId("other", HTMLSelectElement);
    select.append(...others.map((one) => new Option(one.name, one.run)));
    select.addEventListener("change", () => {
      if (select.value) location.assign(`/compare?${new URLSearchParams({ a: run, b: select.value })}`);
    });
  }

  if (held) {
    drawStatus(held.status);
    loadMetrics();
  } else {
    document.addEventListener("visibilitychange", appear);
    look();
    offerRuns().catch(() => {}); // the page says elsewhere that the server does not answer
  }
  loadAbout().catch(() => {});
}
