// Charts. The SVG holds only shapes, so that it may be stretched to any width; the labels around it are
// HTML.
import { clock, inSteps, number, short } from "./format.js";
import { make, shape } from "./elements.js";
import { boundaries, nearest, nice, parts } from "./axis.js";
/** @import { Axis } from "./axis.js" */
/** @import { Histogram, Metrics } from "./types.js" */

/** @typedef {{ seconds: number, text: string }} Mark */
/** @typedef {{ name: string, values: (number | null)[] }} Line */
/**
 * @typedef {{ title: string, unit: string, lines: Record<string, string>, isRate?: boolean, scale?: number, top?: number }} Chart
 */

const GIB = 2 ** 30;
const NEAR_PX = 6;

/**
 * Lines: a column of the metrics, and its name if there are several. A rate is of the time since the point before, so
 * it is drawn as a step.
 * @type {Chart[]}
 */
const CHARTS = [
  { title: "Throughput", unit: "rows/s", isRate: true, lines: { rows_per_s: "" } },
  { title: "Tokens written", unit: "tokens/s", isRate: true, lines: { completion_tokens_per_s: "" } },
  { title: "Tokens read", unit: "tokens/s", isRate: true, lines: { prompt_tokens_per_s: "" } },
  {
    title: "Requests", unit: "requests",
    lines: { running: "running", waiting: "waiting", window: "window" },
  },
  { title: "KV cache", unit: "%", lines: { kv_cache_usage: "" }, scale: 100, top: 100 },
  { title: "Speculation", unit: "tokens accepted per step", lines: { accepted_tokens_per_step: "" } },
  {
    title: "Memory", unit: "GiB", scale: 1 / GIB,
    lines: { host_bytes: "host", gpu_bytes: "GPU" },
  },
];

/** @type {{ at: number, nth: number } | null} */
let pointed = null; // where the pointer is: its seconds at work, and the chart

/**
 * Draws into the box all charts that have a value.
 * @param {HTMLElement} box @param {Metrics} metrics @param {Mark[]} marks @param {Axis} axis
 */
export function drawCharts(box, metrics, marks, axis) {
  const { seconds } = metrics;
  const figures = seconds.length < 2 ? [] : CHARTS
    .map((chart) => ({ ...chart, lines: linesOf(chart, metrics) }))
    .filter(({ lines }) => lines.length)
    .map((chart) => figureOf(chart, metrics, axis, marks));
  box.replaceChildren(...figures.map(({ figure }) => figure));
  /** @param {number | null} at */
  const showAll = (at, nth = 0) => {
    pointed = at === null ? null : { at, nth };
    figures.forEach(({ show }, n) => show(at, n === nth));
  };
  if (pointed) showAll(pointed.at, pointed.nth); // new points come while it stays
  figures.forEach(({ plot }, nth) => {
    plot.addEventListener("pointermove", (event) => {
      const { left, width } = plot.getBoundingClientRect();
      showAll(axis.second(Math.min(1, Math.max(0, (event.clientX - left) / width))), nth);
    });
    plot.addEventListener("pointerleave", () => showAll(null));
  });
}

/**
 * @param {Chart} chart @param {Metrics} metrics
 * @returns {Line[]}
 */
function linesOf({ lines, scale = 1 }, metrics) {
  return Object.entries(lines)
    .map(([column, name]) => ({
      name,
      values: (metrics[column] ?? []).map((/** @type {number | null} */ value) => (value === null ? null : value * scale)),
    }))
    .filter(({ values }) => values.some((value) => value));
}

/**
 * @param {Omit<Chart, "lines"> & { lines: Line[] }} chart
 * @param {Metrics} metrics @param {Axis} axis @param {Mark[]} marks
 */
function figureOf(chart, metrics, axis, marks) {
  const { title, unit, lines } = chart, { seconds } = metrics;
  const top = chart.top ?? nice(Math.max(...lines.flatMap(({ values }) => values.map(Number))));
  const summary = lines.map((line) => legend(line, seconds));
  const ticks = [0, 1, 2, 3, 4].map((part) => clock(axis.worked(axis.second(part / 4))));
  const { figure, text, svg, plot } = frameOf({ title, summary, top: short(top, unit), ticks });
  /** @param {number} at */
  const x = (at) => (1000 * axis.share(at)).toFixed(2);
  /** @param {number | null} value */
  const y = (value) => (100 - 100 * Number(value) / top).toFixed(2);
  for (const [from, to] of axis.loads) {
    const width = (Number(x(to)) - Number(x(from))).toFixed(2);
    svg.append(explained(`loading the model: ${clock(to - from)}`, { class: "loading", x: x(from), y: 0, width, height: 100 }));
  }
  lines.forEach(({ values }, nth) => {
    for (const part of parts(values, metrics.start)) {
      const corners = part.flatMap((place) => [...(chart.isRate ? [seconds[place - 1] ?? 0] : []), seconds[place]]
        .map((at) => [x(at), y(values[place])]));
      const points = corners.map((corner) => corner.join(",")).join(" ");
      const [first, last] = [corners[0][0], corners[corners.length - 1][0]];
      if (!nth) svg.append(shape("polygon", { class: "area", points: `${first},100 ${points} ${last},100` }));
      svg.append(shape("polyline", { class: `edge nth-${nth}`, points }));
    }
  });
  for (const place of boundaries(metrics)) {
    svg.append(upright("pause", x(seconds[place])));
  }
  for (const mark of marks) svg.append(upright("event", x(mark.seconds)));
  const cursor = upright("cursor", 0);
  cursor.setAttribute("visibility", "hidden");
  svg.append(cursor);

  /**
   * The chart under the pointer shows an event that is near; the others show their values there.
   * @param {number | null} at @param {boolean} isPointedAt
   */
  function show(at, isPointedAt) {
    cursor.setAttribute("visibility", at === null ? "hidden" : "visible");
    if (at === null) {
      plot.title = "";
      text.replaceChildren(...summary);
      return;
    }
    const place = nearest(seconds, at), near = NEAR_PX / Math.max(1, plot.clientWidth);
    const mark = marks.find((mark) => Math.abs(axis.share(mark.seconds) - axis.share(at)) < near);
    for (const name of ["x1", "x2"]) cursor.setAttribute(name, x(mark?.seconds ?? seconds[place]));
    const values = lines.map(({ name, values }) => (name
      ? `${name} ${short(values[place]) || "–"}` : short(values[place], unit) || "–"));
    text.textContent = mark && isPointedAt
      ? `${clock(axis.worked(mark.seconds))}: ${mark.text}`
      : `${values.join(", ")} after ${clock(axis.worked(seconds[place]))}`;
    plot.title = mark?.text ?? "";
  }
  return { figure, plot, show };
}

/**
 * A chart without its shapes, 1000 wide and 100 high. summary: its caption; top: the value at the upper edge.
 * @param {{ title: string, summary: (string | Node)[], top: string, ticks: string[] }} parts
 */
function frameOf({ title, summary, top, ticks }) {
  const figure = make("figure"), caption = make("figcaption"), text = make("p");
  const plot = make("div", "plot"), axis = make("div", "x"), label = make("span", "y", top);
  text.append(...summary);
  caption.append(make("h3", "", title), text);
  figure.role = "group";
  figure.ariaLabel = title;
  const svg = shape("svg", {
    role: "img", "aria-label": `${title}: ${text.textContent}`, viewBox: "0 0 1000 100", preserveAspectRatio: "none",
  });
  for (const height of [0, 50, 100]) {
    svg.append(shape("line", { class: "grid", x1: 0, x2: 1000, y1: height, y2: height }));
  }
  label.ariaHidden = axis.ariaHidden = "true";
  plot.append(label, svg);
  axis.append(...ticks.map((tick) => make("span", "", tick)));
  figure.append(caption, plot, axis);
  return { figure, text, svg, plot };
}

/** @param {Histogram} histogram */
export function spreadFigure({ title, unit, counts, low, top, overflow, is_whole: isWhole, median, p99, largest }) {
  const most = nice(Math.max(...counts)), width = (top - low) / counts.length, step = 1000 / counts.length;
  const ticks = [0, 1, 2, 3, 4].map((part) => inSteps(low + (top - low) * part / 4, width));
  ticks[4] = `${ticks[4]}${overflow ? " +" : ""} ${unit}`.trimEnd();
  const summary = `median ${short(median, unit)}, 99th percentile ${short(p99, unit)}, largest ${short(largest, unit)}`;
  const { figure, svg } = frameOf({ title, summary: [summary], top: short(most, "rows"), ticks });
  counts.forEach((count, place) => {
    const height = count && Math.max(100 * count / most, 1); // one row among a million stays visible
    const from = low + place * width, to = from + width - (isWhole ? 1 : 0), isLast = place === counts.length - 1;
    const range = isWhole && width === 1 ? short(from, unit) : `${inSteps(from, width)}–${inSteps(to, width, unit)}`;
    const text = `${range}${overflow && isLast ? " and more" : ""}: ${number.format(count)} rows`;
    if (count) svg.append(shape("rect", { class: "bar", x: (place + 0.08) * step, y: 100 - height, width: 0.84 * step, height }));
    svg.append(explained(text, { class: "hit", x: place * step, y: 0, width: step, height: 100 }));
  });
  return figure;
}

/**
 * A rectangle with a text for the pointer.
 * @param {string} text @param {Record<string, string | number>} attributes
 */
function explained(text, attributes) {
  const rectangle = shape("rect", attributes), title = shape("title", {});
  title.textContent = text;
  rectangle.append(title);
  return rectangle;
}

/**
 * The caption of a chart without a pointer: for its only line, the newest value and the mean.
 * @param {Line} line @param {number[]} seconds
 */
function legend({ name, values }, seconds) {
  const known = values.filter((value) => value !== null);
  const newest = short(known.at(-1));
  if (name) return make("span", "key", `${name} ${newest}`);
  let sum = 0, over = 0;
  values.forEach((value, place) => {
    if (value === null || !place) return;
    sum += value * (seconds[place] - seconds[place - 1]);
    over += seconds[place] - seconds[place - 1];
  });
  const mean = over ? `${short(sum / over)} on average, ` : "";
  return make("span", "", `${newest} last, ${mean}${short(Math.max(...known))} at most`);
}

/** @param {string} className @param {string | number} at */
const upright = (className, at) => shape("line", { class: className, x1: at, x2: at, y1: 0, y2: 100 });
