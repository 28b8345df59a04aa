// From values to pixels: what is visible of a chart, where it lies, and which values are worth a line.

export const LEFT = 50; // pixels of the margins
export const TOP = 12;
export const BOTTOM = 24;
const EDGE = 5;

/** The series that have something to show and were not hidden. */
export const shown = (state) =>
  state.spec.series.filter((one) => !state.hidden.has(one.name) && one.points.length);

/** Scales of what is visible, and where the direct labels fit. */
export function layout(state, width, height) {
  const { spec, zoom } = state,
    visible = shown(state);
  const xs = visible.flatMap((one) => one.points.map((p) => p[0]));
  let [x0, x1] = zoom ?? (xs.length ? [Math.min(...xs), Math.max(...xs)] : [0, 1]);
  if (!(x1 > x0)) [x0, x1] = [(x0 || 1) - 0.5, (x0 || 1) + 0.5];
  if (spec.bars && !zoom) [x0, x1] = [x0 - 0.5, x1 + 0.5];
  const inside = (p) => p[0] >= x0 && p[0] <= x1;
  const ys = spec.bars
    ? stacks(visible)
        .filter(inside)
        .map((p) => p[1])
    : visible.flatMap((one) => [
        ...one.points.filter(inside).map((p) => p[1]),
        ...(one.band ?? []).filter(inside).flatMap((p) => [p[1], p[2]]),
      ]);
  const good = ys.filter((y) => Number.isFinite(y) && (!spec.log || y > 0));
  let low = Math.min(...good),
    high = Math.max(...good);
  if (!good.length) [low, high] = [0, 1];
  if (spec.zero || spec.bars) low = Math.min(0, low);
  if (spec.top !== undefined) high = Math.max(high, zoom ? high : spec.top);
  if (spec.log) [low, high] = [low / 1.25, high * 1.25];
  else if (!(high > low)) [low, high] = [low - (spec.zero ? 0 : 0.5), high + 0.5];
  const ticks = spec.log ? logTicks(low, high) : niceTicks(low, high, height < 200 ? 4 : 5);
  if (!spec.log) [low, high] = [Math.min(low, ticks[0]), Math.max(high, ticks.at(-1))];
  const longest = Math.max(0, ...visible.map((one) => one.name.length));
  const room = longest <= 12 ? 340 : 480; // pixels across, under which names stand in the legend alone
  const labels = !spec.bars && width >= room && visible.length <= 10 && longest <= 26;
  const right = labels ? Math.min(190, 22 + 7.3 * longest) : 14;
  const inner = width - LEFT - right - 2 * EDGE;
  const across = (x) => LEFT + EDGE + ((x - x0) / (x1 - x0)) * inner;
  const t = spec.log ? Math.log : (v) => v;
  const up = (y) => height - BOTTOM - ((t(y) - t(low)) / (t(high) - t(low))) * (height - BOTTOM - TOP);
  const back = (px) => x0 + ((px - LEFT - EDGE) / inner) * (x1 - x0);
  return { width, height, right, x0, x1, across, up, back, ticks, labels, inside, visible };
}

function stacks(series) {
  const sums = new Map();
  for (const one of series) for (const [x, y] of one.points) sums.set(x, (sums.get(x) ?? 0) + (y ?? 0));
  return [...sums];
}

export function niceTicks(low, high, wanted) {
  const rough = (high - low) / wanted,
    unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 2.5, 5, 10].find((m) => m * unit >= rough * 0.999);
  const found = [];
  for (let i = Math.floor(low / step + 1e-9); i <= Math.ceil(high / step - 1e-9); i++)
    found.push(Number((i * step).toPrecision(12)));
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
    for (const m of [1, 2, 5])
      if (m * 10 ** e >= low && m * 10 ** e <= high) found.push(Number((m * 10 ** e).toPrecision(3)));
  return found.length > 7
    ? found.filter((v) => Math.abs(Math.log10(v) % 1) < 1e-9)
    : found.length > 1
      ? found
      : niceTicks(low, high, 4).filter((v) => v >= low && v <= high);
}
