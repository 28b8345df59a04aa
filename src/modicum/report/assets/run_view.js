// A run drawn from its points: whatever exists and nothing else. Shared by a run's report and the studio's watch page.

import { chart } from "./charts.js";
import { bytes, count, epsilon, formatOf, h, nameOf, number, put, seconds, asMetric, table } from "./dom.js";

/** The drawn part of a run's report: figures, charts, and who moved how much. */
export function runReport(host, run) {
  const charts = h("div");
  put(host, keyFigures(run), charts, troubles(run));
  runCharts(charts, run);
}

/** Charts of a run into `host`; `update(run)` goes on with more rounds. A run is { about, groups, points, … }. */
export function runCharts(host, run) {
  const drawn = new Map();
  const grid = h("div", { class: "charts" });
  host.replaceChildren(grid);
  function update(next) {
    const wanted = panels(next);
    for (const [key, spec] of wanted) {
      if (drawn.has(key)) drawn.get(key).update(spec);
      else {
        const place = h("div", { "data-chart": key });
        grid.append(place);
        drawn.set(key, chart(place, spec));
      }
    }
    for (const [key] of wanted) grid.append(grid.querySelector(`[data-chart="${key}"]`));
  }
  update(run);
  return { update };
}

/** The colour of the i-th of n budget groups: one hue, from strict to generous. */
export const groupColour = (i, n) => `var(--g${n < 2 ? 2 : Math.round((i * 4) / (n - 1))})`;

function panels(run) {
  const { points, about } = run,
    found = new Map();
  const ground = about.simulation ? "simulated ground truth" : "";
  const add = (key, spec) => {
    if (spec.series.some((one) => one.points.length))
      found.set(key, { ...spec, series: spec.series.filter((one) => one.points.length) });
  };
  const main = mainOf(run),
    share = formatOf(main) === "percent";
  add("accuracy", {
    title: main === "accuracy" ? "Accuracy" : nameOf(main),
    note: measured(points, ground, main),
    y: formatOf(main),
    zero: share,
    top: share ? 1 : undefined,
    series: scores(points, about, main),
  });
  add("loss", {
    title: "Loss",
    y: "number",
    zero: true,
    series: [
      { name: "test", colour: about.colour, points: pick(points, (p) => p.simulated.test_loss) },
      { name: "public", colour: "var(--quiet)", dashed: true, points: pick(points, (p) => p.public.loss) },
    ],
  });
  add("reserved", {
    title: "Reserved of what clients granted",
    note: "a share of the plan, no ε",
    y: "share",
    zero: true,
    top: 1,
    series: reserved(points),
  });
  add("bound", {
    title: "Clipping bound C",
    note: differ(points) ? "median of each budget group" : "median and range over clients",
    y: "number",
    log: true,
    series: bounds(points, about),
  });
  add("clients", { title: "Clients asked in each round", y: "number", bars: true, series: cohort(points) });
  add("seconds", {
    title: "Seconds of a round",
    y: "seconds",
    zero: true,
    series: [
      { name: "whole round", colour: "var(--quiet)", points: pick(points, (p) => p.traffic.seconds) },
      ...byParty(run, "seconds"),
    ],
  });
  add("up", { title: "Bytes sent by each party", y: "bytes", bars: true, series: byParty(run, "bytes_up") });
  add("down", {
    title: "Bytes sent to each party",
    y: "bytes",
    bars: true,
    series: byParty(run, "bytes_down"),
  });
  return found;
}

/** The task's main metric: that of the run's summary, or the first that its rounds tell. */
function mainOf({ about, points }) {
  const told = points.flatMap((p) => Object.keys(p.simulated)).find((name) => name.startsWith("test_"));
  return told ? told.slice(5) : (about.main ?? "accuracy");
}

/** Whose metric it is, where lines do not say so themselves. */
function measured(points, ground, main) {
  if (points.some((p) => p.simulated[`test_${main}`] !== undefined)) return ground;
  const kinds = [
    ["released by clients with noise, and paid for", "released"],
    ["on public records", "public"],
  ].filter(([, key]) => points.some((p) => p[key][main] !== undefined));
  return kinds.length === 1 ? kinds[0][0] : "";
}

const pick = (points, value) =>
  points.map((p) => [p.round, value(p)]).filter((p) => p[1] !== undefined && p[1] !== null);

function scores(points, about, main) {
  return [
    { name: "test", colour: about.colour, points: pick(points, (p) => p.simulated[`test_${main}`]) },
    {
      name: "personalised",
      colour: "var(--g4)",
      points: pick(points, (p) => p.simulated[`personalised_${main}`]),
    },
    { name: "public", colour: "var(--quiet)", dashed: true, points: pick(points, (p) => p.public[main]) },
    { name: "released, paid", colour: "var(--warm)", points: pick(points, (p) => p.released[main]) },
  ];
}

const budgetsIn = (points, key) =>
  [...new Set(points.flatMap((p) => Object.keys(p[key] ?? {})))].sort((a, b) => a - b);

function reserved(points) {
  const budgets = budgetsIn(points, "reserved_by_budget");
  if (!budgets.length)
    return points.some((p) => p.reserved > 0)
      ? [{ name: "all clients", colour: "var(--g2)", points: pick(points, (p) => p.reserved) }]
      : [];
  return budgets.map((b, i) => ({
    name: `ε = ${b}`,
    colour: groupColour(i, budgets.length),
    points: pick(points, (p) => p.reserved_by_budget[b]),
  }));
}

/** Whether some round's bounds depend on the budget. */
const differ = (points) => points.some((p) => new Set(Object.values(p.bound_by_budget ?? {})).size > 1);

function bounds(points, about) {
  if (about.clipped === false) return [];
  const budgets = budgetsIn(points, "bound_by_budget");
  if (differ(points))
    return budgets.map((b, i) => ({
      name: `ε = ${b}`,
      colour: groupColour(i, budgets.length),
      points: pick(points, (p) => p.bound_by_budget[b]),
    }));
  const band = points.filter((p) => p.bound).map((p) => [p.round, p.bound[0], p.bound[2]]);
  return [{ name: "median", colour: about.colour, points: pick(points, (p) => p.bound?.[1]), band }];
}

function cohort(points) {
  const whole = points.every((p) => p.answered === p.asked && p.asked === points[0].asked);
  if (whole || points.every((p) => p.answered === null)) return []; // a sentence among the figures says so
  const series = [
    { name: "answered", colour: "var(--g2)", points: pick(points, (p) => p.answered) },
    { name: "absent", colour: "var(--warm)", points: pick(points, (p) => p.absent) },
    { name: "refused", colour: "var(--bad)", points: pick(points, (p) => p.refused) },
  ];
  return series.filter((one, i) => i === 0 || one.points.some((p) => p[1] > 0));
}

/** The silos with the most traffic by name, at most eight; the others together. */
function byParty(run, key) {
  const names = (run.parties ?? []).map((one) => one.name),
    first = names.slice(0, names.length > 8 ? 7 : 8),
    rest = names.slice(first.length);
  const hues = [
    "var(--p0)",
    "var(--p1)",
    "var(--p2)",
    "var(--p3)",
    "var(--p4)",
    "var(--p5)",
    "var(--p6)",
    "var(--p7)",
  ];
  const series = first.map((name, i) => ({
    name,
    colour: hues[i],
    points: pick(run.points, (p) => p.parties[name]?.[key]),
  }));
  if (rest.length) {
    const join = (p) => rest.map((name) => p.parties[name]?.[key]).filter((v) => v !== undefined);
    const joined = (p) => (key === "seconds" ? Math.max(...join(p)) : join(p).reduce((a, b) => a + b, 0));
    series.push({
      name: `${rest.length} others${key === "seconds" ? ", slowest" : ""}`,
      colour: "var(--quiet)",
      points: pick(run.points, (p) => (join(p).length ? joined(p) : undefined)),
    });
  }
  return series;
}

/** The figures at the top of a run: each is a number with the words that it needs. */
export function keyFigures(run) {
  const { about, groups, points } = run,
    last = points.at(-1);
  const figure = (value, words) => h("div", {}, h("b", {}, value), h("span", {}, words));
  const lastly = (name) => points.findLast((p) => p.simulated[name] !== undefined)?.simulated[name];
  const main = mainOf(run),
    score = about.score ?? lastly(`test_${main}`),
    own = lastly(`personalised_${main}`);
  const known = groups.map((g) => g.epsilon?.max).filter((e) => e !== undefined);
  const ranged = (values) => {
    const all = [...new Set(values.map(epsilon))];
    return all.length > 1 ? `${all[0]} – ${all.at(-1)}` : all[0];
  };
  return h(
    "div",
    { class: "figures" },
    own === undefined ? null : figure(asMetric(main, own), "clients' own models, simulated"),
    score === undefined || score === null
      ? null
      : figure(asMetric(main, score), own === undefined ? `test ${nameOf(main)}, simulated` : "shared model"),
    known.length
      ? figure(ranged(known), about.simulation ? "ε certified, of the same run deployed" : "ε certified")
      : groups.length
        ? figure(ranged(groups.map((g) => g.budget)), "ε granted")
        : null,
    figure(`${points.length}${about.rounds_planned ? ` / ${about.rounds_planned}` : ""}`, "rounds"),
    about.clients
      ? figure(
          about.clients.toLocaleString("en"),
          points.length && points.every((p) => p.answered === about.clients)
            ? "clients, all in every round"
            : "clients",
        )
      : null,
    last?.retired ? figure(String(last.retired), "retired early") : null,
  );
}

/** What each budget group got, as a table. */
export function groupTable(groups, simulated, main = "accuracy") {
  const line = (value) =>
    value.min === value.max ? epsilon(value.max) : `${epsilon(value.min)} – ${epsilon(value.max)}`;
  const tested = simulated && groups.some((g) => g.accuracy !== null);
  return table(
    ["ε granted", "clients", "ε certified", ...(tested ? [`${nameOf(main)}*`] : []), "bound C", "releases"],
    groups.map((g) => [
      epsilon(g.budget),
      String(g.clients),
      line(g.epsilon),
      ...(tested ? [asMetric(main, g.accuracy)] : []),
      number(g.bound),
      `${g.releases_made.toLocaleString("en")}${g.releases_planned === null ? "" : ` of ${g.releases_planned.toLocaleString("en")}`}`,
    ]),
  );
}

/** Who refused, who sent what cannot be, and who moved how many bytes; nothing where there is nothing to tell. */
export function troubles(run) {
  const list = (title, found) =>
    found.in_all
      ? h(
          "details",
          {},
          h("summary", {}, `${title}: ${count(found.in_all, "client")}`),
          table(
            ["client", "why", "since round", "rounds"],
            found.some.map((one) => [one.name, one.why, String(one.first), String(one.rounds)]),
          ),
        )
      : null;
  const voids = run.points.filter((p) => p.void);
  const moved = run.parties ?? [];
  return h(
    "div",
    { class: "troubles" },
    list("Refused", run.refused),
    list("Sent what no honest client can have sent", run.impossible),
    voids.length
      ? h(
          "details",
          {},
          h("summary", {}, `Void rounds, which stay charged: ${voids.length}`),
          h(
            "ul",
            {},
            voids.map((p) => h("li", {}, `round ${p.round}: ${p.void}`)),
          ),
        )
      : null,
    moved.length
      ? h(
          "details",
          {},
          h(
            "summary",
            {},
            `Bytes and seconds of ${run.parties_in_all > moved.length ? `the ${moved.length} busiest of ` : ""}${run.parties_in_all === 1 ? "1 party" : `${run.parties_in_all} parties`}`,
          ),
          table(
            ["party", "sent", "was sent", "seconds in all"],
            moved.map((one) => [
              one.name,
              bytes(one.bytes_up),
              bytes(one.bytes_down),
              one.seconds ? seconds(one.seconds) : "–",
            ]),
          ),
        )
      : null,
  );
}
