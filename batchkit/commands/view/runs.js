// The list of runs.
import { budgetOf, duration, number, percent, when } from "./format.js";
import { button, byId, focused, focusOn, link, listenToKeys, make, meter, note, stateBadge, table } from "./elements.js";
import { fetchJson, runUrl } from "./data.js";
/** @import { Cell } from "./elements.js" */
/** @import { ListedRun } from "./types.js" */

export function openRuns() {
  const AGAIN_MS = 3000;
  /** @type {Record<string, (run: ListedRun) => string | number | null | undefined>} */
  const COLUMNS = {
    name: ({ name }) => name.toLowerCase(), state: ({ state }) => state, done: (run) => shareDone(run),
    left: ({ eta_s: seconds }) => seconds, failed: ({ failed }) => failed, score: ({ score }) => score?.mean,
    budget: ({ budgets = [] }) => (budgets.length ? Math.max(...budgets.map(({ spent, limit }) => Number(spent) / limit)) : null),
    "last started": ({ started_at: time }) => time,
  };
  const search = byId("search", HTMLInputElement), list = byId("runs");
  /** @type {ListedRun[] | null} */
  let runs = null;
  let shown = "", timer = 0, by = "", sign = 1; // by: a column; "": the server's order
  const chosen = new Set();

  async function load() {
    clearTimeout(timer);
    if (document.hidden) return;
    try {
      runs = await fetchJson("/api/runs");
      note("lost", "");
    } catch {
      note("lost", "The server does not answer: the page shows what was known last, and tries again.");
    }
    draw();
    timer = setTimeout(load, AGAIN_MS);
  }

  function draw() {
    if (!runs) return;
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = runs.filter((run) => {
      const text = [run.name, run.model, run.kind, run.state, run.folder].join("\n").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    byId("count").textContent = found.length === runs.length
      ? `${number.format(runs.length)} runs`
      : `${number.format(found.length)} of ${number.format(runs.length)} runs`;
    byId("folder").textContent = parentOf(runs);
    const now = JSON.stringify([found, by, sign]);
    if (now === shown) return; // nothing jumps under the pointer
    shown = now;
    const held = focused()?.dataset.key;
    const nothing = make("p", "empty", runs.length ? "No run passes this search." : "No run has started here yet.");
    list.replaceChildren(found.length ? table(heads(), ordered(found).map(cells), "runs") : nothing);
    list.querySelectorAll("thead th").forEach((head, place) => {
      if (by && Object.keys(COLUMNS)[place] === by) head.ariaSort = sign > 0 ? "ascending" : "descending";
    });
    if (held) focusOn(list, `[data-key="${CSS.escape(held)}"]`);
    allow();
  }

  // A column that is chosen again turns around; numbers and times begin with the largest.
  function heads() {
    return [...Object.keys(COLUMNS).map((name) => {
      const head = button(name, () => {
        sign = by === name ? -sign : ["name", "state", "left"].includes(name) ? 1 : -1;
        by = name;
        draw();
      });
      head.dataset.key = `sort ${name}`;
      return head;
    }), "compare"];
  }

  /**
   * Runs without a value are last.
   * @param {ListedRun[]} found
   */
  function ordered(found) {
    if (!by) return found;
    const keyed = found.map((run) => ({ key: COLUMNS[by](run) ?? null, run }));
    return keyed.sort(({ key: a }, { key: b }) => {
      if (a === null || b === null) return Number(a === null) - Number(b === null);
      return a < b ? -sign : a > b ? sign : 0;
    }).map(({ run }) => run);
  }

  /** @param {ListedRun} run */
  const shareDone = ({ ok, failed, total }) => (total ? (ok + failed) / total : null);

  /** @param {ListedRun[]} runs */
  function parentOf(runs) {
    const folders = new Set(runs.map(({ folder }) => folder.replace(/\/[^/]*$/, "")));
    return folders.size === 1 ? [...folders][0] : "";
  }

  /**
   * @param {ListedRun} run
   * @returns {Cell[]}
   */
  function cells(run) {
    const name = make("div"), open = link(run.name, runUrl(run.run));
    const folder = run.folder.replace(/^.*\//, "");
    open.dataset.key = run.run;
    const below = [folder !== run.name && folder, run.model, run.kind].filter(Boolean);
    name.append(open, make("small", "", run.error ?? below.join(" · ")));
    const state = run.error ? make("span", "state failed-to-start", "can't be read") : stateBadge(run.state);
    if (run.error) return [name, state, ...Array(7).fill("")];
    const done = run.ok + run.failed, share = shareDone(run), progress = make("div");
    progress.append(make("div", "value", share === null
      ? `${number.format(done)} rows` : `${Math.floor(100 * share)} % of ${number.format(Number(run.total))}`));
    if (run.total) progress.append(meter(run.ok / run.total, run.failed / run.total));
    const failed = make("span", run.failed ? "failed" : "zero", number.format(run.failed));
    failed.append(make("span", "narrow", " failed"));
    failed.title = run.failed ? percent(run.failed, done) : "";
    const choice = make("input");
    choice.type = "checkbox";
    choice.ariaLabel = `Compare ${run.name}`;
    choice.dataset.key = `compare ${run.run}`;
    choice.checked = chosen.has(run.run);
    choice.addEventListener("change", () => {
      if (choice.checked) chosen.add(run.run);
      else chosen.delete(run.run);
      allow();
    });
    const left = make("span", "", run.eta_s === null ? "" : duration(run.eta_s)), score = make("div", "", run.score?.mean.toFixed(2));
    left.append(make("span", "narrow", " left"));
    if (run.score) score.append(make("small", "", run.score.head));
    const budgets = make("div", "budget");
    budgets.append(...run.budgets.map((one) => {
      const [what, spent, limit] = budgetOf(one);
      return make("div", "", `${what} ${spent} of ${limit}`);
    }));
    return [name, state, progress, run.eta_s === null ? "" : left, failed, run.score ? score : "", run.budgets.length ? budgets : "", when(run.started_at), choice];
  }

  function allow() {
    byId("compare", HTMLButtonElement).disabled = (runs ?? []).filter(({ run }) => chosen.has(run)).length !== 2;
  }

  /** @param {number} by */
  function step(by) {
    const links = /** @type {HTMLElement[]} */ ([...list.querySelectorAll("th a")]);
    const at = links.findIndex((one) => one === document.activeElement);
    links[Math.min(links.length - 1, Math.max(0, at + by))]?.focus();
  }

  byId("compare").addEventListener("click", () => {
    // The older one is the baseline.
    const [b, a] = (runs ?? []).map(({ run }) => run).filter((run) => chosen.has(run));
    location.assign(`/compare?${new URLSearchParams({ a, b })}`);
  });
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  search.addEventListener("input", draw);
  listenToKeys({
    list,
    help: [
      ["j k", "next, previous run"], ["Enter", "open it"], ["/", "search"], ["Esc", "leave the search; again: clear it"],
    ],
    clear: () => {
      search.value = "";
      draw();
    },
    onKey: ({ key }) => {
      if (key === "j" || key === "k") step(key === "j" ? 1 : -1);
      return key === "j" || key === "k";
    },
  });
  document.addEventListener("visibilitychange", load);
  load();
}
