// Several labels side by side, each the mean of its seeds with a band from the least to the most.

import { chart } from "./charts.js";
import { formatOf, h, nameOf } from "./dom.js";

const compared = (main) => [
  ["accuracy", { title: `Test ${nameOf(main)}`, note: "simulated ground truth", ...scaleOf(main) }],
  [
    "personalised",
    {
      title: "Clients' own models on their own test records",
      note: "simulated ground truth",
      ...scaleOf(main),
    },
  ],
  ["loss", { title: "Test loss", note: "simulated ground truth", y: "number", zero: true }],
  ["bound", { title: "Clipping bound C", note: "median over clients", y: "number", log: true }],
];

const scaleOf = (main) => (formatOf(main) === "percent" ? { y: "percent", zero: true, top: 1 } : { y: "number" });

/** Charts of `lines` = [{ label, colour, seeds, curves: { accuracy: [[round, mean, least, most]], … } }] into `host`. */
export function compareCharts(host, lines) {
  const grid = h("div", { class: "charts wide" });
  host.replaceChildren(grid);
  const mains = new Set(lines.map((line) => line.main ?? "accuracy"));
  for (const [key, spec] of compared(mains.size > 1 ? "score" : [...mains][0])) {
    const series = lines
      .map((line) => {
        const points = line.curves[key] ?? [];
        return {
          name: line.label,
          colour: line.colour,
          points: points.map((p) => [p[0], p[1]]),
          band: line.seeds > 1 ? points.map((p) => [p[0], p[2], p[3]]) : [],
        };
      })
      .filter((one) => one.points.length);
    if (!series.length) continue;
    const place = h("div", { "data-chart": key });
    grid.append(place);
    chart(place, { ...spec, height: key === "accuracy" ? 320 : undefined, series });
  }
}
