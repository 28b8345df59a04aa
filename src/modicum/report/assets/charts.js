// One chart for reports and studio: lines with bands, or stacked bars, as SVG. Hover, arrow keys, zoom, toggles,
// direct labels, a table of the same values, colours that follow the theme.

import { FORMATS, h, s } from "./dom.js";
import { BOTTOM, LEFT, TOP, layout, niceTicks, shown } from "./scales.js";

const LINE = 15; // pixels between two labels

/**
 * Draws into `host`. A spec is { title, note, y: "percent" | "share" | "number" | "bytes" | "seconds", log, zero, top,
 * x, bars, series: [{ name, colour, dashed, points: [[x, y]], band: [[x, low, high]] }] }.
 * `update(spec)` draws other values and keeps zoom and toggles.
 */
export function chart(host, spec) {
  const state = { spec, hidden: new Set(), zoom: null, at: null };
  const box = h("div", { class: "plot" });
  const told = h("div", { class: "tip", role: "status" });
  const legend = h("div", { class: "legend", role: "group", "aria-label": "Show or hide" });
  const reset = h(
    "button",
    { class: "reset", type: "button", hidden: true, onclick: () => zoomTo(null) },
    "Whole range",
  );
  const values = h(
    "details",
    { class: "values", ontoggle: () => listValues(values, state) },
    h("summary", {}, "Values"),
  );
  const title = h("figcaption", {}, h("span", { class: "title" }), h("span", { class: "note" }), reset);
  host.replaceChildren(h("figure", { class: "chart" }, title, legend, box, values));

  function draw() {
    const { spec } = state;
    title.firstChild.textContent = spec.title;
    title.children[1].textContent = spec.note ?? "";
    reset.hidden = state.zoom === null;
    drawLegend(legend, state, draw);
    const width = Math.max(box.clientWidth || 600, 220);
    const frame = layout(state, width, spec.height ?? (width < 420 ? 190 : 220));
    const drawing = picture(state, frame);
    drawing.append(overlay(state, frame, told, zoomTo, point));
    box.replaceChildren(drawing, told);
    point(state.at, frame);
    if (values.open) listValues(values, state);
  }
  function zoomTo(range) {
    state.zoom = range;
    state.at = null;
    draw();
  }
  function point(x, frame) {
    state.at = x;
    tell(state, frame, box, told);
  }
  new ResizeObserver(() => draw()).observe(box);
  draw();
  return {
    update(next) {
      state.spec = next;
      draw();
    },
  };
}

function drawLegend(legend, state, draw) {
  const { series } = state.spec;
  legend.hidden = series.length < 2;
  const named =
    document.activeElement?.dataset?.of && legend.contains(document.activeElement)
      ? document.activeElement.dataset.of
      : null;
  legend.replaceChildren(
    ...series.map((one) =>
      h(
        "button",
        {
          type: "button",
          colour: one.colour,
          "data-of": one.name,
          "aria-pressed": String(!state.hidden.has(one.name)),
          onclick: () => {
            state.hidden.has(one.name) ? state.hidden.delete(one.name) : state.hidden.add(one.name);
            draw();
          },
        },
        h("i", { class: one.dashed ? "dashed" : "" }),
        one.name,
      ),
    ),
  );
  if (named !== null) [...legend.children].find((button) => button.dataset.of === named)?.focus();
}

function picture(state, f) {
  const { spec } = state,
    format = FORMATS[spec.y ?? "number"];
  const marked = spec.y === "percent" && f.ticks[1] - f.ticks[0] >= 0.01 ? FORMATS.share : format;
  const root = s("svg", {
    viewBox: `0 0 ${f.width} ${f.height}`,
    width: f.width,
    height: f.height,
    tabindex: 0,
    role: "application",
    "aria-roledescription": "chart",
    "aria-label": `${spec.title}. ${summary(state, format)} Arrow keys read values, plus and minus zoom.`,
  });
  for (const y of f.ticks) {
    root.append(s("line", { class: "grid", x1: LEFT, x2: f.width - f.right, y1: f.up(y), y2: f.up(y) }));
    root.append(s("text", { class: "tick", x: LEFT - 8, y: f.up(y) + 4, "text-anchor": "end" }, marked(y)));
  }
  for (const x of niceTicks(f.x0, f.x1, f.width < 420 ? 4 : 8).filter(
    (x) => Number.isInteger(x) && x >= f.x0 && x <= f.x1,
  ))
    root.append(
      s(
        "text",
        { class: "tick", x: f.across(x), y: f.height - BOTTOM + 17, "text-anchor": "middle" },
        String(x),
      ),
    );
  root.append(
    s(
      "text",
      { class: "tick", x: LEFT - 8, y: f.height - BOTTOM + 17, "text-anchor": "end" },
      spec.x ?? "round",
    ),
  );
  const clip = `clip-${Math.random().toString(36).slice(2)}`;
  root.append(
    s(
      "defs",
      {},
      s(
        "clipPath",
        { id: clip },
        s("rect", { x: LEFT, y: 0, width: f.width - LEFT - f.right, height: f.height - BOTTOM + 1 }),
      ),
    ),
  );
  const data = s("g", { class: "data", "clip-path": `url(#${clip})` });
  if (spec.bars) paintBars(data, f);
  else for (const one of f.visible) paintLine(data, one, f);
  root.append(data);
  if (f.labels) root.append(...endLabels(f));
  return root;
}

function paintLine(data, one, f) {
  const path = (points) =>
    points.map(([x, y], i) => `${i ? "L" : "M"}${f.across(x).toFixed(1)},${f.up(y).toFixed(1)}`).join("");
  const fine = one.points.filter((p) => Number.isFinite(p[1]));
  if (one.band?.length) {
    const there = path(one.band.map((p) => [p[0], p[2]])),
      back = path([...one.band].reverse().map((p) => [p[0], p[1]])).replace("M", "L");
    data.append(s("path", { class: "band", colour: one.colour, d: `${there}${back}Z` }));
  }
  data.append(s("path", { class: one.dashed ? "line dashed" : "line", colour: one.colour, d: path(fine) }));
  if (fine.filter(f.inside).length <= 20)
    for (const [x, y] of fine)
      data.append(s("circle", { class: "dot", colour: one.colour, cx: f.across(x), cy: f.up(y), r: 2.6 }));
}

function paintBars(data, f) {
  const wide = Math.max(1, Math.min(28, 0.72 * (f.across(f.x0 + 1) - f.across(f.x0)))),
    base = new Map();
  for (const one of f.visible)
    for (const [x, y] of one.points.filter(f.inside)) {
      const from = base.get(x) ?? 0;
      base.set(x, from + y);
      if (y > 0)
        data.append(
          s("rect", {
            class: "bar",
            colour: one.colour,
            x: f.across(x) - wide / 2,
            width: wide,
            y: f.up(from + y),
            height: Math.max(0.5, f.up(from) - f.up(from + y)),
          }),
        );
    }
}

/** Names at the ends of their lines, pushed apart where they would overlap. */
function endLabels(f) {
  const ends = f.visible
    .map((one) => ({ one, last: one.points.filter((p) => f.inside(p) && Number.isFinite(p[1])).at(-1) }))
    .filter((e) => e.last);
  ends.forEach((e) => {
    e.y = f.up(e.last[1]) + 4;
  });
  ends.sort((a, b) => a.y - b.y);
  ends.forEach((e, i) => {
    if (i) e.y = Math.max(e.y, ends[i - 1].y + LINE);
  });
  const over = (ends.at(-1)?.y ?? 0) - (f.height - BOTTOM + 4);
  if (over > 0)
    for (
      let i = ends.length - 1, limit = f.height - BOTTOM + 4;
      i >= 0;
      i--, limit = Math.min(limit - LINE, ends[i]?.y ?? 0)
    )
      ends[i].y = Math.min(ends[i].y, limit);
  return ends.map(({ one, y }) =>
    s("text", { class: "label", colour: one.colour, x: f.width - f.right + 8, y }, one.name),
  );
}

function summary(state, format) {
  return shown(state)
    .slice(0, 8)
    .map((one) => {
      const last = one.points.filter((p) => Number.isFinite(p[1])).at(-1);
      return last ? `${one.name}: ${format(last[1])} at ${state.spec.x ?? "round"} ${last[0]}.` : "";
    })
    .join(" ");
}

/** What the pointer and the keys do: read a value, zoom by dragging or with plus and minus. */
function overlay(state, f, told, zoomTo, point) {
  const brush = s("rect", { class: "brush", y: TOP, height: f.height - BOTTOM - TOP, width: 0 });
  const cursor = s("line", { class: "cursor", y1: TOP, y2: f.height - BOTTOM });
  const area = s("rect", {
    class: "area",
    x: LEFT,
    y: TOP,
    width: Math.max(0, f.width - LEFT - f.right),
    height: f.height - BOTTOM - TOP,
  });
  const group = s("g", {}, brush, cursor, area),
    all = [...new Set(f.visible.flatMap((one) => one.points.map((p) => p[0])))]
      .filter((x) => x >= f.x0 && x <= f.x1)
      .sort((a, b) => a - b);
  const nearest = (x) =>
    all.reduce((best, one) => (Math.abs(one - x) < Math.abs(best - x) ? one : best), all[0]);
  let from = null;
  const where = (event) =>
    f.back(
      ((event.clientX - area.ownerSVGElement.getBoundingClientRect().left) * f.width) /
        area.ownerSVGElement.getBoundingClientRect().width,
    );
  area.addEventListener("pointerdown", (event) => {
    from = where(event);
    area.setPointerCapture?.(event.pointerId);
  });
  area.addEventListener("pointermove", (event) => {
    const x = where(event);
    if (all.length) point(nearest(x), f);
    if (from === null) return;
    const [a, b] = [f.across(Math.min(from, x)), f.across(Math.max(from, x))];
    brush.setAttribute("x", a);
    brush.setAttribute("width", b - a);
  });
  area.addEventListener("pointerup", (event) => {
    const x = where(event),
      range = from === null ? null : [Math.min(from, x), Math.max(from, x)];
    from = null;
    brush.setAttribute("width", 0);
    if (range && range[1] - range[0] > (f.x1 - f.x0) / 40)
      zoomTo([Math.max(f.x0, range[0]), Math.min(f.x1, range[1])]);
  });
  area.addEventListener("pointerleave", () => {
    if (from === null) point(null, f);
  });
  area.addEventListener("dblclick", () => zoomTo(null));
  queueMicrotask(() =>
    group.ownerSVGElement?.addEventListener("keydown", (event) => {
      const i = all.indexOf(state.at),
        half = (f.x1 - f.x0) / 4,
        middle = state.at ?? (f.x0 + f.x1) / 2;
      const act = {
        ArrowRight: () => point(all[Math.min(all.length - 1, i + 1)] ?? null, f),
        ArrowLeft: () => point(all[i < 0 ? all.length - 1 : Math.max(0, i - 1)] ?? null, f),
        Home: () => point(all[0] ?? null, f),
        End: () => point(all.at(-1) ?? null, f),
        "+": () => zoomTo([middle - half, middle + half]),
        "-": () => zoomTo(null),
        Escape: () => (state.at === null ? zoomTo(null) : point(null, f)),
      }[event.key];
      if (!act) return;
      event.preventDefault();
      act();
      if (!document.activeElement?.closest?.("svg")) told.parentElement?.querySelector("svg")?.focus();
    }),
  );
  return group;
}

/** The tip beside the cursor, which a screen reader says aloud. */
function tell(state, f, box, told) {
  const { spec, at } = state,
    format = FORMATS[spec.y ?? "number"],
    cursor = box.querySelector(".cursor");
  told.hidden = at === null;
  if (cursor) cursor.style.visibility = at === null ? "hidden" : "visible";
  if (at === null || !cursor) return;
  cursor.setAttribute("x1", f.across(at));
  cursor.setAttribute("x2", f.across(at));
  const lines = shown(state)
    .map((one) => {
      const here = one.points.find((p) => p[0] === at),
        range = one.band?.find((p) => p[0] === at);
      return here && Number.isFinite(here[1])
        ? { one, y: here[1], range: range && range[1] !== range[2] ? range : null }
        : null;
    })
    .filter(Boolean);
  if (!spec.bars) lines.sort((a, b) => b.y - a.y);
  told.replaceChildren(
    h("b", {}, `${spec.x ?? "round"} ${at}`),
    ...lines.map(({ one, y, range }) =>
      h(
        "div",
        { colour: one.colour },
        h("i"),
        h("span", {}, one.name),
        h("b", {}, format(y)),
        range ? h("small", {}, `${format(range[1])} – ${format(range[2])}`) : null,
      ),
    ),
  );
  const x = f.across(at);
  told.style.left = x > f.width / 2 ? "auto" : `${x + 12}px`;
  told.style.right = x > f.width / 2 ? `${f.width - x + 12}px` : "auto";
}

function listValues(values, state) {
  while (values.children.length > 1) values.lastChild.remove();
  if (!values.open) return;
  const series = shown(state),
    format = FORMATS[state.spec.y ?? "number"];
  const xs = [...new Set(series.flatMap((one) => one.points.map((p) => p[0])))].sort((a, b) => a - b);
  const row = (x) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, String(x)),
      series.map((one) => h("td", {}, format(one.points.find((p) => p[0] === x)?.[1]))),
    );
  values.append(
    h(
      "div",
      { class: "scroll" },
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", { scope: "col" }, state.spec.x ?? "round"),
            series.map((one) => h("th", { scope: "col" }, one.name)),
          ),
        ),
        h("tbody", {}, xs.map(row)),
      ),
    ),
  );
}
