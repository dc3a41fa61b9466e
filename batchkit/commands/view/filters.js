// The filters and the order of the rows: their controls, and the query that they make.
import { byId } from "./elements.js";
/** @import { Scorer, Status, Wanted } from "./types.js" */

const TYPING_MS = 200;
const SELECTS = ["group", "outcome", "scorer", "order"], INPUTS = ["search", "low", "high"];

/**
 * The parameters of /api/runs/{run}/rows for these values of the controls.
 * @param {Wanted} values @param {Map<string, Scorer>} scorers
 * @returns {Record<string, string>}
 */
export function queryOf({ search, group, outcome = "", low, high, order = "", scorer }, scorers) {
  const [sort, direction] = order.split(":");
  const chosen = scorer ?? (sort === "score" ? scorers.keys().next().value : undefined);
  const scale = scorers.get(chosen ?? "")?.scale ?? 1;
  const bound = (/** @type {string | undefined} */ text) => (scorer && text ? String(Number(text) / scale) : "");
  const [status, kind] = outcome.startsWith("kind:") ? ["", outcome.slice(5)] : [outcome, ""];
  const asked = {
    text: search?.trim(), group, scorer: chosen, min: bound(low), max: bound(high), sort, order: direction, status, kind,
  };
  return Object.fromEntries(Object.entries(asked).flatMap(([name, value]) => (value ? [[name, value]] : [])));
}

/**
 * Calls changed() when other rows are wanted.
 * @param {() => void} changed
 */
export function openFilters(changed) {
  const controls = [
    ...SELECTS.map((id) => byId(id, HTMLSelectElement)), ...INPUTS.map((id) => byId(id, HTMLInputElement)),
  ];
  const low = byId("low", HTMLInputElement), high = byId("high", HTMLInputElement);
  const group = byId("group", HTMLSelectElement), scorer = byId("scorer", HTMLSelectElement);
  const kinds = byId("kinds", HTMLOptGroupElement);
  /** @type {Map<string, Scorer>} */
  let scorers = new Map(), typing = 0;

  /** @returns {Wanted} */
  const values = () => Object.fromEntries(
    controls.filter(({ value }) => value).map(({ id, value }) => [id, value]));

  /**
   * Sets the controls; those that are not named are cleared.
   * @param {Record<string, string | null | undefined>} wanted
   */
  function put(wanted) {
    for (const control of controls) select(control, wanted[control.id] ?? "");
    allow();
  }

  /** @param {HTMLInputElement | HTMLSelectElement} control @param {string} text */
  function select(control, text) {
    control.value = text;
    if (control instanceof HTMLInputElement || control.value === text) return;
    const unlisted = new Option(text.replace("kind:", ""), text); // a later status lists it
    unlisted.dataset.unlisted = "";
    control.append(unlisted);
    control.value = text;
  }

  // A range needs a score; so does an order by score, which is by the first if none is chosen.
  function allow() {
    low.disabled = high.disabled = !scorer.value;
  }

  const query = () => queryOf(values(), scorers);

  /**
   * The choices of this run.
   * @param {Status} status
   */
  function offer(status) {
    scorers = new Map((status.scorers ?? []).map((scorer) => [scorer.name, scorer]));
    fill(group, (status.groups ?? []).map((name) => [name, name]));
    byId("group-by").textContent = status.group_by ?? "Group";
    /** @type {HTMLElement} */ (group.parentElement).hidden = !status.groups?.length;
    fill(scorer, [...scorers.values()].map(({ name, head }) => [name, head]));
    byId("scores").hidden = byId("by-score").hidden = !scorers.size;
    const failed = Object.keys(status.failed_by_kind);
    fill(kinds, failed.map((kind) => [`kind:${kind}`, kind]));
    kinds.hidden = !failed.length;
    allow();
  }

  /**
   * Replaces the options; a select keeps its first one, for all.
   * @param {HTMLSelectElement | HTMLOptGroupElement} box @param {[string, string][]} options
   */
  function fill(box, options) {
    const names = JSON.stringify(options);
    if (box.dataset.names === names) return;
    box.dataset.names = names;
    const control = /** @type {HTMLSelectElement} */ (box.closest("select")), held = control.value;
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
  const form = byId("filters");
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    clear();
  });

  return {
    values, put, query, offer, clear, apply,
    scorers: () => scorers,
    scorer: () => scorers.get(query().scorer ?? ""),
  };
}
