// A look at the data: what was told of each column, with the error of its noise, and what each question cost.

import { epsilon, h, number, percent, s, table } from "./dom.js";

const WIDE = 240,
  HIGH = 110;

/** The part of a run's page that only a look has; a file that is none is one line. */
export function lookPart(look) {
  try {
    return h("section", { "aria-label": "A look at the data" }, parts(look));
  } catch {
    return h("p", { class: "error" }, "look.json cannot be read: take an intact folder");
  }
}

function parts(look) {
  const names = look.classes.map((_, i) => look.labels[i] ?? String(i));
  return [
    h("h2", {}, "What was told"),
    h("p", { class: "note-line" }, "± is two standard deviations of the noise; the data's own chance is not in it."),
    look.columns.length ? table(["column", "missing", "mean", "deviation", "median"], look.columns.map(row)) : null,
    h(
      "div",
      { class: "charts" },
      look.classes.length
        ? bars(`${look.spec.unit}s by class`, names, look.classes.map((one) => one.value), look.classes[0].error)
        : null,
      look.columns.filter((one) => one.bars.length).map((one) => bars(one.column.name, ends(one), one.bars, one.bar_error)),
    ),
    h("h2", {}, "What each question cost"),
    table(
      ["question", "ε alone"],
      Object.entries(look.costs).map(([name, cost]) => [name, epsilon(cost)]),
    ),
    h("p", { class: "note-line" }, "Asked together, as one query, they cost less than their sum: see ε certified."),
  ];
}

const told = (figure) => (figure ? `${number(figure.value)} ± ${number(2 * figure.error)}` : "–");

function row(one) {
  const median = one.quantiles.find((q) => q.share === 0.5);
  const missing = `${percent(one.missing.value)} ± ${percent(2 * one.missing.error)}`;
  const middle = median ? `${number(median.value)} (${number(median.low)} to ${number(median.high)})` : "–";
  return [one.column.name, missing, told(one.mean), told(one.deviation), middle];
}

const ends = (one) =>
  one.column.categories.length ? one.column.categories : [number(one.column.low), number(one.column.high)];

/** Bars with two standard deviations of noise; names stand under them, or at both ends. */
function bars(title, names, values, error) {
  const top = Math.max(...values.map((value) => value + 2 * error), 1),
    step = WIDE / values.length,
    y = (value) => HIGH * (1 - Math.max(0, value) / top),
    every = names.length === values.length;
  return h(
    "figure",
    {},
    h("figcaption", {}, title),
    s(
      "svg",
      { viewBox: `-2 -4 ${WIDE + 4} ${HIGH + 22}`, width: WIDE, role: "img", "aria-label": `${title}: ${values.map((v) => number(v)).join(", ")}` },
      values.map((value, i) => [
        s("rect", { x: i * step + 1, y: y(value), width: step - 2, height: HIGH - y(value), fill: "#2a6f97" }),
        s("line", {
          x1: (i + 0.5) * step, x2: (i + 0.5) * step, y1: y(value + 2 * error), y2: y(value - 2 * error), stroke: "#9aa5ad",
        }),
      ]),
      names.map((name, i) =>
        s(
          "text",
          {
            x: every ? (i + 0.5) * step : i ? WIDE : 0,
            y: HIGH + 14,
            "font-size": 10,
            fill: "currentColor",
            "text-anchor": every ? "middle" : i ? "end" : "start",
          },
          name,
        ),
      ),
    ),
  );
}
