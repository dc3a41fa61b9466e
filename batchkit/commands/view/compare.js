// Two runs side by side: their scores, totals, and the rows that they answered in another way. A file has
// the scores, of several runs.
import { number, shortCount, shownScore } from "./format.js";
import {
  byId, drawPager, exact, link, listenToKeys, make, note, stateBadge, table, terms, titled,
} from "./elements.js";
import { apiUrl, besideAnswers, fetchJson, held, runUrl } from "./data.js";
import { drawDeltas } from "./scores.js";
import { enlargeable } from "./row.js";

export function openComparison() {
  const LIMIT = 20;
  const AGAIN_MS = 200; // while the server has not read all of the logs
  const state = new URLSearchParams(location.search);
  const [a, b] = ["a", "b"].map((side) => state.get(side) ?? "");
  const only = byId("only"), pairs = byId("pairs");
  const beside = Object.fromEntries(["a", "b"].map((side) => [side, besideAnswers(
    state.get(side), () => shown.filter((one) => one.side === side).map(({ index }) => index), drawQuestions)]));
  let shown = []; // the question of each pair: {side, index, box}
  let offset = Number(state.get("offset")) || 0, total = 0, runs = {}, asking = null;

  function drawComparison(found) {
    byId("notes").replaceChildren(...(found.warnings.length ? found.warnings : ["Nothing that decides the answers."])
      .map((text) => make("li", "", text)));
    byId("origins").replaceChildren(...terms(Object.entries(found.origins).map(([name, parts]) => [name, parts.join(", ")])));
    byId("method").textContent = found.method;
    drawDeltas(byId("deltas"), found, (scorer) => found.heads[scorer] ?? scorer);
  }

  async function loadRuns() {
    try {
      const [before, after] = await Promise.all([fetchJson(apiUrl(a)), fetchJson(apiUrl(b))]);
      if (before.name === after.name) [before.name, after.name] = [a, b]; // one was moved aside by --fresh
      runs = { a: before, b: after };
    } catch (error) {
      note("problem", error.message);
      return;
    }
    byId("name").textContent = `${runs.b.name} against ${runs.a.name}`;
    document.title = `${runs.b.name} against ${runs.a.name} · batchkit view`;
    const counts = (...names) => names.map(([head, key]) => [
      head, ...[runs.a, runs.b].map((run) => (run[key] === null ? "?" : shortCount(run[key]))),
    ]);
    const named = [[a, runs.a], [b, runs.b]].map(([key, run]) => link(run.name, runUrl(key)));
    byId("sides").replaceChildren(table(["", ...named], [
      ["state", stateBadge(runs.a.state), stateBadge(runs.b.state)],
      ["model", runs.a.model ?? "–", runs.b.model ?? "–"],
      ...counts(["answered", "ok"], ["failed", "failed"], ["left", "pending"],
        ["tokens read", "prompt_tokens"], ["tokens written", "completion_tokens"],
        ["engine restarts", "engine_restarts"]),
    ], "plain"));
    fetchJson(`/api/comparison?${new URLSearchParams({ a, b })}`).then(drawComparison, (error) => note("problem", error.message));
    await load();
  }

  async function load() {
    asking?.abort();
    asking = new AbortController();
    const { signal } = asking;
    const query = new URLSearchParams({ a, b, only: only.value, offset, limit: LIMIT });
    history.replaceState(null, "", `/compare?${new URLSearchParams({ a, b, only: only.value, ...(offset && { offset }) })}`);
    pairs.ariaBusy = "true";
    try {
      const found = await fetchJson(`/api/compare?${query}`, { signal });
      if (signal.aborted) return;
      note("problem", "");
      draw(found);
      if (found.indexed < 1) setTimeout(load, AGAIN_MS);
    } catch (error) {
      if (signal.aborted) return;
      note("problem", error.message);
    }
    pairs.ariaBusy = "false";
  }

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
    for (const side of Object.values(beside)) side.ask();
  }

  function pairOf(row) {
    const box = make("article", "two"), head = make("header", "detail-head"), pair = make("div", "pair");
    box.tabIndex = -1;
    box.ariaLabel = `Row ${row.id}`;
    head.append(make("strong", "", row.id), ...(row.group ? [make("span", "", row.group)] : []));
    const question = make("div", "asked"), side = row.a ? "a" : "b";
    shown.push({ side, index: row[side].index, kept: row[side].asked, box: question });
    pair.append(question, sideOf(row.a, row.b, a, runs.a), sideOf(row.b, row.a, b, runs.b));
    box.append(head, pair);
    return box;
  }

  // Question, first image and right answer, as far as they are known by now.
  function drawQuestions() {
    for (const { side, index, kept, box } of shown) {
      const { asked = kept, image, reference } = beside[side].of(index), url = `${apiUrl(state.get(side))}/rows/${index}/images/0`;
      box.replaceChildren(...[
        asked && titled("Question", make("p", "", asked)),
        image && enlargeable({ src: image, large: url, name: "Image of the prompt" }),
        typeof reference === "string" && titled("Right answer", exact(reference)),
      ].filter(Boolean));
    }
  }

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

  function scoresOf({ scores }, run) {
    return Object.entries(scores ?? {}).map(([name, score]) => {
      const scorer = run.scorers?.find((scorer) => scorer.name === name);
      return make("span", "figure", `${scorer?.head ?? name} ${shownScore(score, scorer)}`);
    });
  }

  function go(to) {
    offset = to;
    load().then(() => pairs.scrollIntoView());
  }

  function step(by) {
    const all = [...pairs.querySelectorAll(".two")], at = all.indexOf(document.activeElement.closest(".two"));
    const next = all[Math.min(all.length - 1, Math.max(0, at + by))];
    next?.focus();
  }

  if (held) {
    const { runs: [baseline, ...others] } = held.comparison;
    byId("name").textContent = `${others.join(", ")} against ${baseline}`;
    for (const part of ["sides-section", "pairs-section"]) byId(part).hidden = true;
    drawComparison(held.comparison);
    return;
  }
  byId("all-runs").hidden = false;
  only.value = [...only.options].some(({ value }) => value === state.get("only")) ? state.get("only") : "changed";
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
