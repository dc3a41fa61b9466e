// The list of runs.
function openRuns() {
  const AGAIN_MS = 3000;
  const HEADS = ["", "state", "rows done", "failed", "last started", "compare"];
  const search = byId("search"), list = byId("runs");
  let runs = null, shown = "", timer = null;
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
    if (runs) draw();
    timer = setTimeout(load, AGAIN_MS);
  }

  function draw() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = runs.filter((run) => {
      const text = [run.name, run.model, run.kind, run.state, run.folder].join("\n").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    byId("count").textContent = found.length === runs.length
      ? `${number.format(runs.length)} runs`
      : `${number.format(found.length)} of ${number.format(runs.length)} runs`;
    byId("folder").textContent = parentOf(runs);
    const now = JSON.stringify(found);
    if (now === shown) return; // nothing jumps under the pointer
    shown = now;
    const held = document.activeElement?.dataset.key;
    const nothing = make("p", "empty", runs.length ? "No run passes this search." : "No run has started here yet.");
    list.replaceChildren(found.length ? table(HEADS, found.map(cells), "runs") : nothing);
    if (held) list.querySelector(`[data-key="${CSS.escape(held)}"]`)?.focus();
    allow();
  }

  function parentOf(runs) {
    const folders = new Set(runs.map(({ folder }) => folder.replace(/\/[^/]*$/, "")));
    return folders.size === 1 ? [...folders][0] : "";
  }

  function cells(run) {
    const name = make("div"), open = link(run.name, runUrl(run.run));
    const folder = run.folder.split("/").at(-1);
    open.dataset.key = run.run;
    const below = [folder !== run.name && folder, run.model, run.kind].filter(Boolean);
    name.append(open, make("small", "", run.error ?? below.join(" · ")));
    const state = run.error ? make("span", "state failed-to-start", "can't be read") : stateBadge(run.state);
    if (run.error) return [name, state, "", "", "", ""];
    const done = run.ok + run.failed, total = run.total ?? done, progress = make("div");
    progress.append(make("div", "value", run.total === null || done === total
      ? number.format(done) : `${number.format(done)} of ${number.format(total)}`));
    if (total) progress.append(meter(run.ok / total, run.failed / total));
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
    return [name, state, progress, failed, when(run.started_at), choice];
  }

  function allow() {
    byId("compare").disabled = runs.filter(({ run }) => chosen.has(run)).length !== 2;
  }

  function step(by) {
    const links = [...list.querySelectorAll("th a")], at = links.indexOf(document.activeElement);
    links[Math.min(links.length - 1, Math.max(0, at + by))]?.focus();
  }

  byId("compare").addEventListener("click", () => {
    // The older one is the baseline.
    const [b, a] = runs.map(({ run }) => run).filter((run) => chosen.has(run));
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
