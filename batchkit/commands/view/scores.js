// The scores of a run by group, and the differences between runs.
import { number, short, signed } from "./format.js";
import { button, byId, folded, make, meter, shape, table } from "./elements.js";
import { nice } from "./axis.js";
/** @import { Comparison, Delta, Group, Scorer, ShowRows, Status, About } from "./types.js" */

/** @typedef {[string | null, Group]} Line a group's name, null for all rows, and its scores */

const MOST_GROUPS = 200;
const SPREAD = /** @type {const} */ (["mean", "std", "median", "min", "max"]);

/**
 * show() is called to list the rows behind a number.
 * @param {Status} status @param {ShowRows} show
 */
export function drawScores({ scores, scorers, group_by: groupBy }, show) {
  const isScored = scores.scored > 0, names = Object.keys(scores.metrics);
  byId("scores-section").hidden = !isScored && !names.length;
  byId("scores-title").textContent = isScored ? "Scores" : `Rows by ${groupBy}`;
  const size = (/** @type {string} */ name) => scores.metrics[name].n + scores.metrics[name].unscored;
  const largest = new Set([...names].sort((a, b) => size(b) - size(a)).slice(0, MOST_GROUPS));
  /** @type {Line[]} */
  const lines = names.filter((name) => largest.has(name)).map((name) => [name, scores.metrics[name]]);
  lines.push([null, scores.overall]);
  const left = names.length - largest.size;
  byId("scores-table").replaceChildren(
    wide(markAll(isScored ? meansOf(lines, scorers, groupBy ?? "", show) : countsOf(lines, groupBy ?? "", show))),
    ...(left ? [make("p", "caption", `The table leaves out ${number.format(left)} small groups.`)] : []),
    ...(isScored ? [make("p", "caption", "Plain means over the n scored rows, in percent (a reward: 0 to 10);"
      + " failed and unscored rows are never a 0. A number shows its rows, lowest first.")] : []),
    ...spreadOf(lines),
  );
}

/** @param {Line[]} lines @param {Scorer[]} scorers @param {string} groupBy @param {ShowRows} show */
function meansOf(lines, scorers, groupBy, show) {
  return table([groupBy, "n", ...scorers.map(({ head }) => head), "unscored", "failed"], lines.map(([group, found]) => [
    group ?? "all", number.format(found.n),
    ...scorers.map((scorer) => meanOf(found[scorer.name], scorer, group, show)),
    countOf("unscored", found, group, show), countOf("failed", found, group, show),
  ]));
}

/** @param {Line[]} lines @param {string} groupBy @param {ShowRows} show */
function countsOf(lines, groupBy, show) {
  return table([groupBy, "answered", "failed"], lines.map(([group, found]) => [
    group ?? "all", number.format(found.n + found.unscored), countOf("failed", found, group, show),
  ]));
}

/** @param {unknown} mean @param {Scorer} scorer @param {string | null} group @param {ShowRows} show */
function meanOf(mean, { name, scale }, group, show) {
  if (typeof mean !== "number") return make("span", "none", "–");
  const cell = button("", () => show({ group, scorer: name, order: "score:asc" }), "cell");
  cell.title = "show the rows, lowest first";
  Object.assign(cell.dataset, { scorer: name, ...(group !== null && { group }) });
  cell.append(make("span", "value", mean.toFixed(2)), meter(mean / (scale === 1 ? 10 : 100)));
  return cell;
}

/** @param {"unscored" | "failed"} outcome @param {Group} found @param {string | null} group @param {ShowRows} show */
function countOf(outcome, found, group, show) {
  if (!found[outcome]) return make("span", "zero", "0");
  const cell = button(number.format(found[outcome]), () => show({ group, outcome }), "cell");
  Object.assign(cell.dataset, { outcome, ...(group !== null && { group }) });
  return cell;
}

/** @param {Line[]} lines */
function spreadOf(lines) {
  const found = lines.flatMap(([group, { spread }]) => (spread ? [[
    group ?? "all", number.format(spread.reward.count), ...SPREAD.map((part) => spread.reward[part].toFixed(2)),
  ]] : []));
  return found.length ? [wide(markAll(table(["reward", "count", ...SPREAD], found, "plain")))] : [];
}

/** @param {About["steps"]} steps */
export function drawSteps(steps) {
  const lines = Object.entries(steps);
  byId("steps-section").hidden = !lines.length;
  byId("steps").replaceChildren(table(["step", "n", "failed", "tokens read", "tokens written", "written each"],
    lines.map(([name, of]) => [
      name, ...[of.generations, of.failed, of.prompt_tokens, of.completion_tokens].map((count) => number.format(count)),
      short(of.completion_tokens / of.generations),
    ]), "plain"));
}

// ---- differences between runs

/** @param {HTMLElement} box @param {Comparison} found @param {(scorer: string) => string} heads */
export function drawDeltas(box, found, heads) {
  const [baseline, ...others] = found.runs;
  box.replaceChildren(...others.map((run) => {
    const part = make("section"), title = make("h2", "", `${run} `);
    const only = (/** @type {string} */ name, /** @type {number} */ n) => `only in ${name}: ${number.format(n)}`;
    title.append(make(
      "small", "", `${only(baseline, found.only_in_baseline[run])}; ${only(run, found.only_in_run[run])} rows`));
    const deltas = found.deltas.filter((delta) => delta.run === run);
    const scorers = [...new Set(deltas.map(({ scorer }) => scorer))];
    part.append(title, ...scorers.flatMap((scorer) => deltasOf(found, run, heads(scorer), deltas.filter((one) => one.scorer === scorer))));
    if (!scorers.length) part.append(make("p", "caption", "No row is scored in both."));
    return part;
  }));
}

/** @param {Comparison} found @param {string} run @param {string} head @param {Delta[]} deltas */
function deltasOf(found, run, head, deltas) {
  const [baseline] = found.runs, [{ scorer }] = deltas;
  const reach = nice(Math.max(...deltas.flatMap(({ low, high }) => [Math.abs(low), Math.abs(high)])));
  /** @param {string} name @param {string | null} group */
  const mean = (name, group) => {
    const { overall, metrics } = found.tables[name];
    return (group === null ? overall : metrics[group])?.[scorer]?.toFixed(2) ?? "–";
  };
  const scale = make("span", "scale");
  scale.append(...[`−${short(reach)}`, "0", `+${short(reach)}`].map((text) => make("span", "", text)));
  const lines = deltas.map((one) => [
    one.group ?? "all", mean(baseline, one.group), mean(run, one.group),
    make("span", one.low > 0 || one.high < 0 ? "delta clear" : "delta", signed(one.delta)),
    `${signed(one.low)} … ${signed(one.high)}`, intervalOf(one, reach), number.format(one.n), number.format(one.better), number.format(one.worse),
  ]);
  const shown = table(["", baseline, run, "Δ", "95 %", scale, "n", "better", "worse"], lines, "deltas");
  const flips = found.flips.filter((flip) => flip.run === run && flip.scorer === scorer);
  return [make("h3", "score-name", head), wide(markAll(shown)), ...["better", "worse"].flatMap((way) => {
    const ids = flips.filter(({ before, after }) => (way === "better") === (after > before)).map(({ id }) => id);
    return ids.length ? [folded(`${number.format(ids.length)} rows ${way}`, make("p", "ids", ids.join(", ")))] : [];
  })];
}

/**
 * The difference as a mark on its interval; 0 is in the middle.
 * @param {Delta} delta @param {number} reach
 */
function intervalOf({ delta, low, high }, reach) {
  const x = (/** @type {number} */ value) => (50 + 50 * value / reach).toFixed(2), clear = low > 0 || high < 0 ? " clear" : "";
  const root = shape("svg", {
    class: "interval", role: "img", viewBox: "0 0 100 10", preserveAspectRatio: "none",
    "aria-label": `${signed(delta)}, between ${signed(low)} and ${signed(high)}`,
  });
  root.append(
    shape("line", { class: "grid", x1: 50, x2: 50, y1: 0, y2: 10 }),
    shape("line", { class: `whisker${clear}`, x1: x(low), x2: x(high), y1: 5, y2: 5 }),
    shape("line", { class: "point", x1: x(delta), x2: x(delta), y1: 2, y2: 8 }),
  );
  return root;
}

/** @param {Node} element */
function wide(element) {
  const box = make("div", "wide");
  box.append(element);
  return box;
}

/**
 * Marks the last line, which is about all rows.
 * @param {HTMLTableElement} found
 */
function markAll(found) {
  found.querySelector("tbody tr:last-child")?.classList.add("all");
  return found;
}
