// The axis of a run's working time, and what else the charts compute.
/** @import { Metrics } from "./types.js" */

const LOADING = 0.06; // of the time after it: the most that the loading of a model takes of the axis

/** @typedef {ReturnType<typeof axisOf>} Axis */

/**
 * The axis of a run's seconds. share(second) is a place on it from 0 to 1, second(share) the reverse; worked(second)
 * leaves out the loads. A load, [from, to], is the time before a start's first point. It takes little of the axis.
 * @param {Pick<Metrics, "seconds" | "start">} metrics
 */
export function axisOf({ seconds, start }) {
  const loads = seconds.flatMap((to, place) => (
    place && start[place] === start[place - 1] ? [] : [[seconds[place - 1] ?? 0, to]]));
  const total = seconds.at(-1) ?? 0, loading = loads.reduce((sum, [from, to]) => sum + to - from, 0);
  const most = LOADING * (total - loading) || Infinity, corners = [[0, 0]];
  /** @param {number} second */
  const put = (second, most = Infinity) => {
    const [before, drawn] = corners[corners.length - 1];
    corners.push([second, drawn + Math.min(second - before, most)]);
  };
  for (const [from, to] of loads) {
    put(from);
    put(to, most);
  }
  put(total);
  /** @param {number} value @param {number} by @param {number} give */
  const along = (value, by, give) => {
    const place = Math.max(1, corners.findIndex((corner) => corner[by] >= value - 1e-9));
    const [low, high] = [corners[place - 1], corners[place]];
    return low[give] + (high[give] - low[give]) * ((value - low[by]) / (high[by] - low[by] || 1));
  };
  const span = corners[corners.length - 1][1] || 1;
  return {
    loads,
    /** @param {number} second */
    worked: (second) => loads.reduce((left, [from, to]) => left - Math.max(0, Math.min(second, to) - from), second),
    /** @param {number} second */
    share: (second) => along(second, 0, 1) / span,
    /** @param {number} share */
    second: (share) => along(share * span, 1, 0),
  };
}

/**
 * The second of an event of a start, found from the nearest point; null if the start has no points.
 * @param {string | null} at @param {number} start @param {Metrics} metrics
 */
export function placeOf(at, start, metrics) {
  const moment = Date.parse(at ?? "");
  const best = metrics.start.reduce((best, number, place) => {
    const away = number === start ? moment - Date.parse(metrics.at[place]) : Infinity;
    return Math.abs(away) < Math.abs(best.away) ? { away, place } : best;
  }, { away: Infinity, place: -1 });
  if (best.place < 0) return null;
  const before = metrics.start.findLastIndex((number) => number < start);
  const lowest = before < 0 ? 0 : metrics.seconds[before];
  const seconds = metrics.seconds[best.place] + best.away / 1000;
  return Math.min(metrics.seconds[metrics.seconds.length - 1], Math.max(lowest, seconds));
}

/**
 * The next number up that divides into four readable parts.
 * @param {number} value
 */
export function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const step = [1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8].find((one) => value <= one * power * (1 + 1e-9)) ?? 10;
  return Number((step * power).toPrecision(12));
}

/**
 * The place of the nearest value.
 * @param {number[]} sorted @param {number} value
 */
export function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low && value - sorted[low - 1] < sorted[low] - value ? low - 1 : low;
}

/**
 * Stretches of places that have a value, each within one start.
 * @param {(number | null)[]} values @param {number[]} start
 */
export function parts(values, start) {
  /** @type {number[][]} */
  const found = [];
  values.forEach((value, place) => {
    const isNext = place && values[place - 1] !== null && start[place - 1] === start[place];
    if (value === null) return;
    if (isNext) found[found.length - 1].push(place);
    else found.push([place]);
  });
  return found;
}

/**
 * The places at which another start begins.
 * @param {Metrics} metrics
 */
export const boundaries = ({ start }) => start.flatMap((one, place) => (place && one !== start[place - 1] ? [place] : []));
