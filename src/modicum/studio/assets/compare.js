// Several runs side by side; those that differ in nothing but the seed are one line with a band.

import { ask } from "./ask.js";
import { compareCharts } from "./compare_view.js";
import { epsilon, formatOf, h, nameOf, number, percent, put, asMetric, table } from "./dom.js";
import { runList } from "./list.js";

/** The page; without a choice in the address, the newest folder that holds several finished runs. */
export function compare(host, studio, [wanted]) {
  const chosen = wanted ? wanted.split(",") : newest(studio.rows);
  const body = h("section", { class: "body", "aria-label": "Side by side" });
  let waiting;
  const list = runList({
    rows: studio.rows,
    chosen,
    toggle: (ids) => {
      clearTimeout(waiting);
      waiting = setTimeout(() => {
        history.replaceState(null, "", `#compare/${ids.join(",")}`);
        show(body, ids);
      }, 250);
    },
  });
  const side = h(
    "aside",
    { class: "side", "aria-label": "Runs" },
    h(
      "details",
      { open: matchMedia("(min-width: 52rem)").matches },
      h("summary", {}, "Choose runs"),
      list.element,
    ),
  );
  put(host, h("div", { class: "split chosen" }, side, body));
  studio.onrows = () => list.update(studio.rows);
  studio.listen(null);
  show(body, chosen);
}

function newest(rows) {
  const folders = new Map();
  for (const row of rows.filter((r) => r.finished)) {
    const folder = row.name.slice(0, Math.max(0, row.name.lastIndexOf("/")));
    folders.set(folder, [...(folders.get(folder) ?? []), row.id]);
  }
  return ([...folders.values()].find((ids) => ids.length > 1) ?? []).slice(0, 60);
}

async function show(body, ids) {
  if (!ids.length) {
    put(
      body,
      h(
        "p",
        { class: "empty" },
        "Choose some runs: those that differ in nothing but the seed become one line with a band.",
      ),
    );
    return;
  }
  try {
    const found = await ask(`compare?ids=${ids.map(encodeURIComponent).join(",")}`);
    const charts = h("div");
    put(
      body,
      h("h1", {}, "Side by side"),
      h(
        "p",
        { class: "quiet" },
        `${ids.length} runs in ${found.lines.length} ${found.lines.length === 1 ? "line" : "lines"}. A line is the mean over seeds, its band goes from the least to the most.`,
      ),
      charts,
      results(found),
    );
    compareCharts(charts, found.lines);
    performance.mark("drawn");
  } catch (error) {
    put(body, h("p", { class: "error" }, error.message));
  }
}

function results({ table: lines, main, reference }) {
  if (!lines.length) return h("p", { class: "quiet" }, "No finished run among them yet.");
  const share = formatOf(main) === "percent",
    wide = (value) => (share ? (100 * value).toFixed(1) : number(value));
  const spread = (line) =>
    asMetric(main, line.mean) + (line.spread === null ? "" : ` ± ${wide(line.spread)}`);
  const away = (line) =>
    line.difference === null
      ? "–"
      : `${line.difference >= 0 ? "+" : "−"}${wide(Math.abs(line.difference))}${line.interval === null ? "" : ` ± ${wide(line.interval)}`}`;
  return h(
    "div",
    {},
    h("h2", {}, "In numbers"),
    table(
      ["", `${nameOf(main)}*`, main === "accuracy" ? "macro-F1*" : "loss*", "seeds", "ε certified", `minus ${reference}`],
      lines.map((line) => [
        line.label,
        spread(line),
        main === "accuracy" ? percent(line.macro_f1) : number(line.loss),
        String(line.seeds),
        epsilon(line.epsilon),
        away(line),
      ]),
    ),
    h(
      "p",
      { class: "note-line" },
      "* simulated ground truth: mean ± standard deviation of single runs; differences are paired by seed, with 95% intervals. ε is the largest of a run's clients.",
    ),
  );
}
