// The axis of a run's working time, and what else the charts compute.

const LOADING = 0.06; // of the time after it: the most that the loading of a model takes of the axis

// The axis of a run's seconds: share(second) is a place on it from 0 to 1, second(share) the reverse, and worked(second)
// leaves the loads out. These, [from, to], are the time before a start's first point, and take little of the axis.
export function axisOf({ seconds, start }) {
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

// Where an event of a start is on the axis of seconds at work: its distance from the nearest point.
export function placeOf(at, start, metrics) {
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

// The next number up that divides into four readable parts.
export function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const step = [1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10].find((one) => value <= one * power * (1 + 1e-9));
  return Number((step * power).toPrecision(12));
}

export function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low && value - sorted[low - 1] < sorted[low] - value ? low - 1 : low;
}

// Stretches of places that have a value, each within one start.
export function parts(values, start) {
  const found = [];
  values.forEach((value, place) => {
    const isNext = place && values[place - 1] !== null && start[place - 1] === start[place];
    if (value !== null) isNext ? found.at(-1).push(place) : found.push([place]);
  });
  return found;
}

export const boundaries = ({ start }) => start.flatMap((one, place) => (place && one !== start[place - 1] ? [place] : []));
