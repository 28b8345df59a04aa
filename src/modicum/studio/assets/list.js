// The list of runs, to choose one or several of; shared by watch, compare and audit.

import { h, number, put, asMetric } from "./dom.js";

const AT_ONCE = 120; // lines that are drawn before anything else is
const folderOf = (row) => (row.name.includes("/") ? row.name.slice(0, row.name.lastIndexOf("/")) : "");
export const baseOf = (row) => row.name.slice(row.name.lastIndexOf("/") + 1) || row.name;

/**
 * Draws `rows` into a list with a search box. With `toggle` rows have boxes to tick, else they are links to
 * `link(row)`. `inAll` counts runs that are still on their way. Returns { element, update(rows), choose(ids) }.
 */
export function runList({ rows, inAll = 0, chosen, link, toggle }) {
  let all = rows,
    marked = new Set(chosen),
    later;
  const list = h("ul", { class: "list" }),
    told = h("p", { class: "note-line", role: "status" });
  const search = h("input", {
    type: "search",
    placeholder: "Find a run",
    "aria-label": "Find a run by name, method, dataset or state",
    oninput: draw,
  });
  const matches = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    return all.filter((row) =>
      words.every((w) => `${row.name} ${row.method} ${row.dataset} ${row.state}`.toLowerCase().includes(w)),
    );
  };
  function draw() {
    const found = matches(),
      byFolder = new Map();
    for (const row of found) byFolder.set(folderOf(row), [...(byFolder.get(folderOf(row)) ?? []), row]);
    const count = Math.max(all.length, inAll);
    told.textContent =
      found.length === all.length ? `${count} run${count === 1 ? "" : "s"}` : `${found.length} of ${count} runs`;
    const parts = [...byFolder].flatMap(([folder, inside]) => [
      ...(folder || toggle ? [() => heading(folder, inside)] : []),
      ...inside.map((row) => () => line(row)),
    ]);
    put(list, ...parts.slice(0, AT_ONCE).map((part) => part()));
    clearTimeout(later); // the rest of a long list when the page stands
    if (parts.length > AT_ONCE)
      later = setTimeout(() => list.append(...parts.slice(AT_ONCE).map((part) => part())), 300);
  }
  function heading(folder, inside) {
    const every = inside.every((row) => marked.has(row.id));
    const button = h("button", { type: "button", onclick: () => all_of(inside) }, every ? "none" : "all");
    return h(
      "li",
      { class: "folder" },
      folder || "in the folder itself",
      toggle && inside.length > 1 ? button : null,
    );
  }
  function all_of(inside) {
    const on = !inside.every((row) => marked.has(row.id));
    inside.forEach((row) => (on ? marked.add(row.id) : marked.delete(row.id)));
    draw();
    toggle([...marked]);
  }
  function line(row) {
    const what = h(
      "span",
      { class: "what" },
      h("b", {}, baseOf(row)),
      h("small", {}, [row.method, row.dataset].filter(Boolean).join(" · ") || "nothing is known yet"),
    );
    const now = h(
      "span",
      { class: "now" },
      row.score !== null ? asMetric(row.main, row.score) : row.certified ? `ε ${number(row.epsilon, "∞")}` : "",
      h("br"),
      h(
        "span",
        { class: `state ${row.state}` },
        row.state === "finished" && row.seed !== null ? `seed ${row.seed}` : row.state,
      ),
    );
    if (!toggle)
      return h(
        "li",
        {},
        h(
          "a",
          { class: "row", href: link(row), "aria-current": String(marked.has(row.id)) },
          h("span", { class: "dot-of", colour: row.colour }),
          what,
          now,
        ),
      );
    const box = h("input", {
      type: "checkbox",
      onchange: () => {
        box.checked ? marked.add(row.id) : marked.delete(row.id);
        toggle([...marked]);
      },
    });
    box.checked = marked.has(row.id);
    return h("li", {}, h("label", { class: "row" }, box, what, now));
  }
  draw();
  return {
    element: h("div", {}, search, told, list),
    update(next) {
      all = next;
      inAll = 0;
      draw();
    },
    choose(ids) {
      marked = new Set(ids);
      draw();
    },
  };
}
