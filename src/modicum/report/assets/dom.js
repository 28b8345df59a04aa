// Elements and figures in words. Text only ever becomes a text node: what a run is called cannot become markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element: h("p", { class: "quiet", onclick: f }, "text", another). Nothing is read as HTML. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "colour") paint(element, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(
    ...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

/** A fixed colour is made lighter on dark paper; a variable of the style has its own value there. */
function paint(element, colour) {
  element.style.setProperty("--ink", colour);
  if (colour.startsWith("#")) element.setAttribute("data-lift", "");
}

/** Puts children in place of what an element holds; what is not there is left out. */
export function put(host, ...children) {
  host.replaceChildren();
  return fill(host, {}, children);
}

/** Three significant digits, "∞" for null where an ε or a budget stands. */
export function number(value, missing = "–") {
  if (value === null || value === undefined || Number.isNaN(value)) return missing;
  if (!Number.isFinite(value)) return "∞";
  if (value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3))
    return value
      .toExponential(2)
      .replace(/\.?0+e/, "e")
      .replace("e+", "e");
  return String(Number(value.toPrecision(3)));
}

/** An ε: null is ∞. */
export const epsilon = (value) => number(value, "∞");

export function percent(value, digits = 1) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)}%`;
}

const SHARES = new Set(["accuracy", "macro_f1", "f1", "auc"]);
const NAMES = { macro_f1: "macro-F1", f1: "F1", auc: "AUC", r2: "R²", rmse: "RMSE", mae: "MAE" };

/** A metric's name for people, how its values are drawn, and one of them as text. */
export const nameOf = (metric) => NAMES[metric] ?? metric;
export const formatOf = (metric) => (SHARES.has(metric) ? "percent" : "number");
export const asMetric = (metric, value) => (SHARES.has(metric) ? percent(value) : number(value));

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB"];
  let i = 0;
  for (; value >= 1000 && i < 3; i++) value /= 1000;
  return `${number(value)} ${units[i]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  return value >= 120 ? `${number(value / 60)} min` : `${number(value)} s`;
}

export const FORMATS = { number, percent: (v) => percent(v), share: (v) => percent(v, 0), bytes, seconds };

/** 1 client, 2 clients. */
export function count(n, word) {
  return `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
}

/** A table of cells; the first column names the row. */
export function table(head, rows) {
  const line = (cells, tag) =>
    h(
      "tr",
      {},
      cells.map((cell, i) =>
        h(i === 0 && tag === "td" ? "th" : tag, { scope: tag === "th" ? "col" : i === 0 ? "row" : null }, cell),
      ),
    );
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      {},
      h("thead", {}, line(head, "th")),
      h(
        "tbody",
        {},
        rows.map((r) => line(r, "td")),
      ),
    ),
  );
}
