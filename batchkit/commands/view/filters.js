import { byId } from "./elements.js";

// The filters and the order of the rows: their controls, and what is asked for.
const TYPING_MS = 200;
const CONTROLS = ["search", "group", "outcome", "scorer", "low", "high", "order"];
// changed() is called when other rows are wanted.
export function openFilters(changed) {
  const controls = CONTROLS.map(byId);
  let scorers = new Map(), typing = null;

  const values = () => Object.fromEntries(
    controls.filter(({ value }) => value).map(({ id, value }) => [id, value]));

  // What is not named is cleared.
  function put(wanted) {
    for (const control of controls) select(control, wanted[control.id] ?? "");
    allow();
  }

  function select(control, text) {
    control.value = text;
    if (control.tagName !== "SELECT" || control.value === text) return;
    const unlisted = new Option(text.replace("kind:", ""), text); // a later status lists it
    unlisted.dataset.unlisted = "";
    control.append(unlisted);
    control.value = text;
  }

  // A range needs a score; so does an order by score, which is by the first if none is chosen.
  function allow() {
    for (const id of ["low", "high"]) byId(id).disabled = !byId("scorer").value;
  }

  function query() {
    const { search, group, outcome = "", low, high, order = "", scorer } = values();
    const [sort, direction] = order.split(":");
    const chosen = scorer ?? (sort === "score" ? scorers.keys().next().value : undefined);
    const scale = scorers.get(chosen)?.scale ?? 1;
    const bound = (text) => (scorer && text ? Number(text) / scale : undefined);
    const asked = {
      text: search?.trim(), group, scorer: chosen, min: bound(low), max: bound(high), sort,
      order: direction, status: outcome.startsWith("kind:") ? "" : outcome,
      kind: outcome.startsWith("kind:") ? outcome.slice(5) : "",
    };
    return Object.fromEntries(Object.entries(asked).filter(([, given]) => given || given === 0));
  }

  // The choices that this run's status offers.
  function offer(status) {
    scorers = new Map((status.scorers ?? []).map((scorer) => [scorer.name, scorer]));
    const named = (names) => names.map((name) => [name, name]);
    fill(byId("group"), named(status.groups ?? []));
    byId("group-by").textContent = status.group_by ?? "Group";
    byId("group").parentElement.hidden = !status.groups?.length;
    fill(byId("scorer"), [...scorers.values()].map(({ name, head }) => [name, head]));
    byId("scores").hidden = byId("by-score").hidden = !scorers.size;
    const kinds = Object.keys(status.failed_by_kind);
    fill(byId("kinds"), kinds.map((kind) => [`kind:${kind}`, kind]));
    byId("kinds").hidden = !kinds.length;
    allow();
  }

  // A select keeps its first option, for all.
  function fill(box, options) {
    const names = JSON.stringify(options);
    if (box.dataset.names === names) return;
    box.dataset.names = names;
    const control = box.closest("select"), held = control.value;
    for (const unlisted of control.querySelectorAll("[data-unlisted]")) unlisted.remove();
    const first = box === control ? [control.options[0]] : [];
    box.replaceChildren(...first, ...options.map(([name, text]) => new Option(text, name)));
    select(control, held);
  }

  function clear() {
    put({});
    apply();
  }

  function apply() {
    clearTimeout(typing);
    allow();
    changed();
  }

  for (const control of controls) {
    control.addEventListener("input", () => {
      clearTimeout(typing);
      if (control.id === "search") typing = setTimeout(apply, TYPING_MS);
      else apply();
    });
  }
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filters").addEventListener("reset", (event) => {
    event.preventDefault();
    clear();
  });

  return {
    values, put, query, offer, clear, apply,
    scorers: () => scorers,
    scorer: () => scorers.get(query().scorer),
  };
}
