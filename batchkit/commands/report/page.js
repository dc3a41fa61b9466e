// After elements.js, in one script.
(() => {
  const ITEM_PX = 68;
  const AHEAD = 6; // items rendered beyond what is seen
  const data = JSON.parse(byId("data").textContent);
  const pictures = JSON.parse(byId("pictures").textContent);
  const { rows, fields, question, scorers, total } = data;
  const scorerOf = new Map(scorers.map((scorer) => [scorer.name, scorer]));
  const hasPictures = rows.some((row) => row.images);
  const list = byId("list"), space = byId("space"), detail = byId("detail");
  const controls = ["search", "group", "outcome", "scorer", "low", "high", "order"]
    .map(byId).filter(Boolean);
  const value = (id) => byId(id)?.value ?? "";
  let shown = []; // rows that pass the filters, in their order
  let at = -1; // the selected one's place in it

  // ---- elements

  function picture(number) {
    const found = pictures[number];
    if (!found?.src?.startsWith("data:image/webp;base64,")) return null;
    const image = make("img");
    image.src = found.src;
    image.width = found.w;
    image.height = found.h;
    image.alt = found.name;
    image.decoding = "async";
    return image;
  }

  // ---- what a row says

  const asked = (row) => (question === null ? null : row.fields[question]);
  const scoreOf = (row, name) => {
    const score = row.scores?.[name];
    return typeof score === "number" ? score * scorerOf.get(name).scale : null;
  };
  const isScored = (row) => Object.values(row.scores ?? {}).some((score) => score !== null);
  const shownScore = (score) => (score === null ? "–" : String(Math.round(score * 100) / 100));

  function textOf(row) {
    row.words ??= [row.id, row.group, row.kind, row.error, row.reference, row.prediction, row.text,
      ...(row.steps ?? []).map((step) => step.text), ...row.fields].filter(Boolean).join("\n").toLowerCase();
    return row.words;
  }

  // ---- filters

  const outcomes = {
    "": () => true,
    answered: (row) => row.ok,
    failed: (row) => !row.ok,
    unscored: (row) => row.ok && !isScored(row),
    cut: (row) => row.finish === "length",
  };

  // The first row is selected then; with stay, the one that was, if it is still there.
  function filter({ stay = false } = {}) {
    const words = value("search").toLowerCase().split(/\s+/).filter(Boolean);
    const group = value("group"), outcome = value("outcome"), scorer = value("scorer");
    const low = value("low") === "" ? -Infinity : Number(value("low"));
    const high = value("high") === "" ? Infinity : Number(value("high"));
    const passes = outcome.startsWith("kind:")
      ? (row) => row.kind === outcome.slice(5)
      : outcomes[outcome] ?? outcomes[""];
    const inRange = (row) => {
      const score = scoreOf(row, scorer);
      return score !== null && score >= low - 1e-9 && score <= high + 1e-9;
    };
    const before = stay ? shown[at] : null;
    shown = rows.filter((row) => (!group || row.group === group) && passes(row)
      && (!scorer || inRange(row)) && words.every((word) => textOf(row).includes(word)));
    sort(value("order"));
    for (const id of ["low", "high"]) if (byId(id)) byId(id).disabled = !scorer;
    count();
    space.style.height = `${shown.length * ITEM_PX}px`;
    const kept = before ? shown.indexOf(before) : -1;
    if (kept < 0) list.scrollTop = 0;
    select(kept >= 0 ? kept : 0);
  }

  function sort(order) {
    const [way, name] = order.split(":");
    const keys = {
      up: (row) => scoreOf(row, name),
      down: (row) => scoreOf(row, name),
      slow: (row) => row.latency,
      long: (row) => row.tokens?.[1],
    };
    const key = keys[way];
    if (!key || (name && !scorerOf.has(name))) return;
    const sign = way === "up" ? 1 : -1;
    const keyed = shown.map((row) => [key(row) ?? null, row]);
    keyed.sort(([a, x], [b, y]) => // what has no value comes last, both ways
      (a === null) - (b === null) || (a === b ? x.i - y.i : sign * (a - b)));
    shown = keyed.map(([, row]) => row);
  }

  function count() {
    const held = rows.length === total ? "" : ` (of ${number.format(total)} in the run)`;
    const all = number.format(rows.length);
    byId("count").textContent = shown.length === rows.length
      ? `${all} rows${held}`
      : `${number.format(shown.length)} of ${all} rows${held}`;
  }

  // ---- the list: only what is seen is in the page

  function drawList() {
    if (!shown.length) {
      space.replaceChildren(make("p", "empty", "No row passes these filters."));
      list.removeAttribute("aria-activedescendant");
      return;
    }
    const first = Math.max(0, Math.floor(list.scrollTop / ITEM_PX) - AHEAD);
    const last = Math.min(shown.length,
      Math.ceil((list.scrollTop + list.clientHeight) / ITEM_PX) + AHEAD);
    const items = [];
    for (let place = first; place < last; place++) items.push(item(shown[place], place));
    space.replaceChildren(...items);
    list.setAttribute("aria-activedescendant", `row-${shown[at]?.i}`);
  }

  function item(row, place) {
    const element = make("div", "item");
    element.id = `row-${row.i}`;
    element.style.top = `${place * ITEM_PX}px`;
    element.dataset.place = place;
    element.setAttribute("role", "option");
    element.setAttribute("aria-selected", place === at);
    element.setAttribute("aria-posinset", place + 1);
    element.setAttribute("aria-setsize", shown.length);
    if (hasPictures) {
      const image = row.images ? picture(row.images[0]) : null;
      if (image) image.alt = "";
      element.append(image ?? make("div", "blank"));
    }
    element.append(make("div", "what", oneLine(asked(row)) || oneLine(row.text) || `row ${row.i}`));
    const under = make("div", "under");
    if (!row.ok) under.append(make("span", "failed", oneLine(row.error) || row.kind));
    else under.textContent = oneLine(row.prediction ?? row.text) || "(no answer)";
    element.append(under);
    if (!row.ok) element.append(make("div", "score failed", row.kind));
    else if (scorers.length) {
      const name = value("order").split(":")[1] || value("scorer")
        || scorers.find((scorer) => scoreOf(row, scorer.name) !== null)?.name;
      const score = name ? scoreOf(row, name) : null;
      const label = make("div", score === null ? "score none" : "score", shownScore(score));
      if (name) label.title = scorerOf.get(name)?.head ?? "";
      element.append(label);
    }
    element.append(make("div", "id", row.id));
    return element;
  }

  // ---- one row

  function select(place, into = true) {
    at = shown.length ? Math.min(shown.length - 1, Math.max(0, place)) : -1;
    if (into && at >= 0) {
      const top = at * ITEM_PX;
      if (top < list.scrollTop) list.scrollTop = top;
      else if (top + ITEM_PX > list.scrollTop + list.clientHeight) {
        list.scrollTop = top + ITEM_PX - list.clientHeight;
      }
    }
    drawList();
    drawDetail();
    remember();
  }

  function drawDetail() {
    const row = shown[at];
    detail.scrollTop = 0;
    if (!row) {
      detail.replaceChildren(make("p", "empty", "Nothing to show."));
      return;
    }
    detail.replaceChildren(...[
      headOf(row), errorOf(row), picturesOf(row), questionOf(row), pairOf(row), scoresOf(row),
      ...answerOf(row), reasoningOf(row), ...(row.steps ?? []).map(stepOf), fieldsOf(row), promptOf(row),
    ].filter(Boolean));
    highlight(detail, value("search"));
  }

  function headOf(row) {
    const head = make("header", "detail-head");
    const parts = [row.group, row.latency === undefined ? null : `${row.latency} s`,
      row.tokens ? `${number.format(row.tokens[0])} + ${number.format(row.tokens[1])} tokens` : null,
      row.finish === "length" ? "cut at max_tokens" : null,
      row.cut ? `prompt cut by ${number.format(row.cut)} tokens` : null,
      row.attempt > 1 ? `attempt ${row.attempt}` : null];
    head.append(make("strong", "", row.id));
    for (const part of parts.filter(Boolean)) head.append(make("span", "", part));
    const nav = make("nav");
    nav.setAttribute("aria-label", "Rows");
    nav.append(make("span", "", `${number.format(at + 1)} of ${number.format(shown.length)}\u2002`));
    for (const [sign, step, name] of [["↑", -1, "Previous row"], ["↓", 1, "Next row"]]) {
      const button = make("button", "", sign);
      button.type = "button";
      button.setAttribute("aria-label", name);
      button.disabled = !shown[at + step];
      button.addEventListener("click", () => {
        select(at + step);
        [...detail.querySelectorAll("nav button")][step < 0 ? 0 : 1]?.focus();
      });
      nav.append(button);
    }
    head.append(nav);
    return head;
  }

  function errorOf(row) {
    if (row.ok) return null;
    return make("p", "error", `${row.kind}\n${row.error ?? ""}`.trim());
  }

  function picturesOf(row) {
    if (!row.images) return null;
    const box = make("div", "pictures");
    for (const number of row.images) {
      const image = picture(number);
      if (!image && row.kind === "media") continue; // the error says it
      if (!image) {
        const { name, problem } = pictures[number] ?? { name: "?", problem: "missing" };
        const message = problem.startsWith(name) ? problem : `${name}: ${problem}`;
        box.append(make("p", "missing", message));
        continue;
      }
      const button = make("button");
      button.type = "button";
      button.title = pictures[number].name;
      button.setAttribute("aria-label", `Image ${pictures[number].name}, larger`);
      button.append(image);
      button.addEventListener("click", () => enlarge(number));
      box.append(button);
    }
    return box.childElementCount ? box : null;
  }

  function questionOf(row) {
    const text = asked(row);
    if (!text) return null;
    const box = make("div");
    box.append(make("h3", "", fields[question]));
    box.append(make("p", text.length > 500 ? "question long" : "question", text));
    return box;
  }

  function pairOf(row) {
    if (!row.ok || (row.reference === undefined && row.prediction === undefined)) {
      return row.reference === undefined ? null : titled("Reference", exact(row.reference));
    }
    const pair = make("div", "pair");
    pair.append(titled("Reference", exact(row.reference, row.prediction)));
    pair.append(titled("Prediction", exact(row.prediction, row.reference)));
    return pair;
  }

  function scoresOf(row) {
    if (!row.scores || !row.ok) return null;
    const box = make("dl", "values");
    for (const { name, head, scale } of scorers) {
      if (!(name in row.scores)) continue;
      const score = scoreOf(row, name);
      const cell = make("div");
      cell.append(make("dt", "", head));
      cell.append(make("dd", "", score === null ? "unscored" : shownScore(score)));
      if (score !== null) cell.append(meter(score / (scale === 1 ? 10 : 100)));
      box.append(cell);
    }
    if (row.unscored) {
      const why = make("div");
      why.append(make("dt", "", "unscored"), make("dd", "", row.unscored));
      box.append(why);
    }
    return box.childElementCount ? box : null;
  }

  function answerOf(row) {
    if (!row.ok) return [];
    const text = make("div", row.text ? "full" : "full nothing", row.text ?? "(none)");
    return [make("h3", "", "Whole answer"), text];
  }

  function reasoningOf(row) {
    if (!row.reasoning) return null;
    const box = make("details");
    box.append(make("summary", "", "Reasoning"), make("div", "prompt", row.reasoning));
    return box;
  }

  function stepOf(step) {
    if (step.more) return make("p", "caption", `and ${number.format(step.more)} generations more`);
    const box = make("section", "step");
    const facts = [step.skipped ? "skipped" : null,
      step.prediction === undefined ? null : `prediction: ${step.prediction}`,
      ...Object.entries(step.scores ?? {}).map(([name, score]) => `${name} ${shownScore(score)}`),
      step.tokens ? `${number.format(step.tokens[0])} + ${number.format(step.tokens[1])} tokens` : null];
    const head = make("header", "detail-head");
    head.append(make("strong", "", step.name));
    for (const fact of facts.filter(Boolean)) head.append(make("span", "", fact));
    box.append(head);
    if (step.error) box.append(make("p", "error", step.error));
    else if (!step.skipped) box.append(make("div", step.text ? "full" : "full nothing", step.text || "(none)"));
    if (step.reasoning) box.append(reasoningOf(step));
    return box;
  }

  function fieldsOf(row) {
    const names = fields.map((name, n) => [name, row.fields[n], n])
      .filter(([, text, n]) => text !== null && n !== question);
    if (!names.length) return null;
    const box = make("details"), table = make("dl", "fields");
    box.open = fieldsOf.open ?? false;
    box.addEventListener("toggle", () => { fieldsOf.open = box.open; });
    box.append(make("summary", "", `Row ${row.i}: ${names.length} fields`), table);
    for (const [name, text] of names) {
      const line = make("div");
      line.append(make("dt", "", name), make("dd", "", text));
      table.append(line);
    }
    return box;
  }

  function promptOf(row) {
    if (!row.prompt) return null;
    const box = make("details");
    box.append(make("summary", "", "Prompt, as the engine saw it"), make("div", "prompt", row.prompt));
    return box;
  }

  function enlarge(number) {
    const box = byId("lightbox"), found = pictures[number];
    const image = box.querySelector("img");
    image.src = found.src;
    image.alt = found.name;
    box.showModal();
  }

  // ---- the address keeps what is shown, so that a reload or a bookmark finds it again

  function remember() {
    const state = new URLSearchParams();
    for (const control of controls) if (control.value) state.set(control.id, control.value);
    if (at > 0) state.set("row", shown[at].i);
    try {
      history.replaceState(null, "", `#${state}`);
    } catch { /* some browsers refuse it for files */ }
  }

  function recall() {
    const state = new URLSearchParams(location.hash.slice(1));
    for (const control of controls) {
      const found = state.get(control.id);
      if (found === null) continue;
      control.value = found;
      if (control.selectedIndex === -1) control.selectedIndex = 0;
    }
    filter();
    const place = shown.findIndex((row) => String(row.i) === state.get("row"));
    if (place > 0) select(place);
  }

  // ---- events

  function set(changes) {
    for (const control of controls) control.value = changes[control.id] ?? "";
    filter();
  }

  function clear() {
    for (const control of controls) control.value = "";
    filter({ stay: true });
  }

  let timer = 0;
  byId("search").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => filter(), 120);
  });
  for (const control of controls) {
    if (control.id !== "search") control.addEventListener("input", () => filter());
  }
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filters").addEventListener("reset", (event) => {
    event.preventDefault();
    clear();
  });
  byId("help").addEventListener("click", () => byId("keys").showModal());
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  }
  for (const button of document.querySelectorAll("[data-scorer], [data-outcome]")) {
    button.addEventListener("click", () => {
      const { scorer, outcome, group } = button.dataset;
      set({ group, outcome, scorer, order: scorer ? `up:${scorer}` : "" });
      byId("rows").scrollIntoView();
      list.focus({ preventScroll: true });
    });
  }
  let waiting = false;
  list.addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; drawList(); });
  });
  list.addEventListener("click", (event) => {
    const found = event.target.closest(".item");
    if (found) select(Number(found.dataset.place), false);
  });
  new ResizeObserver(drawList).observe(list);

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (document.querySelector("dialog[open]")) return;
    const typing = event.target.closest("input, select, textarea");
    if (event.key === "Escape") {
      if (typing) list.focus();
      else clear();
      return;
    }
    if (typing) {
      if (typing.id === "search" && ["Enter", "ArrowDown"].includes(event.key)) {
        event.preventDefault();
        clearTimeout(timer);
        filter();
        list.focus();
      }
      return;
    }
    const page = Math.max(1, Math.floor(list.clientHeight / ITEM_PX) - 1);
    const inList = {
      ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page,
      Home: 0, End: shown.length - 1,
    };
    const anywhere = { j: at + 1, k: at - 1 };
    if (event.key in anywhere) select(anywhere[event.key]);
    else if (event.target === list && event.key in inList) select(inList[event.key]);
    else if (event.key === "/") {
      byId("search").focus();
      byId("search").select();
    } else if (event.key === "?") byId("keys").showModal();
    else if (event.key === "i" && shown[at]?.images) {
      const first = shown[at].images.find((number) => pictures[number]?.src);
      if (first !== undefined) enlarge(first);
    } else return;
    event.preventDefault();
  });

  recall();
})();
