// Charts. The SVG holds only shapes, so that it may be stretched to any width; the labels around it are
// HTML.

const GIB = 2 ** 30;
const NEAR_PX = 6;
const LOADING = 0.06; // of the time after it: the most that the loading of a model takes of the axis

// Each line: a column of the metrics, and its name if there are several. A rate is of the time since
// the point before, so it is drawn as a step.
const CHARTS = [
  { title: "Throughput", unit: "rows/s", isRate: true, lines: { rows_per_s: "" } },
  { title: "Tokens written", unit: "tokens/s", isRate: true, lines: { completion_tokens_per_s: "" } },
  { title: "Tokens read", unit: "tokens/s", isRate: true, lines: { prompt_tokens_per_s: "" } },
  {
    title: "Requests", unit: "requests",
    lines: { running: "running", waiting: "waiting", window: "window" },
  },
  { title: "KV cache", unit: "%", lines: { kv_cache_usage: "" }, scale: 100, top: 100 },
  {
    title: "Memory", unit: "GiB", scale: 1 / GIB,
    lines: { host_bytes: "host", gpu_bytes: "GPU" },
  },
];

// The next number up that divides into four readable parts.
function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const step = [1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10].find((one) => value <= one * power * (1 + 1e-9));
  return Number((step * power).toPrecision(12));
}

// Where an event of a start is on the axis of seconds at work: its distance from the nearest point.
function placeOf(at, start, metrics) {
  const moment = Date.parse(at);
  let best = null;
  metrics.start.forEach((number, place) => {
    if (number !== start) return;
    const away = moment - Date.parse(metrics.at[place]);
    if (best === null || Math.abs(away) < Math.abs(best.away)) best = { away, place };
  });
  if (best === null || Number.isNaN(moment)) return null;
  const before = metrics.start.findLastIndex((number) => number < start);
  const lowest = before < 0 ? 0 : metrics.seconds[before];
  const seconds = metrics.seconds[best.place] + best.away / 1000;
  return Math.min(metrics.seconds.at(-1), Math.max(lowest, seconds));
}

// The axis of a run's seconds: share(second) is a place on it from 0 to 1, second(share) the reverse, and worked(second)
// leaves the loads out. These, [from, to], are the time before a start's first point, and take little of the axis.
function axisOf({ seconds, start }) {
  const loads = seconds.flatMap((to, place) => (
    place && start[place] === start[place - 1] ? [] : [[seconds[place - 1] ?? 0, to]]));
  const total = seconds.at(-1) ?? 0, loading = loads.reduce((sum, [from, to]) => sum + to - from, 0);
  const most = LOADING * (total - loading) || Infinity, corners = [[0, 0]];
  const put = (second, most = Infinity) => {
    const [before, drawn] = corners.at(-1);
    corners.push([second, drawn + Math.min(second - before, most)]);
  };
  for (const [from, to] of loads) {
    put(from);
    put(to, most);
  }
  put(total);
  const along = (value, by, give) => {
    const place = Math.max(1, corners.findIndex((corner) => corner[by] >= value - 1e-9));
    const [low, high] = [corners[place - 1], corners[place]];
    return low[give] + (high[give] - low[give]) * ((value - low[by]) / (high[by] - low[by] || 1));
  };
  const span = corners.at(-1)[1] || 1;
  const worked = (second) => loads.reduce(
    (left, [from, to]) => left - Math.max(0, Math.min(second, to) - from), second);
  return { loads, worked, share: (second) => along(second, 0, 1) / span, second: (share) => along(share * span, 1, 0) };
}

let pointed = null; // where the pointer is: its seconds at work, and in which chart

// Draws all charts that have something to show into the box. Each mark: {seconds, text}.
function drawCharts(box, metrics, marks, axis) {
  const { seconds } = metrics;
  const figures = seconds.length < 2 ? [] : CHARTS
    .map((chart) => ({ ...chart, lines: linesOf(chart, metrics) }))
    .filter(({ lines }) => lines.length)
    .map((chart) => figureOf(chart, metrics, axis, marks));
  box.replaceChildren(...figures.map(({ figure }) => figure));
  const showAll = (at, nth) => {
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

function linesOf({ lines, scale = 1 }, metrics) {
  return Object.entries(lines)
    .map(([column, name]) => ({
      name,
      values: (metrics[column] ?? []).map((value) => (value === null ? null : value * scale)),
    }))
    .filter(({ values }) => values.some((value) => value));
}

function figureOf(chart, metrics, axis, marks) {
  const { title, unit, lines } = chart, { seconds } = metrics;
  const top = chart.top ?? nice(Math.max(...lines.flatMap(({ values }) => values)));
  const summary = lines.map((line) => legend(line, seconds));
  const ticks = [0, 1, 2, 3, 4].map((part) => clock(axis.worked(axis.second(part / 4))));
  const { figure, text, svg, plot } = frameOf({ title, summary, top: short(top, unit), ticks });
  const x = (at) => (1000 * axis.share(at)).toFixed(2), y = (value) => (100 - 100 * value / top).toFixed(2);
  for (const [from, to] of axis.loads) {
    const width = (x(to) - x(from)).toFixed(2), band = shape("rect", { class: "loading", x: x(from), y: 0, width, height: 100 });
    band.append(shape("title", {}));
    band.firstChild.textContent = `loading the model: ${clock(to - from)}`;
    svg.append(band);
  }
  lines.forEach(({ values }, nth) => {
    for (const part of parts(values, metrics.start)) {
      const corners = part.flatMap((place) => [
        ...(chart.isRate ? [[seconds[place - 1] ?? 0, values[place]]] : []), [seconds[place], values[place]],
      ]).map(([at, value]) => [x(at), y(value)]);
      const points = corners.map((corner) => corner.join(",")).join(" ");
      const [first, last] = [corners[0][0], corners.at(-1)[0]];
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

  // The chart that is pointed at shows an event that is near; the others their values there.
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

// A chart without its shapes, 1000 wide and 100 high. summary: what its caption says; top: the value at
// the upper edge.
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

// A histogram, as the run's status gives it.
function spreadFigure({ title, unit, counts, low, top, overflow, is_whole: isWhole, median, p99, largest }) {
  const most = nice(Math.max(...counts)), width = (top - low) / counts.length, step = 1000 / counts.length;
  const ticks = [0, 1, 2, 3, 4].map((part) => short(low + (top - low) * part / 4) || "0");
  ticks[4] = `${ticks[4]}${overflow ? " +" : ""} ${unit}`.trimEnd();
  const summary = `median ${short(median, unit)}, 99th percentile ${short(p99, unit)}, largest ${short(largest, unit)}`;
  const { figure, svg } = frameOf({ title, summary: [summary], top: short(most, "rows"), ticks });
  counts.forEach((count, place) => {
    const height = count && Math.max(100 * count / most, 1); // one row among a million stays visible
    const from = low + place * width, to = from + width - (isWhole ? 1 : 0), isLast = place === counts.length - 1;
    const range = isWhole && width === 1 ? short(from, unit) : `${short(from) || "0"}–${short(to, unit)}`;
    const hit = shape("rect", { class: "hit", x: place * step, y: 0, width: step, height: 100 });
    hit.append(shape("title", {}));
    hit.firstChild.textContent = `${range}${overflow && isLast ? " and more" : ""}: ${number.format(count)} rows`;
    if (count) svg.append(shape("rect", { class: "bar", x: (place + 0.08) * step, y: 100 - height, width: 0.84 * step, height }));
    svg.append(hit);
  });
  return figure;
}

// What a chart says while nobody points at it: of one line, its mean and its newest value.
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

// Stretches of places that have a value, each within one start.
function parts(values, start) {
  const found = [];
  values.forEach((value, place) => {
    const isNext = place && values[place - 1] !== null && start[place - 1] === start[place];
    if (value !== null) isNext ? found.at(-1).push(place) : found.push([place]);
  });
  return found;
}

const boundaries = ({ start }) => start.flatMap((one, place) => (place && one !== start[place - 1] ? [place] : []));

const upright = (className, at) => shape("line", { class: className, x1: at, x2: at, y1: 0, y2: 100 });

function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low && value - sorted[low - 1] < sorted[low] - value ? low - 1 : low;
}
