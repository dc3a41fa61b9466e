// Two runs side by side: their scores, totals, and the rows that they answered in another way. A file has
// the scores, of several runs.
import { number, shortCount, shownScore } from "./format.js";
import {
  byId, drawPager, exact, link, listenToKeys, make, note, stateBadge, table, terms, titled,
} from "./elements.js";
import { apiUrl, besideAnswers, fetchJson, held, reasonOf, runUrl } from "./data.js";
import { drawDeltas } from "./scores.js";
import { enlargeable } from "./row.js";
/** @import { Comparison, Pair, PairPage, RowLine, Status } from "./types.js" */

/** @typedef {{ side: "a" | "b", index: number, kept: string | null, box: HTMLElement }} Question */

export function openComparison() {
  const LIMIT = 20;
  const AGAIN_MS = 200; // while the server has not read all of the logs
  const state = new URLSearchParams(location.search);
  const [a, b] = ["a", "b"].map((side) => state.get(side) ?? "");
  const only = byId("only", HTMLSelectElement), pairs = byId("pairs");
  const lacking = (/** @type {"a" | "b"} */ side) => () => shown.filter((one) => one.side === side).map(({ index }) => index);
  const beside = { a: besideAnswers(a, lacking("a"), drawQuestions), b: besideAnswers(b, lacking("b"), drawQuestions) };
  /** @type {Question[]} */
  let shown = []; // one for each pair
  let offset = Number(state.get("offset")) || 0, total = 0;
  /** @type {{ a: Status, b: Status }} */
  let runs;
  /** @type {AbortController | null} */
  let asking = null;

  /** @param {Comparison} found */
  function drawComparison(found) {
    byId("notes").replaceChildren(...(found.warnings.length ? found.warnings : ["Nothing that decides the answers."])
      .map((text) => make("li", "", text)));
    byId("origins").replaceChildren(...terms(Object.entries(found.origins).map(([name, parts]) => [name, parts.join(", ")])));
    byId("method").textContent = found.method;
    drawDeltas(byId("deltas"), found, (scorer) => found.heads[scorer] ?? scorer);
  }

  async function loadRuns() {
    try {
      /** @type {Status[]} */
      const [before, after] = await Promise.all([fetchJson(apiUrl(a)), fetchJson(apiUrl(b))]);
      if (before.name === after.name) [before.name, after.name] = [a, b]; // one was moved aside by --fresh
      runs = { a: before, b: after };
    } catch (error) {
      note("problem", reasonOf(error));
      return;
    }
    byId("name").textContent = `${runs.b.name} against ${runs.a.name}`;
    document.title = `${runs.b.name} against ${runs.a.name} · batchkit view`;
    /** @param {string} head @param {"ok" | "failed" | "pending" | "prompt_tokens" | "completion_tokens" | "engine_restarts"} key */
    const counts = (head, key) => [head, ...[runs.a[key], runs.b[key]].map((count) => (count === null ? "?" : shortCount(count)))];
    byId("sides").replaceChildren(table(["", link(runs.a.name, runUrl(a)), link(runs.b.name, runUrl(b))], [
      ["state", stateBadge(runs.a.state), stateBadge(runs.b.state)],
      ["model", runs.a.model ?? "–", runs.b.model ?? "–"],
      counts("answered", "ok"), counts("failed", "failed"), counts("left", "pending"),
      counts("tokens read", "prompt_tokens"), counts("tokens written", "completion_tokens"),
      counts("engine restarts", "engine_restarts"),
    ], "plain"));
    fetchJson(`/api/comparison?${new URLSearchParams({ a, b })}`).then(drawComparison, (error) => note("problem", reasonOf(error)));
    await load();
  }

  async function load() {
    asking?.abort();
    asking = new AbortController();
    const { signal } = asking;
    const query = new URLSearchParams({ a, b, only: only.value, offset: `${offset}`, limit: `${LIMIT}` });
    history.replaceState(null, "", `/compare?${new URLSearchParams({ a, b, only: only.value, ...(offset ? { offset: `${offset}` } : {}) })}`);
    pairs.ariaBusy = "true";
    try {
      /** @type {PairPage} */
      const found = await fetchJson(`/api/compare?${query}`, { signal });
      if (signal.aborted) return;
      note("problem", "");
      draw(found);
      if (found.indexed < 1) setTimeout(load, AGAIN_MS);
    } catch (error) {
      if (signal.aborted) return;
      note("problem", reasonOf(error));
    }
    pairs.ariaBusy = "false";
  }

  /** @param {PairPage} page */
  function draw({ rows, counts, ...found }) {
    total = found.total;
    const read = found.indexed < 1 ? `; ${Math.floor(100 * found.indexed)} % of the logs is read` : "";
    byId("count").textContent = `${number.format(total)} rows${read}`;
    for (const option of only.options) {
      const count = counts[option.value];
      option.textContent = count === undefined ? option.value : `${option.value} (${number.format(count)})`;
    }
    shown = [];
    pairs.replaceChildren(...(rows.length ? rows.map(pairOf) : [make("p", "empty", `No row${only.value === "all" ? "" : ` is ${only.value}`}.`)]));
    drawPager(byId("pager"), { offset, limit: LIMIT, total, n: rows.length, go });
    drawQuestions();
    beside.a.ask();
    beside.b.ask();
  }

  /** @param {Pair} row */
  function pairOf(row) {
    const box = make("article", "two"), head = make("header", "detail-head"), pair = make("div", "pair");
    box.tabIndex = -1;
    box.ariaLabel = `Row ${row.id}`;
    head.append(make("strong", "", row.id), ...(row.group ? [make("span", "", row.group)] : []));
    const question = make("div", "asked"), one = row.a ?? row.b;
    if (one) shown.push({ side: row.a ? "a" : "b", index: one.index, kept: one.asked, box: question });
    pair.append(question, sideOf(row.a, row.b, a, runs.a), sideOf(row.b, row.a, b, runs.b));
    box.append(head, pair);
    return box;
  }

  // Question, first image and right answer, as far as they are known.
  function drawQuestions() {
    for (const { side, index, kept, box } of shown) {
      const { asked = kept, image, reference } = beside[side].of(index), url = `${apiUrl(side === "a" ? a : b)}/rows/${index}/images/0`;
      box.replaceChildren();
      if (asked) box.append(titled("Question", make("p", "", asked)));
      if (image) box.append(enlargeable({ src: image, large: url, name: "Image of the prompt" }));
      if (typeof reference === "string") box.append(titled("Right answer", exact(reference)));
    }
  }

  /** @param {RowLine | null} row @param {RowLine | null} other @param {string} key @param {Status} run */
  function sideOf(row, other, key, run) {
    const title = make("h3"), box = make("div");
    box.append(title);
    if (!row) {
      title.textContent = run.name;
      box.append(make("p", "exact nothing", "no record"));
      return box;
    }
    title.append(link(run.name, `${runUrl(key)}#row=${row.index}`), ...scoresOf(row, run));
    box.append(row.status === "ok" ? exact(row.text ?? "", other?.text) : make("p", "error", `${row.kind}\n${row.text ?? ""}`));
    return box;
  }

  /** @param {RowLine} row @param {Status} run */
  function scoresOf({ scores }, run) {
    return Object.entries(scores ?? {}).map(([name, score]) => {
      const scorer = run.scorers?.find((scorer) => scorer.name === name);
      return make("span", "figure", `${scorer?.head ?? name} ${shownScore(score, scorer)}`);
    });
  }

  /** @param {number} to */
  function go(to) {
    offset = to;
    load().then(() => pairs.scrollIntoView());
  }

  /** @param {number} by */
  function step(by) {
    const all = /** @type {HTMLElement[]} */ ([...pairs.querySelectorAll(".two")]);
    const at = all.findIndex((one) => one.contains(document.activeElement));
    all[Math.min(all.length - 1, Math.max(0, at + by))]?.focus();
  }

  if (held?.comparison) {
    const { runs: [baseline, ...others] } = held.comparison;
    byId("name").textContent = `${others.join(", ")} against ${baseline}`;
    for (const part of ["sides-section", "pairs-section"]) byId(part).hidden = true;
    drawComparison(held.comparison);
    return;
  }
  byId("all-runs").hidden = false;
  only.value = [...only.options].find(({ value }) => value === state.get("only"))?.value ?? "changed";
  only.addEventListener("input", () => {
    offset = 0;
    load();
  });
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("swap").addEventListener("click", () => location.assign(`/compare?${new URLSearchParams({ a: b, b: a })}`));
  listenToKeys({
    list: pairs,
    help: [["j k", "next, previous row"], ["n p", "next, previous page"]],
    clear: () => pairs.focus(),
    onKey: ({ key }) => {
      if (key === "j" || key === "k") step(key === "j" ? 1 : -1);
      else if (key === "n" && offset + LIMIT < total) go(offset + LIMIT);
      else if (key === "p" && offset) go(Math.max(0, offset - LIMIT));
      else return false;
      return true;
    },
  });
  loadRuns();
}
